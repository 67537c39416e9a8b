// The line, the unit of a lane, and the control words of a lane. Hot.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace spinwire::softverbs {

/// A value that was read from memory which peers can change. The compiler may not read the memory
/// again in place of using the value, as it may after a plain load: a check would then be of
/// another value. Costs no instruction, unlike a volatile or atomic load of a short field.
template <typename T>
[[nodiscard, gnu::always_inline]] inline T read_once(T value) noexcept {
  static_assert(std::is_integral_v<T>);
  asm("" : "+r"(value));
  return value;
}

/// A line, one cache line of a lane; a lane is a ring of lines in the receiver's memory. A packet
/// is one line. Bytes that do not fit lie in the lane's data, and the payload ends with their
/// offset; that of a datagram begins with their head. The word is written last. It carries the mark
/// of its lap, so a line of an earlier lap is never taken for a new one.
struct Line {
  // mark:8 | opcode:4 | flags:4 | psn:24 | queue pair:24; datagrams name their sender as the PSN
  std::atomic<std::uint64_t> word;
  /// Immediate in network order, key to invalidate, or Q_Key of a datagram.
  std::uint32_t imm;
  std::uint16_t length;  ///< length of the packet's bytes; of a reference packet's descriptors
  std::uint16_t ack;     ///< low bits of the number of lines consumed of the opposite lane
  std::byte payload[48];

  /// Writes `imm`, `length` and `ack` (in the topmost bits of a word) with one store.
  void set_trailer(std::uint64_t bytes, std::uint64_t ack_on_top,
                   std::uint32_t immediate = 0) noexcept {
    const std::uint64_t trailer = immediate | bytes << 32 | ack_on_top;
    std::memcpy(reinterpret_cast<std::byte*>(this) + sizeof word, &trailer, sizeof trailer);
  }
  /// Reads `imm`, `length` and `ack` with one load.
  [[nodiscard]] std::uint64_t trailer() const noexcept {
    std::uint64_t trailer = 0;
    std::memcpy(&trailer, reinterpret_cast<const std::byte*>(this) + sizeof word, sizeof trailer);
    return read_once(trailer);
  }
  // The receiver reads each field once, because the sender can change it at any time.
  [[nodiscard]] std::uint32_t read_imm() const noexcept { return read_once(imm); }
  // Wide, because the compiler does not know that the upper half of a narrow one is zero.
  [[nodiscard]] std::uint64_t read_length() const noexcept {
    return read_once(std::uint64_t{length});
  }
  [[nodiscard]] std::uint32_t read_ack() const noexcept { return read_once(std::uint32_t{ack}); }
};
static_assert(sizeof(Line) == 64 && offsetof(Line, length) == 12 && offsetof(Line, ack) == 14);

/// Control words of a lane, grouped by their writer.
struct LaneControl {
  // Written by the receiver; the sender reads them while it has unacknowledged packets.
  alignas(64) std::atomic<std::uint64_t> head;  ///< lines consumed: a cumulative acknowledgement
  /// Position + 1 of the last refused packet's line. Written before the head that covers the
  /// packet.
  std::atomic<std::uint64_t> last_nak;
  // Written by the sender.
  /// Odd while the sender, in another process, accesses the receiver's memory.
  alignas(64) std::atomic<std::uint64_t> access_serial;
  // Written by the receiver, rarely: has its own cache line, so that the sender's reads hit its
  // cache.
  alignas(64) std::atomic<std::uint32_t> asleep;
  alignas(64) std::byte spare[64];
};

inline constexpr std::uint32_t kLaneLines = 256;
/// Bytes of a lane's data: 32 packets of 8 KiB with their headers. A sender starts with a smaller
/// part.
inline constexpr std::uint32_t kLaneData = 288 * 1024;
/// The first lanes of a segment have more, because address space for all would be too much: 32
/// packets of 32 KiB.
inline constexpr std::uint32_t kWideLanes = 64;
inline constexpr std::uint32_t kWideLaneData = 4 * kLaneData;
constexpr std::uint32_t lane_data_bytes(std::uint32_t index) {
  return index < kWideLanes ? kWideLaneData : kLaneData;
}

/// Where the payload of a line has the offset of bytes in the lane's data.
inline constexpr std::size_t kOffsetAt = sizeof Line::payload - sizeof(std::uint32_t);

/// The data of a lane, as its receiver reads it.
struct LaneData {
  std::byte* begin = nullptr;
  std::uint32_t size = 0;
};
/// The bytes of a packet that is longer than a line's payload. Null if they do not lie in the
/// lane's data, which only a hostile sender's line does. Reads the offset once, because the peer
/// can change it.
[[nodiscard]] inline std::byte* packet_data(const LaneData& data, const Line& line,
                                            std::uint64_t length) noexcept {
  std::uint32_t offset = 0;
  std::memcpy(&offset, line.payload + kOffsetAt, sizeof offset);
  const std::uint64_t at = read_once(std::uint64_t{offset});
  return length <= data.size && at <= data.size - length ? data.begin + at : nullptr;
}
constexpr std::uint64_t lane_mark(std::uint64_t position) {
  return ((position / kLaneLines) + 1) & 0xff;
}

}  // namespace spinwire::softverbs
