// Dropping all callbacks, as if the process had died: simulations end engines in this way. Cold.
#include "agent/agent.h"
#include "agent/lease_table.h"
#include "agent/raw_queue.h"
#include "agent/rendezvous.h"

namespace spinwire::agent {
namespace {

void drop_callbacks(RawQueue& queue) noexcept {
  for (std::uint32_t i = queue.completed; i != queue.accepted; ++i) {
    queue.slot(i).on_received = nullptr;
    queue.slot(i).on_posted = nullptr;
  }
  queue.notified = queue.posted;
  queue.callbacks_due = 0;
}

template <typename Records>
void drop_callbacks(Records& records) noexcept {
  for (std::uint32_t i = 0; i < records.capacity(); ++i) records.at(i).done = nullptr;
}

/// Drops the callbacks of automatic renewals.
void drop_renewals(LeaseRecords<LeaseHeld>& records) noexcept {
  for (std::uint32_t i = 0; i < records.capacity(); ++i) records.at(i).on_auto_end = nullptr;
}

}  // namespace

void abort(EngineContext& ctx) noexcept {
  ctx.operations.drop_callbacks();
  drop_callbacks(ctx.rendezvous->sends);
  drop_callbacks(ctx.leases->granted);
  drop_callbacks(ctx.leases->held);
  drop_renewals(ctx.leases->held);
  for (std::uint32_t i = 0; i < ctx.agents.capacity(); ++i) {
    if (!ctx.agents.in_use(i)) continue;
    Agent& a = ctx.agents.at(i);
    use_handlers(a, {});
    a.next_handlers = {};
    if (a.setup.endpoints != nullptr) a.setup.endpoints->on_endpoint = nullptr;
    if (a.raw != nullptr) drop_callbacks(*a.raw);
  }
}

}  // namespace spinwire::agent
