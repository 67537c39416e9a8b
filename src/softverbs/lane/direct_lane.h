// The part of a lane that senders use without work requests: direct datagrams (ud/ud_direct.h) and
// direct messages (rc/rc_direct.h). Hot.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/intrusive_list.h"
#include "softverbs/lane/line.h"

namespace spinwire::softverbs {

struct Cq;

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

/// The part of the lane from a peer that readers of direct packets use.
struct DirectInLane {
  Line* next = nullptr;        ///< line at `position`
  std::uint64_t mark = 1;      ///< mark of a new line at `position`
  Line* end = nullptr;         ///< of the lines
  std::uint64_t position = 0;  ///< lines taken
  /// Lines that the sender may write again: publish_head() sets it to `position`.
  std::uint64_t head = 0;
  LaneControl* control = nullptr;
  DirectLane* opposite = nullptr;  ///< the lane to the sender; null until the sender is attached
  const Cq* batch_cq = nullptr;    ///< the queue that may report InLane::batch again; null: none
  bool batch_reported = false;     ///< the lines at `position` are in a DirectBatch
  bool in_use = false;             ///< listed in DirectReads: messages are read in place
  DirectInLane* next_in_use = nullptr;
};

/// The messages of a context that are read in place.
struct DirectReads {
  std::uint32_t budget = 0;                                  ///< that may still be reported
  base::IntrusiveStack<&DirectInLane::next_in_use> lanes{};  ///< in which they lie
};

/// Takes `lines` lines.
inline void advance(DirectInLane& lane, std::uint32_t lines) noexcept {
  lane.position += lines;
  lane.next += lines;
  if (lane.next >= lane.end) [[unlikely]] {
    lane.next -= kLaneLines;
    lane.mark = (lane.mark + 1) & 0xff;
  }
}

/// Returns the lines taken to the sender, unless messages are being read there.
inline void publish_head(DirectInLane& lane) noexcept {
  if (lane.in_use) return;
  lane.head = lane.position;
  lane.control->head.store(lane.head, std::memory_order_release);
  if (lane.opposite != nullptr) lane.opposite->ack_on_top = lane.head << 48;
}

/// Returns the lines of all messages that were reported in place to their senders. Until the next
/// call no more than `budget` others are reported; 0 at first.
inline void release_reads(DirectReads& reads, std::uint32_t budget) noexcept {
  reads.budget = budget;
  while (!reads.lanes.empty()) {
    DirectInLane& lane = reads.lanes.pop_front();
    lane.in_use = false;
    publish_head(lane);
  }
}

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
