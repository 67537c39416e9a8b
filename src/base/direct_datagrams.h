// What a device may offer for datagrams beside the verbs, for short ones: the sender writes the
// line that the device carries, without a work request, and the receiver reads it where it lies,
// without a receive, one completion telling of any number. Adapters have the like, as inline sends,
// multi-packet receive queues and compressed completions. Whoever has it uses it, and the verbs for
// all else. Hot.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/copy.h"

namespace spinwire::base {

/// One cacheline of a lane, which is what a device carries packets in: a ring of lines in the
/// receiver's memory. A packet is one line, or a first line and continuation lines that carry only
/// `word` and payload; the first line's word is written last. Every line carries its lap's mark, so
/// that bytes of an earlier lap are never taken for a new line.
struct Line {
  // mark:8 | opcode:4 | flags:4 | psn:24 | queue pair:24; datagrams name their sender as the PSN
  std::atomic<std::uint64_t> word;
  /// As the work request has it: in network order, or a key to invalidate. The Q_Key of datagrams.
  std::uint32_t imm;
  std::uint16_t length;  ///< payload bytes in the lane; for a reference, of its descriptors
  std::uint16_t ack;     ///< low bits of what the sender has consumed of the opposite lane
  std::byte payload[48];

  /// Writes `imm`, `length` and `ack` (in the topmost bits of a word) with one store.
  void set_trailer(std::uint64_t bytes, std::uint64_t ack_on_top,
                   std::uint32_t immediate = 0) noexcept {
    const std::uint64_t trailer = immediate | bytes << 32 | ack_on_top;
    std::memcpy(reinterpret_cast<std::byte*>(this) + sizeof word, &trailer, sizeof trailer);
  }
  /// The three in one load.
  [[nodiscard]] std::uint64_t trailer() const noexcept {
    std::uint64_t trailer = 0;
    std::memcpy(&trailer, reinterpret_cast<const std::byte*>(this) + sizeof word, sizeof trailer);
    return trailer;
  }
};
static_assert(sizeof(Line) == 64 && offsetof(Line, length) == 12 && offsetof(Line, ack) == 14);

inline constexpr std::uint32_t kLaneLines = 256;
constexpr std::uint64_t lane_mark(std::uint64_t position) {
  return ((position / kLaneLines) + 1) & 0xff;
}

/// The lane towards a peer, as far as a sender has to know it.
struct DirectLane {
  Line* lines = nullptr;
  std::uint64_t tail = 0;  ///< next position to write
  /// What direct datagrams may not reach; 0 while there may be none.
  std::uint64_t direct_limit = 0;
  /// How many lines were consumed of the lane from there, which each packet tells; in the topmost
  /// bits.
  std::uint64_t ack_on_top = 0;
  Line* held = nullptr;  ///< the first that the peer is not to see yet, whose word is to be this:
  std::uint64_t held_word = 0;
  std::uint64_t last = 0;  ///< the sender's: where it wants what is held published
};

/// A queue pair, as far as a sender has to know it.
struct DirectSender {
  std::uint64_t datagram_word = 0;  ///< of a line with a plain one, as far as it is always the same
  bool straight = false;            ///< datagrams may go out at once
};

/// Where a datagram goes.
struct DatagramAddress {
  ibv_ah* ah = nullptr;
  std::uint32_t qp_num = 0;
  std::uint32_t qkey = 0;      ///< as it is: the highest bit does not stand for the sender's own
  DirectLane* lane = nullptr;  ///< of the `ah`, where datagrams go directly
};

/// A short datagram: two words, which the sender has in registers, and what lies behind them.
inline constexpr std::size_t kDirectHeader = 16;
inline constexpr std::size_t kDirectPayload = 32;
static_assert(kDirectHeader + kDirectPayload == sizeof Line::payload);

/// Datagrams that lie in a lane, to be read there, one behind the other from `first` on: as many,
/// up to `most`, as are like the first. They are the receiver's until it says how many it has read.
struct DirectRun {
  Line* first = nullptr;
  std::uint32_t most = 0;
  std::uint32_t qkey = 0;
  std::uint64_t word = 0;
  std::uint64_t source = 0;  ///< two are the same only if the same queue pair of one peer sent both
  std::uint32_t lane = 0;

  /// Whether there is one at `line`, of `length` bytes.
  [[nodiscard, gnu::always_inline]] bool has(const Line& line,
                                             std::uint64_t& length) const noexcept {
    if (line.word.load(std::memory_order_acquire) != word) return false;
    const std::uint64_t trailer = line.trailer();
    length = trailer >> 32 & 0xffff;
    return static_cast<std::uint32_t>(trailer) == qkey && length <= sizeof line.payload;
  }
  [[nodiscard]] Line* end() const noexcept { return first + most; }
};

/// What the polls since the user's last read have found for a queue pair.
struct DirectRuns {
  static constexpr std::uint32_t kMost = 4;
  DirectRun runs[kMost + 1];  ///< the last is the device's
  std::uint32_t count = 0;
  std::uint64_t wr_id = ~std::uint64_t{0};  ///< of the completion that tells of them
};

/// What became of a send.
enum class Sent : std::uint8_t {
  no,      ///< nothing was sent: the verbs have to do it
  first,   ///< it, and all that follows, is not under way before publish()
  behind,  ///< others
  last     ///< as behind, at DirectLane::last
};

struct DirectEnd;
struct DirectDatagrams {
  /// The sender's end; those of its datagrams are plain.
  DirectSender* (*sender)(ibv_qp* qp) noexcept;
  /// The lane of an address, which lives as long as that; null: nothing can go there directly.
  DirectLane* (*lane)(ibv_ah* ah) noexcept;
  /// As send(), where that does not know whether it can be.
  Sent (*send_after_looking)(const DirectEnd& by, const DatagramAddress& to, std::uint64_t low,
                             std::uint64_t high, const std::byte* payload,
                             std::uint64_t length) noexcept;
  /// Keeps a line's word for publish(): nothing was kept of that lane. As long as the first of
  /// several is not there the peer sees none of them, and does not come for each alone.
  void (*hold)(ibv_ah* ah, Line& line, std::uint64_t word) noexcept;
  /// What was sent is under way.
  void (*publish)(ibv_qp* qp) noexcept;
  /// Short plain datagrams to the queue pair are runs from now on, when its completion queue is
  /// polled; all others take receives, as ever, and so do those if this is null. `runs` must
  /// outlive the queue pair, or this call with another; those in it are given back in any case.
  void (*receive_by)(ibv_qp* qp, DirectRuns* runs) noexcept;
  /// The first `count` datagrams of a run were read: their lines are the peer's again.
  void (*give_back)(ibv_qp* qp, const DirectRun& run, std::uint32_t count) noexcept;
  /// The 40 bytes that the verbs would have put in front of one of so many bytes, of a run that was
  /// not given back.
  void (*write_route)(ibv_qp* qp, const DirectRun& run, std::uint32_t length,
                      std::byte* to) noexcept;
};

/// What sends so.
struct DirectEnd {
  const DirectDatagrams* device = nullptr;
  ibv_qp* qp = nullptr;
  const DirectSender* sender = nullptr;  ///< of the queue pair
};

/// Sends header and payload, of which `length` bytes count, though the receiver may see all
/// kDirectPayload of them, with the next publish() or whatever else the device sends there. There
/// is no completion, and nothing is referred to afterwards.
[[nodiscard, gnu::always_inline]] inline Sent send(const DirectEnd& by, const DatagramAddress& to,
                                                   std::uint64_t low, std::uint64_t high,
                                                   const std::byte* payload,
                                                   std::uint64_t length) noexcept {
  DirectLane& out = *to.lane;
  const std::uint64_t position = out.tail;
  const DirectSender& sender = *by.sender;
  if (position >= out.direct_limit || !sender.straight) [[unlikely]]
    return by.device->send_after_looking(by, to, low, high, payload, length);
  Line& line = out.lines[position % kLaneLines];
  std::memcpy(line.payload, &low, sizeof low);
  std::memcpy(line.payload + sizeof low, &high, sizeof high);
  copy_head(line.payload + kDirectHeader, payload);
  std::memcpy(line.payload + kDirectHeader + 16, payload + 16, kDirectPayload - 16);
  line.set_trailer(kDirectHeader + length, out.ack_on_top, to.qkey);
  out.tail = position + 1;
  const std::uint64_t word = lane_mark(position) << 56 | sender.datagram_word | to.qp_num;
  // Nobody waits for the peer's answer: it is looked for when room is short.
  if (out.held != nullptr) [[likely]] {
    line.word.store(word, std::memory_order_release);
    if (position == out.last) [[unlikely]]
      return Sent::last;
    return Sent::behind;
  }
  by.device->hold(to.ah, line, word);
  return Sent::first;
}

}  // namespace spinwire::base
