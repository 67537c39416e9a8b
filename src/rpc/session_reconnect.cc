#include "rpc/session_reconnect.h"

#include <utility>

#include "base/error.h"
#include "rpc/backlog.h"
#include "rpc/call_cancel.h"
#include "rpc/refused_calls.h"
#include "rpc/transport/connection_transport.h"
#include "rpc/unsent.h"

namespace spinwire::rpc {
namespace {

agent::AttemptEnd end_of(const ClientSession& c, const Error& why) noexcept {
  const bool comes_back = c.goodbye.invites_back() || is_retryable(why);
  return {c.state == SessionState::ready, !comes_back, c.reconnect->ready_at};
}

/// Ends the inline calls that may have been sent, and those that may not wait. A request that found
/// no room waits again. Returns false if a callback has closed the session.
bool end_sent_calls(Rpc& r, ClientSession& c, Status status) noexcept {
  const std::uint32_t name = c.name;
  for (std::uint32_t slot = 0; slot < c.window; ++slot) {
    if (!is_busy(c, slot)) continue;
    const bool was_sent = c.slots[slot].resends != kNotSent;
    if (!was_sent && wait_again(r, c, slot)) continue;
    end_call_in_slot(r, c, slot, was_sent ? status : Status::not_connected);
    if (!is_opening(r, name)) return false;
  }
  return end_calls_that_may_not_wait(r, c, name) &&
         (c.connection == nullptr || end_calls_that_may_not_wait(r, *c.connection, name));
}

}  // namespace

bool can_reconnect(const Rpc& r, const ClientSession& c, const EndReason& why) noexcept {
  if (c.reconnect == nullptr || !why || c.state == SessionState::closing || c.reconnect->is_over)
    return false;
  return c.reconnect->plan.has_next(end_of(c, *why), r.context.clock.now());
}

void interrupt_session(Rpc& r, ClientSession& c, const Error& reason) noexcept {
  SessionReconnect& again = *c.reconnect;
  Error why = reason;
  if (c.goodbye.reason != GoodbyeReason::none) why.goodbye = c.goodbye;
  const bool was_ready = c.state == SessionState::ready;
  const std::uint64_t now = r.context.clock.now();
  if (!was_ready) r.dialogues.drop(c);
  if (why.goodbye.retry_after.count() != 0) again.plan.hold_off(now, why.goodbye.retry_after);
  c.deadline = now + again.plan.next(end_of(c, why), now);
  if (again.first.status == Status::ok || !is_retryable(again.first)) again.first = why;
  again.backing_off = true;
  again.returns = false;
  again.refused_at = 0;
  c.state = SessionState::opening;
  update_send_window(c);
  forget_unsent(r, c);
  if (std::exchange(c.is_blocked, false)) r.blocked_sessions.erase(c);
  r.context.timers.reschedule(c.timer, c.deadline);
  if (c.connection != nullptr) interrupt_client_connection(r, c, why);
  // A late reply to a call in a slot still finds the server's address.
  if (!end_sent_calls(r, c, status_of_calls(why))) return;
  if (c.transport == Transport::connection) reclaim_inline_calls(r, c);
  if (c.peer_address != nullptr) release_peer_address(r, std::exchange(c.peer_address, nullptr));
  prepare_for_server(r, c);
  const bool waits =
      c.backlog_count != 0 || (c.connection != nullptr && c.connection->backlog_count != 0);
  if (waits) schedule_check(r, c, now);  // for the deadlines of calls
  c.peer.reset();
  if (was_ready && again.on_interrupted) again.on_interrupted(handle(r, c), why);
}

void start_next_attempt(Rpc& r, ClientSession& c) noexcept {
  // The connection with the former server ends first.
  if (c.connection != nullptr && c.connection->agent) {
    c.deadline = r.context.clock.now() + r.min_rto;
    return;
  }
  c.reconnect->backing_off = false;
  const auto begun =
      base::no_throw("open a session again", [&] { return r.dialogues.dial_again(c); });
  if (!begun) end_session(r, c, begun.error());
}

void on_closed_by_server(Rpc& r, ClientSession& c) noexcept {
  const EndReason closed = Error{Status::flushed, {}, {}, {}};
  // Without a further attempt, a session that has lost its server ends with that error.
  if (c.state == SessionState::closing || (!can_reconnect(r, c, closed) && !has_lost_its_server(c)))
    return end_session_in_order(r, c);
  if (!c.goodbye.invites_back())
    return end_session(r, c, Status::flushed, "the server closed the session");
  end_session(
      r, c,
      base::goodbye_error(Status::flushed, base::format("talk with {}", c.address), c.goodbye));
}

EndReason final_reason(const ClientSession& c, const EndReason& why) noexcept {
  if (!why || !has_lost_its_server(c)) return why;
  return agent::last_error(c.reconnect->first, *why, c.reconnect->plan);
}

}  // namespace spinwire::rpc
