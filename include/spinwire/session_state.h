// The state of a session, what it does and what blocks it, and the counts of all sessions.
#pragma once

#include <cstdint>
#include <string_view>

#include "spinwire/clock.h"
#include "spinwire/export.h"

namespace spinwire {

/// Where a session stands.
enum class SessionState : std::uint8_t {
  opening,  ///< also while the session is opened again after a loss or a goodbye
  ready,    ///< calls are sent; the server is known to be alive
  closing,  ///< by close(), or because the server takes no more calls
  closed,   ///< it has ended; the handle answers `not_connected`
};

/// The reason why the next inline call of a session would not be sent at once.
enum class SessionBlocker : std::uint8_t {
  nothing,        ///< it would be sent at once
  not_ready,      ///< the state is not `ready`
  window,         ///< the window is full: the server's handlers, or the network, are slow
  server_window,  ///< the server has receives for fewer calls than the window
  congestion,     ///< congestion control allows fewer calls than the window (rpc.target_rtt)
  receives,       ///< all receives of the engine are reserved for replies (rpc.receive_depth)
  send_queue,     ///< the engine's datagrams fill their send queue (rpc.send_depth)
  connection,     ///< the session's connection, which all calls use, is not ready or is blocked
};
/// The name, as written in the header. Any thread; never allocates.
SPINWIRE_API std::string_view to_string(SessionBlocker blocker) noexcept;
/// The name, as written in the header. Any thread; never allocates.
SPINWIRE_API std::string_view to_string(SessionState state) noexcept;

/// The activity of a client's session.
struct SessionSnapshot {
  SessionState state = SessionState::closed;              ///< where the session stands
  SessionBlocker blocked_by = SessionBlocker::not_ready;  ///< why the next inline call would wait
  bool backlog_full = false;  ///< the next call that has to wait answers would_block
  /// Time from the last sign of life of the server's process to the last poll().
  Nanoseconds since_last_heard{0};
  std::uint32_t calls = 0;              ///< accepted; modulo 2^32
  std::uint32_t in_flight = 0;          ///< inline calls under way
  std::uint32_t long_calls = 0;         ///< calls under way over the session's connection
  std::uint32_t backlog = 0;            ///< calls that wait, of either kind
  std::uint32_t window = 0;             ///< most inline calls under way, and equally of long ones
  std::uint32_t server_window = 0;      ///< calls for which the server has receives
  std::uint32_t congestion_window = 0;  ///< calls that congestion control allows; 0: it is off
  std::uint32_t retransmissions = 0;    ///< requests sent again; modulo 2^32
  Nanoseconds srtt{0};                  ///< smoothed round trip; 0: none was measured
  Nanoseconds rto{0};                   ///< retransmission time-out
};

/// Counts since the engine was opened. Those marked "now" are current values.
struct RpcStats {
  std::uint64_t calls = 0;                   ///< accepted calls of sessions opened here
  std::uint64_t replies = 0;                 ///< calls that ended by a reply or a refusal
  std::uint64_t retransmitted_requests = 0;  ///< requests sent again as datagrams
  std::uint64_t served = 0;                  ///< handlers that ran here
  std::uint64_t retransmitted_replies = 0;   ///< replies sent again, because the request came again
  std::uint64_t dropped_replies = 0;         ///< replies kept for such requests, and dropped before
  std::uint64_t duplicates = 0;     ///< requests dropped, because the call is served or over
  std::uint64_t late_replies = 0;   ///< replies and closings dropped: the call or session is over
  std::uint64_t bad_datagrams = 0;  ///< datagrams dropped: malformed, or of no known session
  /// Datagrams of more than 4 KiB dropped, because the rendezvous pool has no block to keep them;
  /// they come again.
  std::uint64_t unkept_datagrams = 0;
  std::uint64_t cwnd_reductions = 0;  ///< reductions of a session's congestion window
  std::uint64_t send_queue_full = 0;  ///< attempts to send without room in the send queue
  std::uint64_t long_calls = 0;       ///< calls over connections
  /// Protocol violations that each ended a connection for calls, and refused connections that
  /// belong to no session.
  std::uint64_t bad_long_calls = 0;
  std::uint32_t sessions = 0;         ///< opened by us, now
  std::uint32_t served_sessions = 0;  ///< opened by peers, now
};

}  // namespace spinwire
