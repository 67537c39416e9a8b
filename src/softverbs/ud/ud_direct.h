// Direct datagrams: short datagrams that bypass the verbs. The sender writes the line that the
// device carries, without a work request. The receiver reads it in place, without a receive, and
// one completion reports any number. Adapters have inline sends, multi-packet receive queues and
// compressed completions for the same purpose. The layers above use them through
// verbs/direct_datagrams.h. Hot.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/copy.h"
#include "softverbs/lane/line.h"

namespace spinwire::softverbs {

/// The part of the lane to a peer that a direct sender uses.
struct DirectLane {
  Line* lines = nullptr;
  std::uint64_t tail = 0;  ///< next position to write
  /// Direct datagrams stay below this position; 0 sends them through the device.
  std::uint64_t direct_limit = 0;
  /// Number of lines consumed of the opposite lane, in the topmost bits: each packet carries it.
  std::uint64_t ack_on_top = 0;
  Line* held = nullptr;  ///< the first unpublished line; publishing writes `held_word` to it
  std::uint64_t held_word = 0;
  std::uint64_t last = 0;  ///< position at which the sender wants the held lines published
};

/// The part of a queue pair that a direct sender uses.
struct DirectSender {
  std::uint64_t datagram_word = 0;  ///< constant part of a plain datagram's word
  bool sends_at_once = false;       ///< no datagram waits, and the state allows sending
};

/// Where a datagram goes.
struct DatagramAddress {
  ibv_ah* ah = nullptr;
  std::uint32_t qp_num = 0;
  std::uint32_t qkey = 0;      ///< taken literally: its highest bit has no meaning
  DirectLane* lane = nullptr;  ///< of `ah`; null: no direct datagrams
};

/// A short datagram: a header of two words, which the sender has in registers, and a payload.
inline constexpr std::size_t kDirectHeader = 16;
inline constexpr std::size_t kDirectPayload = 32;
static_assert(kDirectHeader + kDirectPayload == sizeof Line::payload);

/// Consecutive datagrams in a lane, to be read in place: as many, up to `most`, as have the word of
/// the first. They belong to the receiver until it releases the run.
struct DirectRun {
  Line* first = nullptr;
  std::uint32_t most = 0;
  std::uint32_t qkey = 0;
  std::uint64_t word = 0;
  std::uint64_t source = 0;  ///< identifies the sending queue pair and its context
  std::uint32_t lane = 0;

  /// Whether `line` holds a datagram of the run; sets `length`.
  [[nodiscard, gnu::always_inline]] bool has(const Line& line,
                                             std::uint64_t& length) const noexcept {
    if (line.word.load(std::memory_order_acquire) != word) return false;
    const std::uint64_t trailer = line.trailer();
    length = trailer >> 32 & 0xffff;
    return static_cast<std::uint32_t>(trailer) == qkey && length <= sizeof line.payload;
  }
  [[nodiscard]] Line* end() const noexcept { return first + most; }
};

/// The runs that polls have found for a queue pair since its user last read them.
struct DirectRuns {
  static constexpr std::uint32_t kMost = 4;
  DirectRun runs[kMost + 1];  ///< the last entry is scratch space of the device
  std::uint32_t count = 0;
  std::uint64_t wr_id = ~std::uint64_t{0};  ///< of the completion that reports them
};

/// Result of a direct send.
enum class Sent : std::uint8_t {
  refused,  ///< nothing was sent: use the verbs
  first,    ///< written; it and all behind it wait for publish()
  queued,   ///< written behind an unpublished line
  last      ///< queued, at DirectLane::last
};

struct DirectEnd;
struct DirectDatagrams {
  /// The queue pair's part for direct senders.
  DirectSender* (*sender)(ibv_qp* qp) noexcept;
  /// The lane of an address handle, valid as long as the handle; null: no direct datagrams.
  DirectLane* (*lane)(ibv_ah* ah) noexcept;
  /// send_direct() calls it at the limit: sets DirectLane::direct_limit anew and sends, or refuses.
  Sent (*send_checked)(const DirectEnd& by, const DatagramAddress& to, std::uint64_t low,
                       std::uint64_t high, const std::byte* payload, std::uint64_t length) noexcept;
  /// Holds back a line's word until publish(); the lane has no held line. The peer sees none of the
  /// lines behind it before that, so it does not fetch each alone.
  void (*hold)(ibv_ah* ah, Line& line, std::uint64_t word) noexcept;
  /// Publishes all held lines.
  void (*publish)(ibv_qp* qp) noexcept;
  /// From now on polls report short plain datagrams to the queue pair in `runs`. Other datagrams
  /// consume receives, and all do if `runs` is null. `runs` must outlive the queue pair or the next
  /// such call; runs that are in it then still have to be released.
  void (*receive_runs)(ibv_qp* qp, DirectRuns* runs) noexcept;
  /// Returns the lines of the first `count` datagrams of a run to the sender; the run ends.
  void (*release_run)(ibv_qp* qp, const DirectRun& run, std::uint32_t count) noexcept;
  /// Writes the 40 bytes of route header that the verbs put before a datagram of `length` bytes.
  /// The run must not be released.
  void (*write_route)(ibv_qp* qp, const DirectRun& run, std::uint32_t length,
                      std::byte* to) noexcept;
};

/// A sender of direct datagrams.
struct DirectEnd {
  const DirectDatagrams* device = nullptr;
  ibv_qp* qp = nullptr;
  const DirectSender* sender = nullptr;  ///< of the queue pair
};

/// Sends a header and `length` bytes of payload; reads all kDirectPayload bytes, and the receiver
/// may see them. The next publish(), or any other packet to that peer, publishes the datagram.
/// There is no completion; the payload may be reused at once.
[[nodiscard, gnu::always_inline]] inline Sent send_direct(const DirectEnd& by,
                                                          const DatagramAddress& to,
                                                          std::uint64_t low, std::uint64_t high,
                                                          const std::byte* payload,
                                                          std::uint64_t length) noexcept {
  DirectLane& out = *to.lane;
  const std::uint64_t position = out.tail;
  const DirectSender& sender = *by.sender;
  if (position >= out.direct_limit || !sender.sends_at_once) [[unlikely]]
    return by.device->send_checked(by, to, low, high, payload, length);
  Line& line = out.lines[position % kLaneLines];
  std::memcpy(line.payload, &low, sizeof low);
  std::memcpy(line.payload + sizeof low, &high, sizeof high);
  base::copy_head(line.payload + kDirectHeader, payload);
  std::memcpy(line.payload + kDirectHeader + 16, payload + 16, kDirectPayload - 16);
  line.set_trailer(kDirectHeader + length, out.ack_on_top, to.qkey);
  out.tail = position + 1;
  const std::uint64_t word = lane_mark(position) << 56 | sender.datagram_word | to.qp_num;
  // Acknowledgements of datagrams are read only when room is short.
  if (out.held != nullptr) [[likely]] {
    line.word.store(word, std::memory_order_release);
    if (position == out.last) [[unlikely]]
      return Sent::last;
    return Sent::queued;
  }
  by.device->hold(to.ah, line, word);
  return Sent::first;
}

/// The device's calls for direct datagrams.
[[nodiscard]] const DirectDatagrams& direct_datagrams() noexcept;

}  // namespace spinwire::softverbs
