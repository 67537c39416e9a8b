// The line, the unit that lanes carry. Hot.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace spinwire::softverbs {

/// A line, one cacheline of a lane; a lane is a ring of lines in the receiver's memory. A packet is
/// one line, or a first line and continuation lines that carry only `word` and payload. The first
/// line's word is written last. Every line carries the mark of its lap, so bytes of an earlier lap
/// are never taken for a new line.
struct Line {
  // mark:8 | opcode:4 | flags:4 | psn:24 | queue pair:24; datagrams name their sender as the PSN
  std::atomic<std::uint64_t> word;
  /// Immediate in network order, key to invalidate, or Q_Key of a datagram.
  std::uint32_t imm;
  std::uint16_t length;  ///< payload bytes in the lane; for a reference, of its descriptors
  std::uint16_t ack;  ///< low bits of the lines that the sender has consumed of the opposite lane
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
    return trailer;
  }
};
static_assert(sizeof(Line) == 64 && offsetof(Line, length) == 12 && offsetof(Line, ack) == 14);

inline constexpr std::uint32_t kLaneLines = 256;
constexpr std::uint64_t lane_mark(std::uint64_t position) {
  return ((position / kLaneLines) + 1) & 0xff;
}

}  // namespace spinwire::softverbs
