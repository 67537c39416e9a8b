// Calls that wait for their session's window, or for receives and send entries of the engine.
#pragma once

#include <cstdint>

#include "rpc/rpc.h"

namespace spinwire::rpc {

inline BackloggedCall& backlog_at(const Rpc& r, const ClientSession& c, std::uint32_t i) noexcept {
  return c.backlog[place_in_ring(r.context.config.rpc.backlog, c.backlog_first, i)];
}
/// Keeps a call until it can be sent. Errors: not_connected, would_block (rpc.backlog calls wait),
/// no_buffer. Cold unless the window is full.
Status enqueue_call(Rpc& r, ClientSession& c, CallRequest call, const ReplyCallback& done) noexcept;
/// Sends calls from the backlog while the session and the engine have room.
void send_backlog(Rpc& r, ClientSession& c) noexcept;
/// Ends entry `i` of the backlog, with its own outcome if it has one.
void end_backlogged(Rpc& r, ClientSession& c, std::uint32_t i, Status status) noexcept;
/// Sends from the backlogs of sessions that waited for receives or send entries of the engine.
[[gnu::cold, gnu::noinline]] void resume_blocked_sessions(Rpc& r) noexcept;

}  // namespace spinwire::rpc
