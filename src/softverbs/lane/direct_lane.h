// The part of a lane that senders use without work requests: direct datagrams (ud/ud_direct.h) and
// direct messages (rc/rc_direct.h). Hot.
#pragma once

#include <cstdint>

#include "softverbs/lane/line.h"

namespace spinwire::softverbs {

/// The part of the lane to a peer that a direct sender uses.
struct DirectLane {
  Line* lines = nullptr;
  std::uint64_t tail = 0;  ///< next position to write
  /// Bound of `tail` for direct senders; 0: every send checks first whether it may.
  std::uint64_t direct_limit = 0;
  /// Number of lines consumed of the opposite lane, in the topmost bits: each packet carries it.
  std::uint64_t ack_on_top = 0;
  Line* held = nullptr;  ///< the first unpublished line; publishing writes `held_word` to it
  std::uint64_t held_word = 0;
  std::uint64_t last = 0;  ///< position at which queue_direct() returns Sent::last
};

/// Result of a direct send.
enum class Sent : std::uint8_t {
  refused,  ///< nothing was sent: use the verbs
  first,    ///< written; this packet and those behind it wait for publish()
  queued,   ///< written behind an unpublished line
  last      ///< queued, at DirectLane::last
};

}  // namespace spinwire::softverbs
