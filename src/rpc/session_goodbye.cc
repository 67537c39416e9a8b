#include "rpc/session_goodbye.h"

#include <algorithm>

#include "rpc/call_cancel.h"
#include "rpc/client_session.h"
#include "rpc/server_call.h"
#include "rpc/server_session.h"
#include "rpc/session_liveness.h"
#include "rpc/session_reconnect.h"
#include "rpc/session_recording.h"
#include "rpc/transport/connection_call.h"
#include "wire/goodbye.h"

namespace spinwire::rpc {

using wire::RpcKind;

namespace {

std::uint32_t calls_in_progress(const ConnectionServer& b) noexcept {
  using State = ConnectionServerSlot::State;
  const auto is_open = [](const ConnectionServerSlot& v) {
    return v.state != State::none && v.state != State::over;
  };
  return static_cast<std::uint32_t>(
      std::count_if(b.slots.get(), b.slots.get() + b.window, is_open));
}

/// Whether datagrams may go to the client: nothing goes to an address that is not proved.
bool is_reachable(const ServerSession& s) noexcept {
  return s.transport == Transport::connection || s.is_path_validated;
}

/// Tells the client that no new calls are taken. Over a connection, which loses nothing, once.
void notify_client(Rpc& r, ServerSession& s) noexcept {
  if (s.transport == Transport::datagram)
    return send_session_datagram(r, s, RpcKind::goodbye, wire::encode(s.leaving.goodbye));
  if (s.leaving.is_told || !is_connected(r, s)) return;
  const wire::RpcMessageHeader message{wire::encode(s.leaving.goodbye), 0,
                                       wire::RpcMessageKind::goodbye};
  s.leaving.is_told = send_message(r, *agent_of(r, *s.connection), message, {}) == Status::ok;
}

}  // namespace

std::uint32_t calls_in_progress(const ServerSession& s) noexcept {
  const auto is_open = [](const ServerSlot& v) {
    return v.state == ServerSlotState::running || v.state == ServerSlotState::unsent;
  };
  const auto calls = std::count_if(s.slots, s.slots + s.window, is_open);
  return static_cast<std::uint32_t>(calls) +
         (s.connection != nullptr ? calls_in_progress(*s.connection) : 0);
}

void begin_leaving(Rpc& r, ServerSession& s, const Goodbye& goodbye,
                   std::uint64_t deadline) noexcept {
  if (is_leaving(s)) {
    s.leaving.deadline = std::min(s.leaving.deadline, deadline);
  } else {
    s.advertised_window |= kTakesNoCalls;
    s.leaving = {goodbye, deadline, 0, r.min_rto, false};
    record(r, s, observe::EventKind::goodbye, {"sent: it takes no new calls"});
  }
  r.context.timers.reschedule(s.timer, r.context.clock.now());
}

std::uint64_t continue_leaving(Rpc& r, ServerSession& s, std::uint64_t now) noexcept {
  ServedLeaving& leaving = s.leaving;
  const bool is_busy = calls_in_progress(s) != 0;
  if (is_busy || leaving.idle_since == 0) leaving.idle_since = is_busy ? 0 : now;
  // A client that does not answer is gone, or lost the goodbye more often than is likely.
  const std::uint64_t heard = std::max(leaving.idle_since, std::min(last_heard_from(s), now));
  const bool waits = is_busy || (s.takes_goodbyes && now - heard < r.timeouts.close);
  if (now >= leaving.deadline || !waits) return end_served_session(r, s), 0;
  if (s.takes_goodbyes && is_reachable(s)) notify_client(r, s);
  const std::uint64_t next = now + leaving.interval;
  leaving.interval = std::min(2 * leaving.interval, std::max(r.timeouts.close / 4, r.min_rto));
  return std::min(next, leaving.deadline);
}

void send_last_goodbye(Rpc& r, const ServerSession& s, const Goodbye& goodbye) noexcept {
  if (is_reachable(s)) send_session_datagram(r, s, RpcKind::closed, wire::encode(goodbye));
  agent::Agent* const a = agent_of(r, s.connection);
  if (a != nullptr && !agent::is_ending(*a)) agent::close_at_once(r.context, *a, goodbye);
}

void end_served_session(Rpc& r, ServerSession& s) noexcept {
  send_last_goodbye(r, s, s.leaving.goodbye);
  release_with_tombstone(r, s, Status::flushed);
}

void refuse_late_call(Rpc& r, CallRef call) noexcept {
  refuse(r, call, Status::not_connected, kTakesNoCallsText);
}

// ---- the client's end ----

bool has_calls(const ClientSession& c) noexcept {
  const bool keeps_waiting = comes_back(c);  // what waits is sent to the next server
  if (c.in_flight != 0 || (c.backlog_count != 0 && !keeps_waiting)) return true;
  const ConnectionClient* const b = c.connection.get();
  if (b == nullptr) return false;
  for (std::uint32_t slot = 0; slot < b->window; ++slot) {
    if (is_active(*b, slot)) return true;
  }
  return b->backlog_count != 0 && !keeps_waiting;
}

void begin_leaving(Rpc& r, ClientSession& c) noexcept {
  if (c.state == SessionState::opening) {
    cancel_waiting(r, c, Status::not_connected);  // none of them was sent
    return (void)begin_close(r, c);
  }
  if (c.state != SessionState::ready || std::exchange(c.is_leaving, true)) return;
  update_send_window(c);
  if (!comes_back(c)) cancel_waiting(r, c, Status::not_connected);
  schedule_check(r, c, r.context.clock.now() + r.min_rto);
}

void close_at_once(Rpc& r, ClientSession& c) noexcept {
  if (c.state == SessionState::ready || awaits_proof(c))
    send_session_datagram(r, c, RpcKind::close);
  end_session_in_order(r, c);
}

void finish_leaving(Rpc& r, ClientSession& c) noexcept {
  if (!comes_back(c)) return (void)begin_close(r, c);
  send_session_datagram(r, c, RpcKind::close);
  on_closed_by_server(r, c);
}

namespace {

void note_goodbye(Rpc& r, ClientSession& c, const Goodbye& goodbye) noexcept {
  c.goodbye = goodbye;
  record(r, c, observe::EventKind::goodbye, {"received: the server takes no new calls"});
  if (c.reconnect != nullptr && !c.is_leaving)
    c.reconnect->returns = can_reconnect(r, c, Error{Status::flushed, {}, {}, {}});
}

/// The server has proved the token by its goodbye, before a pong came. No call was sent, so the
/// session leaves at once. Calls that may wait stay if it is opened again.
void retire_unused(Rpc& r, ClientSession& c, const Goodbye& goodbye) noexcept {
  note_goodbye(r, c, goodbye);
  if (comes_back(c)) return finish_leaving(r, c);
  if (!has_lost_its_server(c)) return begin_leaving(r, c);
  send_session_datagram(r, c, RpcKind::close);
  on_closed_by_server(r, c);
}

}  // namespace

bool on_goodbye(Rpc& r, ClientSession& c, std::uint32_t number) noexcept {
  Goodbye goodbye;
  if (!wire::decode(number, goodbye)) return false;
  if (c.state == SessionState::ready) {
    on_goodbye(r, c, goodbye);
  } else if (awaits_proof(c)) {
    retire_unused(r, c, goodbye);
  }
  return true;
}

void on_goodbye(Rpc& r, ClientSession& c, const Goodbye& goodbye) noexcept {
  note_goodbye(r, c, goodbye);
  begin_leaving(r, c);
}

// ---- the engine drains ----

void end_served_in_order(Rpc& r, const Goodbye& goodbye) noexcept {
  constexpr std::uint64_t kNoDeadline = ~std::uint64_t{0};
  r.servers.for_each([&](ServerSession& s) { begin_leaving(r, s, goodbye, kNoDeadline); });
}

void end_own_in_order(Rpc& r) noexcept {
  r.clients.for_each([&r](ClientSession& c) {
    if (c.reconnect != nullptr) {
      c.reconnect->is_over = true;
      c.reconnect->returns = false;
    }
    if (c.is_leaving && c.state == SessionState::ready)
      cancel_waiting(r, c, Status::not_connected);  // what waited for the next server
    begin_leaving(r, c);
  });
}

void end_all_sessions(Rpc& r) noexcept {
  r.servers.for_each([&r](ServerSession& s) { end_served_session(r, s); });
  r.clients.for_each([&r](ClientSession& c) { close_at_once(r, c); });
}

}  // namespace spinwire::rpc
