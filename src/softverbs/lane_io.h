// Moving bytes between scatter/gather lists and the lines of a lane. Hot.
#pragma once

#include <infiniband/verbs.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "softverbs/segment.h"

namespace spinwire::softverbs {

inline std::byte* pointer(std::uint64_t address) noexcept {
  return reinterpret_cast<std::byte*>(address);  // verbs carry addresses as integers
}

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
inline void copy_small(std::byte* to, const std::byte* from, std::size_t n) noexcept {
  if (n >= 32) {
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

/// Walks the payload bytes of a packet's lines, writing or reading.
class LaneCursor {
 public:
  LaneCursor(Line* lines, std::uint64_t position) noexcept
      : lines_(lines), position_(position), at_(line().payload), left_(kFirstLineBytes) {}

  void write(const std::byte* from, std::size_t n) noexcept {
    while (n != 0) {
      const std::size_t part = step(n);
      std::memcpy(at_ - part, from, part);
      from += part;
      n -= part;
    }
  }
  void read(std::byte* to, std::size_t n) noexcept {
    while (n != 0) {
      const std::size_t part = step(n);
      std::memcpy(to, at_ - part, part);
      to += part;
      n -= part;
    }
  }

 private:
  Line& line() const noexcept { return lines_[position_ & (kLaneLines - 1)]; }

  /// Takes up to n bytes that lie together, moving past them.
  std::size_t step(std::size_t n) noexcept {
    if (left_ == 0) {
      ++position_;
      at_ = reinterpret_cast<std::byte*>(&line()) + sizeof(Line::word);
      left_ = kNextLineBytes;
    }
    const std::size_t part = std::min(n, left_);
    at_ += part;
    left_ -= part;
    return part;
  }

  Line* lines_;
  std::uint64_t position_;
  std::byte* at_;
  std::size_t left_;
};

/// Walks a scatter list, handing out pieces of it.
class ScatterCursor {
 public:
  ScatterCursor(const ibv_sge* sges, std::uint32_t count) noexcept
      : sge_(sges), end_(sges + count) {
    skip_empty();
  }
  /// The next piece of at most n bytes; length 0 at the end of the list.
  struct Piece {
    std::byte* data;
    std::size_t length;
  };
  Piece take(std::size_t n) noexcept {
    if (sge_ == end_) return {nullptr, 0};
    const std::size_t part = std::min<std::size_t>(n, sge_->length - used_);
    const Piece piece{pointer(sge_->addr) + used_, part};
    used_ += part;
    skip_empty();
    return piece;
  }

 private:
  void skip_empty() noexcept {
    while (sge_ != end_ && used_ == sge_->length) {
      ++sge_;
      used_ = 0;
    }
  }
  const ibv_sge* sge_;
  const ibv_sge* end_;
  std::size_t used_ = 0;
};

}  // namespace spinwire::softverbs
