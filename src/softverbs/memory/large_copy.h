// Copies of many bytes. A destination that leaves the cache before it is written again is written
// past the cache. measurements.md, "Copies past the cache", has the figures.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace spinwire::softverbs {

/// The size of a third-level cache, as the kernel says; 0: there is none, or it is not known. Read
/// once. (The C library adds up the caches of all processors on some machines.)
std::size_t third_level_cache_bytes() noexcept;

/// Copies bytes that may overlap. If they do not, and the processor has AVX2, the stores go past
/// the cache.
void copy_past_cache(std::byte* to, const std::byte* from, std::size_t length) noexcept;

/// Remembers when each part of memory was last written by a copy, in bytes that have been copied
/// since. A store to a line that has left the cache first reads it from memory. For a large
/// copy that is half as much traffic again, and it takes the place of lines that are still wanted.
class LargeCopies {
 public:
  /// Shorter copies are left to the C library, and are not remembered. Long messages are read in
  /// pieces of this size.
  static constexpr std::size_t kLeast = std::size_t{128} << 10;

  explicit LargeCopies(std::size_t cache = third_level_cache_bytes()) noexcept;

  /// Copies bytes that may overlap. Hot.
  void copy(std::byte* to, const std::byte* from, std::size_t length) noexcept {
    if (length < kLeast) [[likely]] {
      std::memmove(to, from, length);
    } else {
      copy_many(to, from, length);
    }
  }

  /// Whether the bytes at `to` were last written so long ago that the copies since then, this one
  /// and what they read, have filled the cache. Counts this copy, of at least kLeast bytes.
  bool left_cache(const std::byte* to, std::size_t length) noexcept;

 private:
  static constexpr std::size_t kUnit = 4096;  ///< parts_ counts in so many bytes
  static constexpr std::size_t kParts = 2048;

  void copy_many(std::byte* to, const std::byte* from, std::size_t length) noexcept;

  /// Addresses far apart share a part. The bytes then seem to have been written later than they
  /// were, which chooses the ordinary copy. Regions whose distance is a power of two must not share
  /// all of theirs, so each turn through the parts begins elsewhere, by the golden ratio.
  [[nodiscard]] std::size_t index_of(std::size_t part) const noexcept {
    const std::uint64_t turn = part / kParts;
    return (part + (turn * 0x9e37'79b9'7f4a'7c15 >> 32)) % kParts;
  }

  std::size_t cache_;
  unsigned part_shift_;
  std::uint64_t copied_ = 0;
  std::array<std::uint32_t, kParts> parts_{};  ///< `copied_` when a copy last wrote the whole part
};

}  // namespace spinwire::softverbs
