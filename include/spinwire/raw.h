// Raw connections: a reliable queue pair as it is. Nothing but the application's own bytes goes
// over the wire: no header, no credit, no keepalive and no goodbye, so that the peer may be any
// program that speaks verbs.
//
// ConnectionSettings::raw makes a connection raw, in connect(), listen(), prepare() or configure();
// both ends have to be. What differs from other connections:
//
//   - The application posts the receives, with Connection::post_receive(): each takes one SEND or
//     one WRITE with immediate of the peer. It may do so as soon as it has the handle; those are
//     with the device before the peer can send.
//   - Messages go out with send_raw() and send_raw_with_imm(); send() and its kin answer
//     `unsupported`. Reads, writes and atomics are as ever. write_with_imm() takes one of the
//     peer's receives, as a SEND does.
//   - Nobody keeps a sender from sending more than the peer has receives for: its device repeats
//     that as queue_pair.rnr_retry says, and then the connection ends (peer_lost), as it does with
//     any operation that is unanswered for connections.peer_timeout.
//   - A peer that ends, closes or is killed is noticed by operations only; without any outstanding,
//     a connection whose peer has gone stays `ready`. Through rdma_cm, that tells of it.
//   - close() lets what is outstanding end, within connections.close_timeout, and then flushes the
//     receives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "spinwire/callback.h"
#include "spinwire/status.h"

namespace spinwire {

/// Sizes of a raw connection's queues; ConnectionSettings::send_depth is that of its send queue.
/// More than the device has answers `limit`. Each receive needs an entry of the completion queue
/// that nothing else may fill: queues.completion_depth less queues.operations, all other receives
/// and the connections' control requests is what all raw connections together can have.
struct RawSettings {
  std::uint32_t receive_depth = 64;  ///< receives outstanding at once; at least 1
  std::uint32_t max_send_sge = 4;    ///< elements of a message; 1 … DeviceInfo::max_sge
  std::uint32_t max_recv_sge = 4;    ///< elements of a receive; 1 … DeviceInfo::max_sge
};

/// How a receive ended.
struct RawReceive {
  /// ok; flushed (the connection ended first); message_too_long (what came was longer than the
  /// elements, which ends the connection); local_error.
  Status status = Status::ok;
  std::size_t bytes = 0;  ///< that came, 0 unless ok; what is beyond them was not touched
  /// The sender's 32-bit immediate, in host order.
  std::optional<std::uint32_t> immediate;
  /// True: the peer's WRITE with immediate, of `bytes`, which are where the peer wrote them.
  bool is_write = false;
};

/// Runs inside poll(), exactly once per accepted receive, in the order of posting; it may start
/// further operations.
using RawReceiveCallback = Callback<void(const RawReceive&)>;
/// Runs inside poll() once the device has the receive, before it completes; not at all if the
/// connection ends before that.
using RawPostedCallback = Callback<void()>;

}  // namespace spinwire
