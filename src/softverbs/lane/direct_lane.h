// The part of a lane that senders use without work requests: direct datagrams (ud/ud_direct.h) and
// direct messages (rc/rc_direct.h). Hot.
#pragma once

#include <atomic>
#include <cstdint>

#include "softverbs/lane/line.h"

namespace spinwire::softverbs {

/// Lines are published in groups. If each line is published alone, the peer fetches cache lines
/// that are still being written; if a whole batch is published at once, the peer
/// idles until its end. The first group of a round is one line, so that the peer begins at once;
/// each next one is twice as large.
/// `src/softverbs/measurements.md` has what each form costs.
inline constexpr std::uint32_t kFirstGroup = 1;
inline constexpr std::uint32_t kLargestGroup = 16;

/// The direct packets that a context sends between two publications of all lines. Nothing has to be
/// done at the end of a round in which no line was held.
struct DirectRound {
  std::uint32_t number = 1;
  bool has_held_lines = false;  ///< a line may be held
};

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
  std::uint64_t last = 0;             ///< position that completes the group of `held`
  std::uint32_t group = kFirstGroup;  ///< lines of the group of `held`, or of the next one
  std::uint32_t round = 0;            ///< DirectRound::number of the last group of one line
  LaneControl* control = nullptr;
};

/// Result of a direct send.
enum class Sent : std::uint8_t {
  refused,    ///< nothing was sent: use the verbs
  published,  ///< the peer sees it, the first of its round
  held,       ///< begins a group: call publish() after the last packet
  queued,     ///< written behind a held line, or published with its group
};

/// Publishes the first line of a round. Returns whether the peer is asleep, and has to be woken.
[[nodiscard, gnu::always_inline]] inline bool publish_first(DirectLane& out, Line& line,
                                                            std::uint64_t word,
                                                            std::uint32_t round) noexcept {
  static_assert(kFirstGroup == 1);
  line.word.store(word, std::memory_order_release);
  out.round = round;
  out.group = 2 * kFirstGroup;
  std::atomic_signal_fence(std::memory_order_seq_cst);  // pairs with the membarrier of the receiver
  return out.control->asleep.load(std::memory_order_relaxed) != 0;
}

}  // namespace spinwire::softverbs
