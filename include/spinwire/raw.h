// Raw connections: a plain reliable queue pair. Only the application's bytes go over the wire: no
// header, credit, keepalive or goodbye. The peer may be any program that uses verbs.
// ConnectionSettings::raw makes a connection raw, in connect(), listen(), prepare() or configure().
// Both ends must be raw. Differences from other connections:
//   - The application posts the receives, with Connection::post_receive(). Each takes one SEND or
//     one WRITE with immediate. Receives posted before the connection is ready reach the device
//     before the peer can send.
//   - send_raw() and send_raw_with_imm() send messages; send(), send_copy() and send_with_imm()
//     answer unsupported. Reads, writes and atomics work as usual. write_with_imm() uses one of
//     the peer's receives.
//   - There is no credit. If the peer has no receive, the device repeats the message
//     (queue_pair.rnr_retry); then the connection ends with peer_lost. An operation that is
//     unanswered for connections.peer_timeout ends the connection in the same way.
//   - Only operations notice that the peer is gone. An idle connection stays `ready`. rdma_cm is
//     an exception: it reports the peer's end.
//   - close() lets the outstanding operations end, for up to connections.close_timeout, and then
//     flushes the receives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "spinwire/callback.h"
#include "spinwire/status.h"

namespace spinwire {

/// Sizes of a raw connection's queues; ConnectionSettings::send_depth sizes its send queue. Values
/// above the device's answer `limit`. Each receive reserves an entry of the completion queue. All
/// raw connections together have queues.completion_depth less queues.operations, all other receives
/// and the connections' control requests.
struct RawSettings {
  std::uint32_t receive_depth = 64;  ///< outstanding receives; at least 1
  std::uint32_t max_send_sge = 4;    ///< parts of a message; 1 … DeviceInfo::max_sge
  std::uint32_t max_recv_sge = 4;    ///< parts of a receive; 1 … DeviceInfo::max_sge
};

/// How a receive ended.
struct RawReceive {
  /// One of:
  ///   ok                the receive took a message or a write
  ///   flushed           the connection ended first
  ///   message_too_long  the message exceeded the parts; the connection ends
  ///   local_error       our device refused the receive
  Status status = Status::ok;
  std::size_t bytes = 0;  ///< received; 0 unless ok. The memory beyond them is unchanged
  /// The sender's 32-bit immediate, in host order.
  std::optional<std::uint32_t> immediate;
  /// True for the peer's WRITE with immediate: `bytes` is its length, and the peer chose the place.
  bool is_write = false;
};

/// Runs inside poll(), exactly once for each accepted receive, in the order of posting.
using RawReceiveCallback = Callback<void(const RawReceive&)>;
/// Runs inside poll() when the device has the receive, and before the receive completes. Never runs
/// if the connection ends first.
using RawPostedCallback = Callback<void()>;

}  // namespace spinwire
