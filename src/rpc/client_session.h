// A client's session: creation, readiness, closing, failure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "base/internals.h"
#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// Makes the record of a session that is being opened; null if rpc.sessions are open. May throw.
ClientSession* make_client_session(Rpc& r, std::uint32_t window);
/// Resets what a session knows about its server, before an attempt to open it. All slots are free.
void prepare_for_server(Rpc& r, ClientSession& c) noexcept;
/// The first call number of a session that is being opened.
inline std::uint32_t first_call_number(const ClientSession& c) noexcept {
  return c.slots[0].number - c.window;
}
/// The server has answered, and named its datagram queue pair or none. The session is ready when a
/// datagram from there proves the token, or when its connection is ready.
void on_server_answered(Rpc& r, ClientSession& c, const wire::SessionEnd& peer,
                        PeerAddress* peer_address) noexcept;
void mark_ready(Rpc& r, ClientSession& c) noexcept;
/// Ends a session, unless it reconnects (session_reconnect.h): calls with status_of_calls(), unsent
/// ones with status_of_unsent_calls(), long ones when its connection has ended; then on_closed
/// runs.
void end_session(Rpc& r, ClientSession& c, const EndReason& why) noexcept;
void end_session(Rpc& r, ClientSession& c, Status status, ErrorText found,
                 const char* remedy = nullptr) noexcept;
inline void end_session_in_order(Rpc& r, ClientSession& c) noexcept { end_session(r, c, {}); }
inline ClientSession* find_client(Rpc& r, std::uint32_t name) noexcept {
  ClientSession* const c = r.clients.find(wire::RpcName::index(name));
  return c != nullptr && c->name == name ? c : nullptr;
}
/// The value of a session's handle; it repeats after 2^32 uses of a record.
inline std::uint64_t id_of(const ClientSession& c) noexcept {
  return c.name | std::uint64_t{c.generation} << 32;
}
/// The session of a handle; null if it is over.
[[gnu::always_inline]] inline ClientSession* find_session(Rpc& r, std::uint64_t id) noexcept {
  ClientSession* const c = r.clients.find(wire::RpcName::index(static_cast<std::uint32_t>(id)));
  return c != nullptr && id_of(*c) == id ? c : nullptr;
}
/// Prefetches the records of a handle's session.
inline void prefetch_session(const Rpc& r, std::uint64_t id) noexcept {
  r.clients.prefetch(wire::RpcName::index(static_cast<std::uint32_t>(id)),
                     0);  // slot 0: most sessions have no call in flight
}
/// Whether the session is opened again after the server's goodbye.
inline bool comes_back(const ClientSession& c) noexcept {
  return c.reconnect != nullptr && c.reconnect->returns;
}
inline SessionState state_of(const ClientSession& c) noexcept {
  if (!c.is_leaving || c.state != SessionState::ready) [[likely]]
    return c.state;
  return comes_back(c) ? SessionState::opening : SessionState::closing;
}
/// Whether all calls travel over the session's connection.
inline bool uses_connection(const ClientSession& c) noexcept {
  return c.transport == Transport::connection;
}
/// Longest request or reply of an inline call, bytes; 0 unless the session is ready.
inline std::size_t max_inline_call(const ClientSession& c) noexcept {
  return state_of(c) == SessionState::ready ? c.max_inline_call : 0;
}
/// The id of the call that was accepted last; there was one.
inline CallId accepted_call(const ClientSession& c) noexcept { return {c.last_call_id}; }
inline Session handle(const Rpc& r, const ClientSession& c) noexcept {
  return detail::make<Session>(r.context.slot, id_of(c));
}
/// Whether the session still exists and is ready, after a callback.
inline bool is_ready(Rpc& r, std::uint32_t name) noexcept {
  const ClientSession* const c = find_client(r, name);
  return c != nullptr && c->state == SessionState::ready;
}
/// Whether the session still exists and is being opened, after a callback.
inline bool is_opening(Rpc& r, std::uint32_t name) noexcept {
  const ClientSession* const c = find_client(r, name);
  return c != nullptr && c->state == SessionState::opening;
}
/// Whether the server of a session that is being opened has answered, but not yet by a datagram.
/// Each server may name the queue pair and the session of another one, and requests carry no proof.
/// So no request is sent before a pong has proved the token.
inline bool awaits_proof(const ClientSession& c) noexcept {
  const bool is_between_attempts = c.reconnect != nullptr && c.reconnect->backing_off;
  return c.state == SessionState::opening && c.peer_address != nullptr && !uses_connection(c) &&
         !is_between_attempts;
}
/// Whether a call stays while its session is not ready. `asked`: CallOptions::when_not_ready.
inline bool waits_until_ready(const ClientSession& c, std::optional<WhenNotReady> asked) noexcept {
  return asked.value_or(c.when_not_ready) == WhenNotReady::wait;
}
/// Whether CallOptions::when_not_ready of a call differs from the session's.
inline bool overrides_session(const ClientSession& c, std::optional<WhenNotReady> asked) noexcept {
  return asked && *asked != c.when_not_ready;
}
/// Whether a call that cannot be sent now may wait.
inline bool may_wait(const ClientSession& c, std::optional<WhenNotReady> asked) noexcept {
  const SessionState state = state_of(c);
  return state == SessionState::ready ||
         (state == SessionState::opening && waits_until_ready(c, asked));
}
/// Whether the server may be lost, and was not heard since; see doubt_server().
inline bool is_doubted(const ClientSession& c) noexcept {
  return c.doubted_since != 0 && last_heard_from(c) <= c.doubted_since;
}
/// Whether the server of a ready session takes no more calls: it said so, or has refused one.
inline bool takes_no_calls(const ClientSession& c) noexcept {
  return c.is_leaving || (c.reconnect != nullptr && c.reconnect->refused_at != 0);
}
/// Whether the session was interrupted, or could not be opened, and has not been ready since.
inline bool has_lost_its_server(const ClientSession& c) noexcept {
  return c.reconnect != nullptr && c.reconnect->first.status != Status::ok;
}
/// How the calls of an ended session end that wait. `was_ready`: the session. A call that waits has
/// not run; of a server that has refused calls, the application is told so.
inline Status status_of_waiting_calls(const ClientSession& c, const EndReason& why,
                                      bool was_ready) noexcept {
  const bool has_refused = c.reconnect != nullptr && c.reconnect->refused_at != 0;
  return has_refused ? Status::not_connected : status_of_unsent_calls(why, was_ready);
}
/// Makes the session's timer fire at `tick` or before.
inline void schedule_check(Rpc& r, ClientSession& c, std::uint64_t tick) noexcept {
  if (!c.timer.scheduled() || c.timer.deadline > tick) [[unlikely]]
    r.context.timers.reschedule(c.timer, tick);
}
/// Sets send_window from the server's window and cwnd; 0 if no call can go out as a datagram now.
inline void update_send_window(ClientSession& c) noexcept {
  if (c.state != SessionState::ready || takes_no_calls(c) || c.transport != Transport::datagram) {
    c.send_window = 0;
    return;
  }
  const std::uint32_t flow =
      c.congestion.max_cwnd == 0 ? c.server_window : std::max(1u, c.congestion.cwnd / kCwndPerCall);
  const std::uint32_t most = c.congestion.next_send != 0 ? 0 : flow;
  c.send_window = static_cast<std::uint16_t>(std::min<std::uint32_t>(c.server_window, most));
}
Status begin_close(Rpc& r, ClientSession& c) noexcept;
/// Handles the path challenge of a session that is being opened. Its server is not known yet, so
/// any host may have sent the challenge.
void on_path_challenge(Rpc& r, const wire::RpcHeader& header, const std::byte* payload) noexcept;
void on_session_answer(Rpc& r, const wire::RpcHeader& header, const ibv_wc& wc,
                       const std::byte* grh) noexcept;
void on_client_timer(Rpc& r, ClientSession& c) noexcept;

}  // namespace spinwire::rpc
