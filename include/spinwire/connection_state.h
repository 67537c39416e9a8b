// The state of a connection, what it has done, and what blocks it.
#pragma once

#include <cstdint>
#include <string_view>

#include "spinwire/clock.h"
#include "spinwire/export.h"

namespace spinwire {

/// Where a connection stands.
enum class ConnectionState : std::uint8_t {
  resolving,   ///< the TCP connection is being made
  exchanging,  ///< handshake and set-up of the queue pair
  ready,       ///< operations are accepted, until close(), the peer's close, or an error
  draining,    ///< outstanding operations end, for up to connections.close_timeout
  closed,      ///< nothing is outstanding; the handle answers `not_connected`
};
/// The name, as written in the header. Any thread; never allocates.
SPINWIRE_API std::string_view to_string(ConnectionState state) noexcept;

/// The state of a queue pair (IBV_QPS_*).
enum class QueuePairState : std::uint8_t {
  reset,    ///< made, without settings
  init,     ///< takes receives
  rtr,      ///< ready to receive
  rts,      ///< ready to send: works
  sqd,      ///< send queue drained: starts no further requests
  sqe,      ///< send queue in error
  err,      ///< in error: all requests end as flushed
  unknown,  ///< a state that libibverbs does not name
};
/// The name, as written in the header. Any thread; never allocates.
SPINWIRE_API std::string_view to_string(QueuePairState state) noexcept;

/// Counts of a connection since it was made.
struct ConnectionStats {
  std::uint64_t messages_sent = 0;      ///< as EngineStats::messages_sent
  std::uint64_t messages_received = 0;  ///< includes writes with immediate
  std::uint64_t bytes_sent = 0;         ///< of messages
  std::uint64_t bytes_received = 0;     ///< of messages and writes with immediate
  std::uint64_t writes = 0;             ///< ended as `ok`
  std::uint64_t reads = 0;              ///< ended as `ok`
  std::uint64_t bytes_written = 0;      ///< of those writes
  std::uint64_t bytes_read = 0;         ///< of those reads
  std::uint64_t atomics = 0;            ///< ended as `ok`
  /// Accepted operations that have not ended, including cancelled ones that the device still has.
  /// Excludes the connection's own requests; see ConnectionSnapshot::control.
  std::uint32_t outstanding = 0;
  std::uint32_t send_credits = 0;     ///< messages that we may send now
  std::uint32_t granted_credits = 0;  ///< messages that the peer may send now
};

/// The reason why the next send() would not be accepted.
enum class Blocker : std::uint8_t {
  nothing,     ///< it would be accepted
  not_ready,   ///< the state is not `ready`
  send_queue,  ///< the send queue (queues.send_depth) is full; the peer or its device is slow
  operations,  ///< all operations of the engine (queues.operations) are under way
  credit,      ///< the peer's application has to poll; a new connection has credit for one message
  /// Blocks only messages longer than connections.eager_bytes: the engine can offer no more of them
  /// now, or no memory window is free (memory.windows).
  windows,
};
/// The name, as written in the header. Any thread; never allocates.
SPINWIRE_API std::string_view to_string(Blocker blocker) noexcept;

/// The activity of a connection.
struct ConnectionSnapshot {
  ConnectionState state = ConnectionState::closed;  ///< where the connection stands
  Blocker blocked_by = Blocker::not_ready;          ///< why the next send() would not be accepted
  /// Time from the last sign of life of the peer's process to the last poll(): a message, or a
  /// keepalive, which each end that polls sends at least every connections.keepalive_interval; not
  /// completions by the peer's device. Raw connections have no keepalives.
  Nanoseconds since_last_heard{0};
  // Outstanding operations by kind, including cancelled ones that the device still has.
  std::uint32_t messages = 0;  ///< sent ones that have not ended
  std::uint32_t writes = 0;    ///< that have not ended
  std::uint32_t reads = 0;     ///< that have not ended
  std::uint32_t atomics = 0;   ///< that have not ended
  /// The connection's own requests: credit and keepalives, goodbye, binding of memory windows,
  /// control messages, and READs of the peer's rendezvous messages.
  std::uint32_t control = 0;
  std::uint32_t receives = 0;  ///< posted receives of a raw connection
  // Leases that have not ended.
  std::uint32_t leased_out = 0;         ///< to the peer, including keys of KeyScope::connection
  std::uint64_t leased_out_bytes = 0;   ///< of those leases
  std::uint32_t leases_held = 0;        ///< of the peer's memory
  std::uint64_t leases_held_bytes = 0;  ///< of those leases
  ConnectionStats stats;                ///< as Connection::stats() answers
};

}  // namespace spinwire
