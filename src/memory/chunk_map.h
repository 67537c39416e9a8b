// The free chunks of a pool: a tree of bits, searched in a few steps.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace spinwire::memory {

/// One bit per chunk, set while the chunk is free. Each higher level has one bit per non-zero word
/// of the level below. One thread. Only the constructor allocates; all other calls are hot.
class ChunkMap {
 public:
  static constexpr std::uint32_t kNone = 0xffff'ffff;

  ChunkMap() = default;
  /// All `count` chunks are free; count is at most 2^24. Set-up; may throw std::bad_alloc.
  explicit ChunkMap(std::uint32_t count) : count_(count) {
    std::size_t words = count;
    for (auto& level : levels_) {
      words = (words + 63) / 64;
      level.assign(words, 0);
    }
    for (std::uint32_t i = 0; i < count; ++i) set(i);
  }

  [[nodiscard]] bool test(std::uint32_t i) const noexcept {
    return (levels_[0][i / 64] >> (i % 64) & 1) != 0;
  }
  void set(std::uint32_t i) noexcept {
    if (!test(i)) ++free_;
    for (auto& level : levels_) {
      level[i / 64] |= std::uint64_t{1} << (i % 64);
      i /= 64;
    }
  }
  void clear(std::uint32_t i) noexcept {
    if (test(i)) --free_;
    for (auto& level : levels_) {
      level[i / 64] &= ~(std::uint64_t{1} << (i % 64));
      if (level[i / 64] != 0) return;
      i /= 64;
    }
  }

  /// The lowest free chunk; kNone if there is none.
  [[nodiscard]] std::uint32_t find_one() const noexcept {
    if (free_ == 0) return kNone;
    std::uint32_t i = 0;
    for (auto level = levels_.rbegin(); level != levels_.rend(); ++level) {
      i = i * 64 + static_cast<std::uint32_t>(std::countr_zero((*level)[i]));
    }
    return i;
  }

  /// The first chunk of the highest run of `length` free chunks; kNone if there is none. Runs are
  /// taken from the top and single chunks from the bottom, to limit fragmentation. Time is bounded
  /// by the number of chunks.
  [[nodiscard]] std::uint32_t find_run(std::uint32_t length) const noexcept {
    if (length == 0 || free_ < length) return kNone;
    std::uint32_t run = 0;
    for (std::uint32_t i = count_; i > 0;) {
      if (i % 64 == 0 && levels_[0][i / 64 - 1] == 0) {
        run = 0;
        i -= 64;
        continue;
      }
      --i;
      run = test(i) ? run + 1 : 0;
      if (run == length) return i;
    }
    return kNone;
  }

  [[nodiscard]] std::uint32_t size() const noexcept { return count_; }
  [[nodiscard]] std::uint32_t free() const noexcept { return free_; }  ///< number of free chunks

 private:
  std::array<std::vector<std::uint64_t>, 4> levels_;
  std::uint32_t count_ = 0;
  std::uint32_t free_ = 0;
};

}  // namespace spinwire::memory
