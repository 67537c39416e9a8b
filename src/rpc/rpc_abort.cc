// Aborts all sessions without running a callback, as if the process had died. Cold.
#include "rpc/backlog.h"
#include "rpc/room_for_calls.h"
#include "rpc/rpc_state.h"
#include "rpc/transport/connection_call.h"

namespace spinwire::rpc {
namespace {

void drop_callback(BackloggedCall& call) noexcept {
  call.done = [](Reply&) {};
}

void abort(Rpc& r, ConnectionClient& b) noexcept {
  for (std::uint32_t slot = 0; slot < b.window; ++slot) drop_callback(b.slots[slot].call);
  for (std::uint32_t i = 0; i < b.backlog_count; ++i) drop_callback(backlog_at(b, i));
  // The session's own handlers are gone with the application's.
  if (agent::Agent* const a = agent_of(r, b); a != nullptr) keep_closed_handler(r, b.session, *a);
}

}  // namespace

void abort(Rpc& r) noexcept {
  r.has_aborted = true;
  for (auto& handler : r.handlers) handler = nullptr;
  set_reply_writable_handler(r, nullptr);
  r.clients.for_each([&r](ClientSession& c) {
    c.on_ready = nullptr;
    c.on_closed = nullptr;
    stop_waiting_for_room(r, c);
    c.on_writable = nullptr;
    if (c.reconnect != nullptr) c.reconnect->on_interrupted = nullptr;
    for (std::uint32_t slot = 0; slot < c.window; ++slot) c.slots[slot].done = [](Reply&) {};
    for (std::uint32_t i = 0; i < c.backlog_count; ++i) drop_callback(backlog_at(c, i));
    if (c.connection != nullptr) abort(r, *c.connection);
  });
}

}  // namespace spinwire::rpc
