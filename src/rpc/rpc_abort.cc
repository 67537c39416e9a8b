// Aborts all sessions without running a callback, as if the process had died. Cold.
#include "rpc/backlog.h"
#include "rpc/rpc.h"
#include "rpc/transport/connection_call.h"

namespace spinwire::rpc {
namespace {

void abort(Rpc& r, ConnectionClient& b) noexcept {
  for (std::uint32_t slot = 0; slot < b.window; ++slot) b.slots[slot].call.done = [](Reply&) {};
  for (std::uint32_t w = 0; w < b.backlog_count; ++w) backlog_at(r, b, w).done = [](Reply&) {};
  // Its own handlers are gone with the application's.
  if (agent::Agent* const a = agent_of(r, b); a != nullptr) set_closed_handler(r, b.session, *a);
}

}  // namespace

void abort(Rpc& r) noexcept {
  for (auto& handler : r.handlers) handler = nullptr;
  for (std::uint32_t i = 0; i < r.clients.capacity(); ++i) {
    if (!r.clients.in_use(i)) continue;
    ClientSession& c = r.clients.at(i);
    if (c.name == 0) continue;
    c.on_ready = nullptr;
    c.on_closed = nullptr;
    for (std::uint32_t slot = 0; slot < c.window; ++slot) c.slots[slot].done = [](Reply&) {};
    for (std::uint32_t w = 0; w < c.backlog_count; ++w) {
      backlog_at(r, c, w).done = [](Reply&) {};
    }
    if (c.connection != nullptr) abort(r, *c.connection);
  }
}

}  // namespace spinwire::rpc
