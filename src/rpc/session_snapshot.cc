#include "rpc/session_snapshot.h"

#include <algorithm>

#include "agent/agent.h"
#include "rpc/client_session.h"
#include "rpc/transport/connection_call.h"

namespace spinwire::rpc {
namespace {

/// Of a session whose calls all travel over its connection.
SessionBlocker blocker_on_connection(const Rpc& r, const ClientSession& c) noexcept {
  const agent::Agent* const agent = agent_of(r, c.connection);
  if (agent == nullptr) return SessionBlocker::connection;
  const Blocker blocker = agent::snapshot(r.context, *agent).blocked_by;
  // Windows only matter for requests above the eager limit.
  if (blocker != Blocker::nothing && blocker != Blocker::windows) return SessionBlocker::connection;
  const bool is_full = active_calls(*c.connection) >= c.connection->window;
  return is_full ? SessionBlocker::window : SessionBlocker::nothing;
}

/// Whether no receive is left for the reply of a further call. Posts none.
bool lacks_receives(const Rpc& r) noexcept { return r.reserved_receives >= r.receive_budget; }

SessionBlocker blocker_of(const Rpc& r, const ClientSession& c) noexcept {
  if (c.state != SessionState::ready || takes_no_calls(c)) return SessionBlocker::not_ready;
  if (uses_connection(c)) return blocker_on_connection(r, c);
  if (c.in_flight >= c.window) return SessionBlocker::window;
  if (c.in_flight >= c.server_window) return SessionBlocker::server_window;
  if (c.in_flight >= c.send_window) return SessionBlocker::congestion;
  if (r.port->full()) return SessionBlocker::send_queue;
  return lacks_receives(r) ? SessionBlocker::receives : SessionBlocker::nothing;
}

/// Time since the server's process was heard, by datagrams or over the connection.
Nanoseconds since_last_heard(const Rpc& r, const ClientSession& c) noexcept {
  const std::uint64_t now = r.context.now;
  const std::uint64_t heard = last_heard_from(c);
  const Nanoseconds since = r.context.clock.duration(heard != 0 && heard < now ? now - heard : 0);
  const agent::Agent* const agent = agent_of(r, c.connection);
  if (agent == nullptr) return since;
  return std::min(since, agent::snapshot(r.context, *agent).since_last_heard);
}

}  // namespace

SessionSnapshot snapshot(const Rpc& r, const ClientSession& c) noexcept {
  const Clock& clock = r.context.clock;
  SessionSnapshot now;
  now.state = state_of(c);
  now.blocked_by = blocker_of(r, c);
  now.since_last_heard = since_last_heard(r, c);
  now.calls = c.last_call_id;
  now.in_flight = c.in_flight;
  now.backlog = c.backlog_count;
  now.backlog_full = is_backlog_full(r, c, c.backlog_count);
  if (c.connection != nullptr) {
    now.long_calls = active_calls(*c.connection);
    now.backlog += c.connection->backlog_count;
    if (uses_connection(c)) now.backlog_full = is_backlog_full(r, c, c.connection->backlog_count);
  }
  now.window = c.window;
  now.server_window = c.server_window;
  if (c.congestion.max_cwnd != 0)
    now.congestion_window = std::max(1u, c.congestion.cwnd / kCwndPerCall);
  now.retransmissions = c.retransmissions;
  now.srtt = clock.duration(c.srtt);
  now.rto = clock.duration(c.rto);
  return now;
}

}  // namespace spinwire::rpc
