// The sessions of an engine whose application is gone: in a simulation its process has died. Cold.
#include "rpc/bulk.h"
#include "rpc/rpc.h"

namespace spinwire::rpc {
namespace {

void fall_silent(Rpc& r, BulkClient& b) noexcept {
  for (std::uint32_t slot = 0; slot < b.window; ++slot) b.calls[slot].asked.done = [](Reply&) {};
  for (std::uint32_t w = 0; w < b.waiting_count; ++w)
    b.waiting[(b.waiting_first + w) % r.context.config.rpc.backlog].done = [](Reply&) {};
  // Its own handlers are gone with the application's.
  if (agent::Agent* const a = agent_of(r, b); a != nullptr) hear_end(r, b.session, *a);
}

}  // namespace

void fall_silent(Rpc& r) noexcept {
  for (auto& handler : r.handlers) handler = nullptr;
  for (std::uint32_t i = 0; i < r.clients.capacity(); ++i) {
    if (!r.clients.in_use(i)) continue;
    ClientSession& c = r.clients.at(i);
    if (c.name == 0) continue;
    c.on_ready = nullptr;
    c.on_closed = nullptr;
    for (std::uint32_t slot = 0; slot < c.window; ++slot) c.calls[slot].done = [](Reply&) {};
    for (std::uint32_t w = 0; w < c.waiting_count; ++w) {
      c.waiting[(c.waiting_first + w) % r.context.config.rpc.backlog].done = [](Reply&) {};
    }
    if (c.bulk != nullptr) fall_silent(r, *c.bulk);
  }
}

}  // namespace spinwire::rpc
