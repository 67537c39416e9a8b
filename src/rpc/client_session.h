// A client's session: made, ready, closed, failed.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rpc/rpc.h"

namespace spinwire::rpc {

/// Sends the server a datagram about the session itself, if datagrams are its transport.
void send_control(Rpc& r, const ClientSession& c, wire::RpcKind kind,
                  std::uint32_t number = 0) noexcept;
/// Makes the record of a session that is being opened; null if rpc.sessions are open. May throw.
ClientSession* make_client_session(Rpc& r, std::uint32_t window);
/// The first call number of a session that is being opened.
inline std::uint32_t first_call_number(const ClientSession& c) noexcept {
  return c.slots[0].number - c.window;
}
/// The server has answered: the session is ready, or will be when its connection is.
void set_peer(Rpc& r, ClientSession& c, const wire::SessionEnd& peer,
              PeerAddress* peer_address) noexcept;
void mark_ready(Rpc& r, ClientSession& c) noexcept;
/// Ends a session at once: its calls end with the status, or `flushed` if that is ok; then
/// on_closed runs.
void fail_session(Rpc& r, ClientSession& c, const Error& why) noexcept;
void fail_session(Rpc& r, ClientSession& c, Status status, const char* found) noexcept;
/// Ends a session that was closed in order: calls end with `flushed`, on_closed gets ok.
void close_session(Rpc& r, ClientSession& c) noexcept;
inline ClientSession* find_client(Rpc& r, std::uint32_t name) noexcept {
  ClientSession* const c = r.clients.find(wire::RpcName::index(name));
  return c != nullptr && c->name == name ? c : nullptr;
}
/// The value of a session's handle; it repeats after 2^32 uses of a record.
inline std::uint64_t id_of(const ClientSession& c) noexcept {
  return c.name | std::uint64_t{c.generation} << 32;
}
/// Has the session's timer fire at `tick` or before.
inline void schedule_check(Rpc& r, ClientSession& c, std::uint64_t tick) noexcept {
  if (!c.timer.scheduled() || c.timer.deadline > tick) [[unlikely]]
    r.context.timers.reschedule(c.timer, tick);
}
/// Sets send_window from the server's window and cwnd: 0 if calls cannot go out as datagrams now.
inline void update_send_window(ClientSession& c) noexcept {
  if (c.state != SessionState::ready || c.transport != Transport::datagram) {
    c.send_window = 0;
    return;
  }
  const std::uint32_t flow =
      c.congestion.max_cwnd == 0 ? c.server_window : std::max(1u, c.congestion.cwnd / kCwndPerCall);
  const std::uint32_t most = c.congestion.next_send != 0 ? 0 : flow;
  c.send_window = static_cast<std::uint16_t>(std::min<std::uint32_t>(c.server_window, most));
}
Status close(Rpc& r, ClientSession& c) noexcept;
/// Of a session that is being opened: its server is not known yet, so anybody may have sent it.
void on_path_challenge(Rpc& r, const wire::RpcHeader& header, const std::byte* payload) noexcept;
void on_server_control(Rpc& r, const wire::RpcHeader& header, const ibv_wc& wc,
                       const std::byte* grh) noexcept;
void on_client_timer(Rpc& r, ClientSession& c) noexcept;

}  // namespace spinwire::rpc
