// An engine whose application is gone: in a simulation its process has died. Cold.
#include "agent/agent.h"
#include "agent/leases.h"
#include "agent/raw.h"
#include "agent/transfers.h"

namespace spinwire::agent {
namespace {

void fall_silent(RawQueue& queue) noexcept {
  for (std::uint32_t i = queue.completed; i != queue.accepted; ++i) {
    queue.slot(i).on_received = nullptr;
    queue.slot(i).on_posted = nullptr;
  }
  queue.told = queue.posted;
  queue.to_tell = 0;
}

template <typename T>
void drop_callbacks(base::IndexPool<T>& records) noexcept {
  for (std::uint32_t i = 0; i < records.capacity(); ++i) records.at(i).done = nullptr;
}

}  // namespace

void fall_silent(Shared& s) noexcept {
  s.operations.fall_silent();
  drop_callbacks(s.transfers->offered);
  drop_callbacks(s.leases->loans);
  drop_callbacks(s.leases->holdings);
  for (std::uint32_t i = 0; i < s.agents.capacity(); ++i) {
    if (!s.agents.in_use(i)) continue;
    Agent& a = s.agents.at(i);
    a.handlers = a.next_handlers = {};
    a.on_endpoint = nullptr;
    if (a.raw != nullptr) fall_silent(*a.raw);
  }
}

}  // namespace spinwire::agent
