// Copying a few bytes without a call. Hot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace spinwire::base {

/// Copies 16 bytes as two words: most messages begin with a header and a word of the payload, each
/// just written. One load of both would wait for both stores.
inline void copy_head(std::byte* to, const std::byte* from) noexcept {
  std::uint64_t header, word;
  std::memcpy(&header, from, 8);
  std::memcpy(&word, from + 8, 8);
  std::memcpy(to, &header, 8);
  std::memcpy(to + 8, &word, 8);
}

/// Copies from one to two words, by two moves that may overlap.
template <typename Word>
[[gnu::always_inline]] inline void copy_ends(std::byte* to, const std::byte* from,
                                             std::size_t n) noexcept {
  Word head, tail;
  std::memcpy(&head, from, sizeof head);
  std::memcpy(&tail, from + n - sizeof tail, sizeof tail);
  std::memcpy(to, &head, sizeof head);
  std::memcpy(to + n - sizeof tail, &tail, sizeof tail);
}

/// Copies up to 48 bytes without a call, by overlapping moves of the largest size that fits. The
/// two ranges must not overlap.
[[gnu::always_inline]] inline void copy_small(std::byte* to, const std::byte* from,
                                              std::size_t n) noexcept {
  if (n >= 32) [[likely]] {
    std::byte tail[16];
    std::memcpy(tail, from + n - 16, 16);
    copy_head(to, from);
    std::memcpy(to + 16, from + 16, 16);
    std::memcpy(to + n - 16, tail, 16);
  } else if (n >= 16) {
    std::byte tail[16];
    std::memcpy(tail, from + n - 16, 16);
    copy_head(to, from);
    std::memcpy(to + n - 16, tail, 16);
  } else if (n >= 8) {
    copy_ends<std::uint64_t>(to, from, n);
  } else if (n >= 4) {
    copy_ends<std::uint32_t>(to, from, n);
  } else if (n != 0) {
    to[0] = from[0];
    to[n / 2] = from[n / 2];
    to[n - 1] = from[n - 1];
  }
}

/// What copy_line() copies at most.
inline constexpr std::size_t kLongestLine = 64;
/// Copies from 32 to 64 bytes without a call, by moves that may overlap. The ranges must not.
[[gnu::always_inline]] inline void copy_line(std::byte* to, const std::byte* from,
                                             std::size_t n) noexcept {
  std::byte rest[16], tail[16];
  std::memcpy(rest, from + n - 32, 16);
  std::memcpy(tail, from + n - 16, 16);
  copy_head(to, from);
  std::memcpy(to + 16, from + 16, 16);
  std::memcpy(to + n - 32, rest, 16);
  std::memcpy(to + n - 16, tail, 16);
}

}  // namespace spinwire::base
