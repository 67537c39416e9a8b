// A client's session: made, ready, closed or failed, and its timer.
#include "rpc/client_session.h"

#include <algorithm>
#include <bit>
#include <new>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "base/internals.h"
#include "rpc/backlog.h"
#include "rpc/call_cancel.h"
#include "rpc/client_call.h"
#include "rpc/retransmission.h"
#include "rpc/session_liveness.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::rpc {

using wire::RpcHeader;
using wire::RpcKind;

void send_control(Rpc& r, const ClientSession& c, RpcKind kind, std::uint32_t number) noexcept {
  if (c.transport == Transport::datagram)
    (void)send(r, c.peer_address->destination, {c.peer_session, number, 0, kind, 0, 0, 0}, {});
}

ClientSession* make_client_session(Rpc& r, std::uint32_t window) {
  const std::uint32_t index = r.clients.acquire(window);
  if (index == kNone) return nullptr;
  ClientSession& c = r.clients.at(index);
  c.slots = r.clients.places(c);
  const std::uint32_t first = random_call_number(r);
  for (std::uint32_t i = 0; i < window; ++i) c.slots[i].number = first + window + i;
  c.generation = r.clients.generation(index);
  c.name = wire::RpcName::make(index, c.generation % 4095 + 1);
  c.window = static_cast<std::uint16_t>(window);
  c.free_slots = ~std::uint64_t{0} >> (kWindowMax - window);
  c.in_flight = 0;
  c.backlog_first = c.backlog_count = c.last_call_id = 0;
  c.server_window = 1;
  c.send_window = 0;
  c.congestion = {};
  if (r.target_rtt != ~std::uint64_t{0})
    c.congestion.cwnd = c.congestion.max_cwnd = window * kCwndPerCall;
  c.state = SessionState::opening;
  c.srtt = c.rttvar = c.silent_ticks = 0;
  c.min_rtt = c.recent_min_rtt = ~std::uint64_t{0};
  c.rto = r.min_rto;
  c.peer_session = 0;
  c.peer_address = nullptr;
  c.transport = Transport::datagram;
  c.handshake = {};
  c.aligned_at_call = kNone;
  c.timer.index = index;
  c.timer.kind = kClientTimer;
  return &c;
}

void set_peer(Rpc& r, ClientSession& c, const wire::SessionEnd& peer,
              PeerAddress* peer_address) noexcept {
  c.peer_address = peer_address;
  c.transport = peer_address->transport;
  c.peer_session = peer.name;
  c.join_token = peer.token;
  c.max_inline_call =
      static_cast<std::uint16_t>(wire::rpc_payload(std::min<std::uint32_t>(peer.mtu, r.local.mtu)));
  if (c.transport == Transport::datagram) return mark_ready(r, c);
  if (const Status status = open_sole_connection(r, c); status != Status::ok)
    fail_session(r, c, status, "there is no memory for its calls");
}

void mark_ready(Rpc& r, ClientSession& c) noexcept {
  c.state = SessionState::ready;
  update_send_window(c);
  c.last_heard = c.last_control = c.last_liveness_check = r.context.clock.now();
  r.context.timers.reschedule(c.timer, c.last_heard + r.keepalive_interval);
  // A server that is full forgets sessions whose client it has never heard.
  send_control(r, c, RpcKind::ping, first_call_number(c) | wire::kNoCallsOver);
  if (c.on_ready) c.on_ready(detail::make<Session>(r.context.slot, id_of(c)));
}

void on_path_challenge(Rpc& r, const RpcHeader& header, const std::byte* payload) noexcept {
  const ClientSession* const c = find_client(r, header.session);
  if (c == nullptr || c->state != SessionState::opening) {  // repeated, or a stranger's
    ++r.stats.late;
    return;
  }
  std::uint64_t token = 0;
  std::memcpy(&token, payload, wire::kPathTokenBytes);
  if (token != 0) r.dialogues.on_path_challenge(*c, token);
}

void on_server_control(Rpc& r, const RpcHeader& header, const ibv_wc& wc,
                       const std::byte* grh) noexcept {
  ClientSession* const c = find_client(r, header.session);
  const bool ends = header.kind == RpcKind::closed || header.kind == RpcKind::unknown;
  if (c == nullptr && ends) {  // the answer to a close that was repeated
    ++r.stats.late;
    return;
  }
  if (c == nullptr || c->transport != Transport::datagram || c->peer_address == nullptr ||
      !c->peer_address->source_filter.matches(wc, grh)) {
    ++r.stats.bad_datagrams;
    return;
  }
  c->last_control = r.context.now;
  if (header.kind == RpcKind::closed) return close_session(r, *c);
  if (header.kind != RpcKind::unknown || header.number != c->peer_session) return;
  if (c->state == SessionState::closing) return close_session(r, *c);
  fail_session(r, *c, Status::peer_lost,
               "it has forgotten the session: for too long it had heard nothing");
}

Status close(Rpc& r, ClientSession& c) noexcept {
  if (c.state != SessionState::opening && c.state != SessionState::ready)
    return Status::not_connected;
  const std::uint64_t now = r.context.clock.now();
  const bool was_ready = std::exchange(c.state, SessionState::closing) == SessionState::ready;
  const bool connected = close_client_connection(r, c);
  if (was_ready) {
    update_send_window(c);
    send_control(r, c, RpcKind::close);
  } else {
    r.dialogues.drop(c);
  }
  cancel_all(r, c, Status::flushed);
  if (was_ready && c.transport == Transport::datagram) {
    c.deadline = now + r.close_timeout;
    r.context.timers.reschedule(c.timer, now + r.min_rto);
  } else if (was_ready && connected) {  // the connection's end comes first
    c.deadline = now + r.close_timeout;
    r.context.timers.reschedule(c.timer, c.deadline);
  } else {
    c.deadline = 0;  // no server to hear from: it ends with the callbacks of its calls
    r.context.timers.cancel(c.timer);
  }
  return Status::ok;
}

namespace {

Error reason(const ClientSession& c, Status status, const char* found) noexcept {
  try {
    const bool opened = c.state != SessionState::opening;
    return {status, (opened ? "talk with " : "open a session with ") + c.address, found,
            opened ? "see whether its process is there and polls"
                   : "see whether an engine listens there, and what it says"};
  } catch (...) {
    return base::out_of_memory();
  }
}

}  // namespace

void fail_session(Rpc& r, ClientSession& c, Status status, const char* found) noexcept {
  fail_session(r, c, reason(c, status, found));
}

void close_session(Rpc& r, ClientSession& c) noexcept {
  fail_session(r, c, Error{Status::ok, {}, {}, {}});
}

void fail_session(Rpc& r, ClientSession& c, const Error& why) noexcept {
  if (c.state == SessionState::closed) return;
  if (c.state == SessionState::opening) r.dialogues.drop(c);
  if (c.connection != nullptr && !release_client_connection(r, c, why)) return;
  c.state = SessionState::closed;
  update_send_window(c);
  end_calls(r, c, why.status == Status::ok ? Status::flushed : why.status);
  if (c.on_closed) c.on_closed(detail::make<Session>(r.context.slot, id_of(c)), why);
  r.context.timers.cancel(c.timer);
  if (c.peer_address != nullptr) release_peer_address(r, std::exchange(c.peer_address, nullptr));
  if (std::exchange(c.is_blocked, false)) r.blocked_sessions.erase(c);
  if (std::exchange(c.cancellation_pending, false)) r.pending_cancellations.erase(c);
  c.name = 0;
  c.on_ready = nullptr;
  c.on_closed = nullptr;
  r.clients.release(c.timer.index);
}

namespace {

/// Checks calls that are due before the retransmission timer, and the backlog. Returns the tick of
/// the next check. The session may be gone afterwards.
std::uint64_t check_own_timers(Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  const std::uint32_t name = c.name;
  std::uint64_t next = now + r.keepalive_interval;
  if (c.congestion.next_send != 0) {
    if (now >= c.congestion.next_send) {
      c.congestion.next_send = 0;
      update_send_window(c);
    } else {
      next = std::min(next, c.congestion.next_send);
    }
  }
  for (std::uint32_t slot = 0; slot < c.window; ++slot) {
    if ((c.free_slots & bit(slot)) != 0 || !c.slots[slot].on_session_timer) continue;
    next = std::min(next, check_slot(r, c, slot, now));
    if (c.name != name || c.state != SessionState::ready) return next;
  }
  for (std::uint32_t i = 0; i < c.backlog_count;) {
    const std::uint64_t due = backlog_at(r, c, i).deadline;
    if (now < due) {
      next = std::min(next, due);
      ++i;
      continue;
    }
    end_backlogged(r, c, i, Status::timed_out);
    if (c.name != name || c.state != SessionState::ready) return next;
    i = 0;  // its callback may have ended others
  }
  send_backlog(r, c);
  return next;
}

}  // namespace

void on_client_timer(Rpc& r, ClientSession& c) noexcept {
  const std::uint64_t now = r.context.clock.now();
  if (c.state == SessionState::opening) {
    return fail_session(r, c, Status::timed_out, "no answer came in time");
  }
  if (c.state == SessionState::closing) {
    if (now >= c.deadline) return close_session(r, c);
    send_control(r, c, RpcKind::close);
    return r.context.timers.schedule(c.timer, std::min(now + 2 * c.rto, c.deadline));
  }
  if (!check_server_liveness(r, c, now)) return;
  const std::uint32_t name = c.name;
  std::uint64_t next = check_own_timers(r, c, now);
  if (c.name == name && c.state == SessionState::ready && c.connection != nullptr)
    next = std::min(next, check_connection_calls(r, c, now));
  if (c.name == name && c.state == SessionState::ready) schedule_check(r, c, next);
}

}  // namespace spinwire::rpc
