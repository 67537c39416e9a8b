// Copying a few bytes without a call. Hot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace spinwire::base {

/// Copies the 16 bytes that a message most often begins with, a header and a word of the payload,
/// each just written: a load of both at once would wait for both stores.
inline void copy_head(std::byte* to, const std::byte* from) noexcept {
  std::uint64_t header, word;
  std::memcpy(&header, from, 8);
  std::memcpy(&word, from + 8, 8);
  std::memcpy(to, &header, 8);
  std::memcpy(to + 8, &word, 8);
}

/// Copies up to 48 bytes without a call: overlapping moves of the largest size that fits. The two
/// ranges do not overlap each other.
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
    std::uint64_t head, tail;
    std::memcpy(&head, from, 8);
    std::memcpy(&tail, from + n - 8, 8);
    std::memcpy(to, &head, 8);
    std::memcpy(to + n - 8, &tail, 8);
  } else if (n >= 4) {
    std::uint32_t head, tail;
    std::memcpy(&head, from, 4);
    std::memcpy(&tail, from + n - 4, 4);
    std::memcpy(to, &head, 4);
    std::memcpy(to + n - 4, &tail, 4);
  } else if (n != 0) {
    to[0] = from[0];
    to[n / 2] = from[n / 2];
    to[n - 1] = from[n - 1];
  }
}

}  // namespace spinwire::base
