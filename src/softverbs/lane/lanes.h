// The two lanes between a context and a peer, as the context keeps them.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "softverbs/lane/direct_lane.h"
#include "softverbs/lane/segment.h"
#include "softverbs/ud/ud_direct.h"

namespace spinwire::softverbs {

struct Cq;
struct Peer;
struct Qp;

/// Records of consumed packets may still be pending while their lines are written again, and work
/// requests that ran ahead have up to kLaneLines records.
inline constexpr std::uint32_t kInFlight = 4 * kLaneLines;

/// Consecutive unacknowledged packets of one queue pair, up to the first signaled one. They
/// complete together.
struct InFlight {
  std::uint64_t end;  ///< lane position after the last packet
  std::uint32_t qpn;
  std::uint32_t sq_end;  ///< send-queue position after the last packet
  std::uint16_t epoch;   ///< of the transmission; a retransmission increments the queue pair's
};

/// The place of a packet's bytes in a lane's data.
struct PlacedBytes {
  std::uint64_t line = ~std::uint64_t{0};  ///< position of the packet's line
  std::uint32_t begin = 0;
};
/// Initial size of the part of a lane's data in use. It holds several datagrams of the MTU, so that
/// one can be written while another is read.
inline constexpr std::uint32_t kLeastData = 16 * 1024;

/// Laps with little in flight until a ring beyond kLaneData shrinks by half. A ring that shrinks
/// too early may cost a few hundred messages that go a slower way, so that must be rare.
inline constexpr std::uint32_t kCalmLaps = 256;

/// The lane to a peer, in the peer's segment.
struct OutLane : DirectLane {
  std::uint64_t head = 0;   ///< lines consumed by the peer, as far as applied
  std::uint64_t acked = 0;  ///< `head` as packets carried it; the next poll applies it
  /// Bound of `tail`: head + kLaneLines, or less while queue pairs wait for room, so that no other
  /// overtakes them.
  std::uint64_t limit = kLaneLines;
  std::uint64_t message_end = 0;  ///< position after the last direct message
  std::uint32_t in_flight_head = 0;
  std::uint32_t in_flight_tail = 0;
  std::uint32_t index = 0;
  /// In `control`, or the LocalAccess of a peer in this process.
  std::atomic<std::uint64_t>* access_serial = nullptr;
  std::uint64_t own_access_serial = 0;    ///< the value of `*access_serial`
  std::unique_ptr<InFlight[]> in_flight;  ///< kInFlight entries
  // For the lane's data, see lane_data.cc.
  std::byte* data = nullptr;
  std::uint32_t data_capacity = kLaneData;
  std::uint32_t data_next = 0;            ///< offset of the next packet's bytes
  std::uint32_t data_bound = 0;           ///< bound of their end
  std::uint32_t data_size = kLeastData;   ///< the part in use
  std::uint32_t data_calm_laps = 0;       ///< in a row, that ended with little in flight
  std::uint32_t data_lap_end = 0;         ///< end of the last lap's bytes
  bool data_was_short = false;            ///< a packet did not fit since the size changed
  std::uint64_t data_scanned = 0;         ///< no earlier line in flight has bytes in the data
  std::uint64_t data_end = 0;             ///< position after the last line that has
  std::uint64_t data_turn = 0;            ///< `data_end` when the ring wrapped around
  std::unique_ptr<PlacedBytes[]> placed;  ///< kLaneLines entries, one for each line
};

/// The lane from a peer, in this context's segment.
struct InLane : DirectInLane {
  /// While `head` is below this position, an acknowledgement could cover a refused packet. So
  /// packets carry none, and the sender reads the lane's control words.
  std::uint64_t no_ack_until = 0;
  Line* lines = nullptr;
  LaneData data;
  Peer* peer = nullptr;   ///< null until the sender is attached
  ibv_gid sender{};       ///< as the directory named it when the lane was opened
  std::uint32_t pid = 0;  ///< of the sender, likewise
  std::uint32_t index = 0;
  std::uint32_t idle_rounds = 0;       ///< control steps without a packet
  std::uint64_t control_position = 0;  ///< position at the last control step
  bool awake = false;
  bool waits_to_map = false;  ///< since its next packet has looked for memory of the sender
  /// The last batch of direct datagrams. One for `batch_cq` that begins with the same word needs no
  /// further checks: see forget_batches().
  DirectBatch batch;
  const Qp* batch_qp = nullptr;
  ibv_grh route{};           ///< route header of a plain datagram, without its length
  std::uint64_t serial = 0;  ///< unique among all lanes of the context, past and present
};

}  // namespace spinwire::softverbs
