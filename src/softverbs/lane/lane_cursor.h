// Moving bytes between scatter/gather lists and the lines of a lane. Hot.
#pragma once

#include <infiniband/verbs.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/copy.h"
#include "softverbs/lane/segment.h"

namespace spinwire::softverbs {

using base::copy_small;

inline std::byte* pointer(std::uint64_t address) noexcept {
  return reinterpret_cast<std::byte*>(address);  // verbs carry addresses as integers
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
  Piece next(std::size_t n) noexcept {
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
