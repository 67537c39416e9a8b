// Direct datagrams bypass the verbs. The sender writes a datagram's line, and the bytes that do not
// fit there, without a work request. The receiver reads both in place, without a receive, and one
// completion reports any number of datagrams. Adapters have inline sends, multi-packet receive
// queues and compressed completions for this purpose. The layers above use
// verbs/direct_datagrams.h. Hot.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/copy.h"
#include "softverbs/lane/direct_lane.h"
#include "softverbs/lane/line.h"

namespace spinwire::softverbs {

/// The part of a queue pair that a direct sender uses.
struct DirectSender {
  std::uint64_t datagram_word = 0;  ///< constant part of a plain datagram's word
  bool sends_at_once = false;       ///< no datagram waits, and the state is RTS
  DirectRound* round = nullptr;     ///< of the context
};

/// The destination of a datagram.
struct DatagramAddress {
  ibv_ah* ah = nullptr;
  std::uint32_t qp_num = 0;
  std::uint32_t qkey = 0;      ///< used literally: the highest bit has no meaning
  DirectLane* lane = nullptr;  ///< lane of `ah`; null: no direct datagrams
  /// For the layers above: datagrams that are longer than a line wait for room, so later ones wait
  /// behind them.
  bool holds_back = false;
};

/// A direct datagram is a header of two words, which the sender has in registers, and a payload. A
/// payload of up to kDirectPayload bytes fits into the line. The line of a longer one has a copy of
/// the header: what the header leads to need not wait for the data, whose cache lines the receiver
/// gets from the sender only when it knows their place.
inline constexpr std::size_t kDirectHeader = 16;
inline constexpr std::size_t kDirectPayload = 32;
/// The longest direct datagram, with its header. The verbs of an adapter carry no more than the
/// MTU; direct datagrams lie in memory, so a block of 32 KiB goes as a whole.
inline constexpr std::uint32_t kLongestDirect = (32 << 10) + kDirectHeader;
static_assert(kDirectHeader + kDirectPayload == sizeof Line::payload);

/// Consecutive datagrams in a lane, to be read in place: those with the word of the first, up to
/// end(). They belong to the receiver until it releases the batch.
struct DirectBatch {
  Line* first = nullptr;
  Line* limit = nullptr;
  LaneData data;  ///< of the lane
  std::uint64_t word = 0;
  std::uint64_t source = 0;  ///< identifies the sending queue pair and its context
  DirectInLane* lane = nullptr;
  std::uint32_t qkey = 0;

  /// The header and payload of a datagram of the batch, and their length. Null if `line` holds no
  /// datagram of the batch, or one longer than `longest`.
  [[nodiscard, gnu::always_inline]] std::byte* bytes(Line& line, std::uint64_t& length,
                                                     const std::uint32_t& longest) const noexcept {
    if (line.word.load(std::memory_order_acquire) != word) return nullptr;
    const std::uint64_t trailer = line.trailer();
    length = trailer >> 32 & 0xffff;
    if (static_cast<std::uint32_t>(trailer) != qkey) [[unlikely]]
      return nullptr;
    if (length <= sizeof line.payload) [[likely]]
      return line.payload;
    return length <= longest ? packet_data(data, line, length) : nullptr;
  }
  /// The header of a datagram of the batch, from its line. Null if `line` holds no datagram of the
  /// batch; it may also be one that bytes() refuses.
  [[nodiscard, gnu::always_inline]] const std::byte* header(const Line& line) const noexcept {
    return line.word.load(std::memory_order_acquire) == word ? line.payload : nullptr;
  }
  [[nodiscard]] Line* end() const noexcept { return limit; }
};

/// The batches that polls have reported to a queue pair since its user last read them.
struct DirectBatches {
  static constexpr std::uint32_t kMost = 4;
  const DirectBatch* batches[kMost]{};  ///< each is valid until it is released
  std::uint32_t count = 0;
  std::uint32_t longest = 0;                ///< bytes of the longest datagram that the user accepts
  std::uint64_t wr_id = ~std::uint64_t{0};  ///< of the completion that reports the batches
  ibv_wc completion{};                      ///< that completion; filled in by receive_batches()
};

/// Ends a batch and returns the lines of its first `count` datagrams to the sender.
inline void release_batch(const DirectBatch& batch, std::uint32_t count) noexcept {
  DirectInLane& lane = *batch.lane;
  lane.batch_reported = false;
  advance(lane, count);
  publish_head(lane);
}

struct DirectEnd;
struct DirectDatagrams {
  /// The part of a queue pair for direct senders.
  DirectSender* (*sender)(ibv_qp* qp) noexcept;
  /// The lane of an address handle, valid as long as the handle; null if it has no direct
  /// datagrams, or faults are injected.
  DirectLane* (*lane)(ibv_ah* ah) noexcept;
  /// send_direct() calls it at the limit: renews DirectLane::direct_limit and sends, or refuses.
  Sent (*send_checked)(const DirectEnd& by, const DatagramAddress& to, std::uint64_t low,
                       std::uint64_t high, const std::byte* payload, std::uint64_t length) noexcept;
  /// Sends a payload longer than kDirectPayload, up to kLongestDirect with the header; reads
  /// exactly `length` bytes. The receiver's DirectBatches::longest must allow it: it drops one that
  /// is longer than that and than the MTU.
  Sent (*send_long)(const DirectEnd& by, const DatagramAddress& to, std::uint64_t low,
                    std::uint64_t high, const std::byte* payload, std::uint64_t length) noexcept;
  /// Begins a group with the line at `position`; the lane must have no held line. Holds back the
  /// line's word until the group is complete or publish(): until then the peer sees no line behind
  /// it, so it does not fetch each line alone.
  void (*begin_group)(ibv_ah* ah, Line& line, std::uint64_t position, std::uint64_t word) noexcept;
  /// Publishes the held line of a complete group: see DirectLane::last.
  void (*publish_group)(ibv_ah* ah) noexcept;
  /// Wakes the peer, which is asleep.
  void (*wake)(ibv_ah* ah) noexcept;
  /// Publishes all held lines, and begins a new round.
  void (*publish)(ibv_qp* qp) noexcept;
  /// Makes polls report plain datagrams of up to DirectBatches::longest bytes to the queue pair in
  /// `batches`, whose `wr_id` is set. Other datagrams consume receives; all do if `batches` is
  /// null. `batches` must live until the queue pair is destroyed or the next such call; batches
  /// reported before still have to be released.
  void (*receive_batches)(ibv_qp* qp, DirectBatches* batches) noexcept;
  /// Writes the 40-byte route header that verbs put before a datagram of `length` bytes. Call it
  /// before the batch is released.
  void (*write_route)(const DirectBatch& batch, std::uint32_t length, std::byte* to) noexcept;
};

/// A sender of direct datagrams.
struct DirectEnd {
  const DirectDatagrams* device = nullptr;
  ibv_qp* qp = nullptr;
  const DirectSender* sender = nullptr;  ///< of the queue pair
};

/// Publishes the line at `position`, whose bytes are written, if it is the first of its round. Else
/// queues it until its group is complete or the next publish().
[[nodiscard, gnu::always_inline]] inline Sent queue_direct(const DirectEnd& by,
                                                           const DatagramAddress& to, Line& line,
                                                           std::uint64_t position,
                                                           std::uint64_t bytes,
                                                           std::uint64_t constant_word) noexcept {
  DirectLane& out = *to.lane;
  line.set_trailer(bytes, out.ack_on_top, to.qkey);
  out.tail = position + 1;
  const std::uint64_t word = lane_mark(position) << 56 | constant_word | to.qp_num;
  // No watch_answers(): acknowledgements of datagrams are read only when room is short.
  if (out.held != nullptr) {
    line.word.store(word, std::memory_order_release);
    if (position == out.last) [[unlikely]]
      by.device->publish_group(to.ah);
    return Sent::queued;
  }
  const std::uint32_t round = by.sender->round->number;
  if (out.round == round) {
    by.device->begin_group(to.ah, line, position, word);
    return Sent::held;
  }
  if (publish_first(out, line, word, round)) [[unlikely]]
    by.device->wake(to.ah);
  return Sent::published;
}

/// Sends a header and `length` bytes of payload. Always reads kDirectPayload bytes, and the
/// receiver may see them. Its group, the next publish(), or any other packet to the peer
/// publishes the datagram. There is no completion; the payload may be reused at once.
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
  return queue_direct(by, to, line, position, kDirectHeader + length, sender.datagram_word);
}

/// The device's calls for direct datagrams.
[[nodiscard]] const DirectDatagrams& direct_datagrams() noexcept;

}  // namespace spinwire::softverbs
