// A client's session: creation, readiness, closing, failure, and its timer.
#include "rpc/client_session.h"

#include <algorithm>
#include <bit>
#include <new>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "base/internals.h"
#include "base/secret_word.h"
#include "rpc/backlog.h"
#include "rpc/call_cancel.h"
#include "rpc/client_call.h"
#include "rpc/refused_calls.h"
#include "rpc/retransmission.h"
#include "rpc/room_for_calls.h"
#include "rpc/session_goodbye.h"
#include "rpc/session_liveness.h"
#include "rpc/session_reconnect.h"
#include "rpc/session_recording.h"
#include "rpc/transport/connection_transport.h"
#include "rpc/unsent.h"
#include "wire/goodbye.h"

namespace spinwire::rpc {

using wire::RpcHeader;
using wire::RpcKind;

ClientSession* make_client_session(Rpc& r, std::uint32_t window) {
  const std::uint32_t index = r.clients.acquire(window);
  if (index == kNone) return nullptr;
  ClientSession& c = r.clients.at(index);
  c.slots = r.clients.places(c);
  c.generation = r.clients.generation(index);
  c.name = make_name(index, c.generation, kClientGenerations);
  c.window = static_cast<std::uint16_t>(window);
  c.free_slots = ~std::uint64_t{0} >> (kWindowMax - window);
  c.in_flight = 0;
  c.event_source = {};
  c.backlog_first = c.backlog_count = c.last_call_id = 0;
  c.backlog_room = r.context.config.rpc.backlog;
  c.retransmissions = 0;
  c.state = SessionState::opening;
  // Of calls that wait for the first answer: longer ones wait for the connection.
  c.max_inline_call = 0;
  if (r.port != nullptr) {
    const std::uint32_t longest = std::max(r.local.mtu, r.port->longest_direct());
    c.max_inline_call = static_cast<std::uint16_t>(wire::rpc_payload(longest));
  }
  prepare_for_server(r, c);
  c.timer.index = index;
  c.timer.kind = kClientTimer;
  return &c;
}

void prepare_for_server(Rpc& r, ClientSession& c) noexcept {
  const std::uint32_t first = random_call_number(r);
  for (std::uint32_t i = 0; i < c.window; ++i) c.slots[i].number = first + c.window + i;
  c.server_window = 1;
  c.send_window = 0;
  c.congestion = {};
  if (r.target_rtt != ~std::uint64_t{0})
    c.congestion.cwnd = c.congestion.max_cwnd = c.window * kCwndPerCall;
  c.srtt = c.rttvar = c.liveness.silent_ticks = 0;
  c.min_rtt = c.recent_min_rtt = ~std::uint64_t{0};
  c.rto = r.min_rto;
  c.peer_session = 0;
  c.peer_address = nullptr;
  c.probes = {};
  c.transport = Transport::datagram;
  c.handshake = {};
  c.aligned_at_call = kNone;
  c.doubted_since = 0;
  c.is_leaving = false;
  c.goodbye = {};
}

namespace {

/// Sends the server a ping, whose pong proves the token. Also shows a full server that the client
/// is alive: it forgets sessions whose client it has never heard.
void send_first_ping(Rpc& r, const ClientSession& c) noexcept {
  send_session_datagram(r, c, RpcKind::ping, first_call_number(c) | wire::kNoCallsOver);
}
/// When a session that awaits the proof asks again. The pauses double, up to an eighth of the time
/// that it has. Its timer may fire earlier, for calls that wait. A malformed answer counts as a
/// ping, at the tick when its poll began. That may be before the first ping.
std::uint64_t next_ping(const Rpc& r, const ClientSession& c) noexcept {
  const std::uint64_t first = c.liveness.last_check;
  const std::uint64_t longest =
      std::max<std::uint64_t>((c.deadline - std::min(first, c.deadline)) / 8, 1);
  const std::uint64_t last = c.liveness.last_ping_or_close;
  return last + std::min(std::max(last - std::min(first, last), r.min_rto), longest);
}
void ask_for_proof(Rpc& r, ClientSession& c) noexcept {
  c.liveness.last_check = c.liveness.last_ping_or_close = r.context.clock.now();
  send_first_ping(r, c);
  schedule_check(r, c, next_ping(r, c));
}
/// Asks again if it is time: the ping or its pong was lost. Returns the tick of the next try.
std::uint64_t ask_again(Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  if (now >= next_ping(r, c)) {
    send_first_ping(r, c);
    c.liveness.last_ping_or_close = now;
  }
  return next_ping(r, c);
}

}  // namespace

void on_server_answered(Rpc& r, ClientSession& c, const wire::SessionEnd& peer,
                        PeerAddress* peer_address) noexcept {
  c.peer_address = peer_address;
  c.transport = peer_address->transport;
  c.peer_session = peer.name;
  c.token = peer.token;
  c.max_inline_call =
      static_cast<std::uint16_t>(wire::rpc_payload(longest_datagram(r, peer, *peer_address)));
  if (c.backlog_count != 0) {
    const std::uint32_t name = c.name;
    reroute_backlog(r, c);
    if (!is_opening(r, name)) return;
  }
  if (c.transport == Transport::datagram) return ask_for_proof(r, c);
  if (!open_mandatory_connection(r, c))
    end_session(r, c, Status::no_memory, "there is no memory for its calls");
}

void mark_ready(Rpc& r, ClientSession& c) noexcept {
  c.state = SessionState::ready;
  record_state(r, c);
  update_send_window(c);
  c.last_heard = c.liveness.last_ping_or_close = c.liveness.last_check = r.context.clock.now();
  r.context.timers.reschedule(c.timer, next_keepalive(r, c.last_heard));
  if (c.reconnect != nullptr) {
    c.reconnect->ready_at = c.last_heard;
    c.reconnect->first.status = Status::ok;
  }
  // Calls that have waited go before those of on_ready.
  if (c.backlog_count != 0) send_backlog(r, c);
  if (c.connection != nullptr && c.transport == Transport::datagram) connect_backlog(r, c);
  if (c.on_ready) c.on_ready(handle(r, c));
}

void on_path_challenge(Rpc& r, const RpcHeader& header, const std::byte* payload) noexcept {
  const ClientSession* const c = find_client(r, header.session);
  if (c == nullptr || c->state != SessionState::opening ||
      c->peer_address != nullptr) {  // repeated, or sent by another host
    ++r.stats.late_replies;
    return;
  }
  if (!base::is_same_secret(wire::proof_of(header),
                            wire::session_proof(c->token))) {  // not from the host we dialled
    ++r.stats.bad_datagrams;
    return;
  }
  std::uint64_t token = 0;
  std::memcpy(&token, payload, wire::kPathTokenBytes);
  if (token != 0) r.dialogues.on_path_challenge(*c, token);
}

namespace {

bool is_from_server(const ClientSession& c, const RpcHeader& header, const ibv_wc& wc,
                    const std::byte* grh) noexcept {
  return c.transport == Transport::datagram && c.peer_address != nullptr &&
         c.peer_address->source_filter.matches(wc, grh) &&
         base::is_same_secret(wire::proof_of(header), wire::session_proof(c.token));
}

/// Whether a datagram that is not from the session's present server is late, or early.
bool is_untimely(const ClientSession* c, RpcKind kind) noexcept {
  // The repeated answer to a close, or a goodbye that crossed it.
  if (c == nullptr)
    return kind == RpcKind::closed || kind == RpcKind::unknown || kind == RpcKind::goodbye;
  if (c->state != SessionState::opening) return false;
  // The answer to the close of the session that is opened again under its name.
  const bool is_former = kind == RpcKind::closed && c->reconnect != nullptr;
  return is_former || kind == RpcKind::goodbye;  // which overtakes the server's answer
}

}  // namespace

void on_session_answer(Rpc& r, const RpcHeader& header, const ibv_wc& wc,
                       const std::byte* grh) noexcept {
  ClientSession* const c = find_client(r, header.session);
  if (c == nullptr || !is_from_server(*c, header, wc, grh)) {
    ++(is_untimely(c, header.kind) ? r.stats.late_replies : r.stats.bad_datagrams);
    return;
  }
  c->liveness.last_ping_or_close = r.context.now;
  if (header.kind == RpcKind::pong) {
    if (awaits_proof(*c)) mark_ready(r, *c);
    return;
  }
  if (header.kind == RpcKind::goodbye) {
    if (!on_goodbye(r, *c, header.number)) ++r.stats.bad_datagrams;
    return;
  }
  if (header.kind == RpcKind::closed) {
    Goodbye goodbye;
    if (!wire::decode(header.number, goodbye)) return void(++r.stats.bad_datagrams);
    // The answer to our close says nothing.
    if (c->state != SessionState::closing) c->goodbye = goodbye;
    return on_closed_by_server(r, *c);
  }
  if (header.kind != RpcKind::unknown || header.number != c->peer_session) return;
  if (c->state == SessionState::closing) return end_session_in_order(r, *c);
  end_session(r, *c, Status::peer_lost,
              "the server dropped the session: it received nothing for its peer_timeout");
}

Status begin_close(Rpc& r, ClientSession& c) noexcept {
  if (c.state != SessionState::opening && c.state != SessionState::ready)
    return Status::not_connected;
  const std::uint64_t now = r.context.clock.now();
  const bool has_server = c.state == SessionState::ready || awaits_proof(c);
  c.state = SessionState::closing;
  record_state(r, c);
  const bool connected = close_client_connection(r, c);
  if (has_server) {
    update_send_window(c);
    send_session_datagram(r, c, RpcKind::close);
  } else {
    r.dialogues.drop(c);
  }
  cancel_all(r, c, Status::flushed);
  // Without a server to hear from, the callbacks of its calls end the session. The end of a
  // connection comes first.
  const bool repeats = has_server && c.transport == Transport::datagram;
  const bool waits = repeats || (has_server && connected);
  c.deadline = waits ? now + r.timeouts.close : 0;
  waits ? r.context.timers.reschedule(c.timer, repeats ? now + r.min_rto : c.deadline)
        : r.context.timers.cancel(c.timer);
  return Status::ok;
}

void end_session(Rpc& r, ClientSession& c, Status status, ErrorText found,
                 const char* remedy) noexcept {
  const bool opened = c.state != SessionState::opening;
  ErrorText asked(opened ? "talk with " : "open a session with ");
  try {
    asked.value += c.address;
  } catch (...) {  // the status is enough
  }
  if (remedy == nullptr)
    remedy = opened ? "see whether its process is there and polls"
                    : "see whether an engine listens there, and what it says";
  end_session(r, c, Error{status, std::move(asked), std::move(found), remedy});
}

namespace {

/// What on_closed gets.
Error closing_error(const ClientSession& c, const EndReason& why) noexcept {
  if (!why)
    return base::goodbye_error(Status::ok, base::format("talk with {}", c.address), c.goodbye);
  Error error = *why;
  if (c.goodbye.reason != GoodbyeReason::none) error.goodbye = c.goodbye;
  return error;
}

}  // namespace

void end_session(Rpc& r, ClientSession& c, const EndReason& why) noexcept {
  if (c.state == SessionState::closed) return;
  if (why) record(r, c, *why);
  if (can_reconnect(r, c, why)) return interrupt_session(r, c, *why);
  const bool was_opening =
      c.state == SessionState::opening || (c.connection != nullptr && c.connection->was_opening);
  if (c.state == SessionState::opening) r.dialogues.drop(c);
  if (c.connection != nullptr && !release_client_connection(r, c, why)) return;
  c.state = SessionState::closed;
  record_state(r, c);
  update_send_window(c);
  end_calls(r, c, status_of_calls(why), status_of_waiting_calls(c, why, !was_opening));
  if (c.on_closed) c.on_closed(handle(r, c), closing_error(c, final_reason(c, why)));
  r.context.timers.cancel(c.timer);
  forget_unsent(r, c);
  if (c.peer_address != nullptr) release_peer_address(r, std::exchange(c.peer_address, nullptr));
  stop_waiting_for_room(r, c);
  if (std::exchange(c.is_blocked, false)) r.blocked_sessions.erase(c);
  if (std::exchange(c.cancellation_pending, false)) r.pending_cancellations.erase(c);
  c.name = 0;
  c.on_ready = nullptr;
  c.on_closed = nullptr;
  c.on_writable = nullptr;
  c.reconnect.reset();
  c.private_data.reset();
  c.peer.reset();
  r.clients.release(c.timer.index);
  release_spares_without_sessions(r);
}

namespace {

/// Checks calls that are due before the retransmission timer, and the backlog. Returns the tick of
/// the next check. The session may be gone afterwards.
std::uint64_t check_own_timers(Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  const std::uint32_t name = c.name;
  std::uint64_t next = next_keepalive(r, now);
  if (c.congestion.next_send != 0) {
    if (now >= c.congestion.next_send) {
      c.congestion.next_send = 0;
      update_send_window(c);
    } else {
      next = std::min(next, c.congestion.next_send);
    }
  }
  for (std::uint32_t slot = 0; slot < c.window; ++slot) {
    if (!is_busy(c, slot) || (c.slots[slot].flags & kOnSessionTimer) == 0) continue;
    next = std::min(next, check_slot(r, c, slot, now));
    if (!is_ready(r, name)) return next;
  }
  next = check_backlog(r, c, name, now, std::min(next, time_without_goodbye(r, c)));
  if (!is_ready(r, name)) return next;
  send_backlog(r, c);
  return next;
}

}  // namespace

namespace {

/// The attempt to open the session has run out of time, or the next one is due, or calls that wait
/// have run out of time.
void on_opening_timer(Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  const std::uint32_t name = c.name;
  if (now >= c.deadline) {
    if (awaits_proof(c)) {
      send_session_datagram(r, c, RpcKind::close);  // it may have heard us
      return end_session(r, c, Status::timed_out,
                         "it answered, but no datagram comes from the queue pair that it named",
                         "see whether the network between takes datagrams");
    }
    if (c.reconnect == nullptr || !c.reconnect->backing_off)
      return end_session(r, c, Status::timed_out, "no answer came in time");
    start_next_attempt(r, c);
    if (!is_opening(r, name)) return;
  }
  if (end_if_server_ended(r, c)) return;
  std::uint64_t next = c.deadline;
  if (awaits_proof(c)) next = std::min(next, ask_again(r, c, now));
  next = check_backlog(r, c, name, now, next);
  if (is_opening(r, name) && c.connection != nullptr)
    next = check_backlog(r, *c.connection, name, now, next);
  if (is_opening(r, name)) schedule_check(r, c, next);
}

}  // namespace

void on_client_timer(Rpc& r, ClientSession& c) noexcept {
  const std::uint64_t now = r.context.clock.now();
  if (c.state == SessionState::opening) return on_opening_timer(r, c, now);
  if (c.state == SessionState::closing) {
    if (now >= c.deadline) return end_session_in_order(r, c);
    send_session_datagram(r, c, RpcKind::close);
    return r.context.timers.schedule(c.timer, std::min(now + 2 * c.rto, c.deadline));
  }
  if (!check_server_liveness(r, c, now)) return;
  if (c.is_leaving && !has_calls(c)) return finish_leaving(r, c);
  if (end_without_goodbye(r, c, now)) return;
  const std::uint32_t name = c.name;
  std::uint64_t next = check_own_timers(r, c, now);
  if (is_ready(r, name) && c.connection != nullptr)
    next = std::min(next, check_connection_calls(r, c, now));
  if (!is_ready(r, name)) return;
  schedule_check(r, c, c.is_leaving ? std::min(next, now + r.min_rto) : next);
}

}  // namespace spinwire::rpc
