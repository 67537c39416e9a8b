// Blocks for copies of payloads that are too long for a slot. Hot.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "memory/poison.h"
#include "spinwire/buffer.h"

namespace spinwire::rpc {

/// A stack of blocks whose payloads are over. Taking one costs less than an allocation, and the
/// last one used is in the caches. Holds a reference to each.
class CopyBlocks {
 public:
  static constexpr std::uint32_t kMost = 64;
  /// Longer blocks are not kept: the stack stays small.
  static constexpr std::size_t kLongest = std::size_t{32} << 10;

  CopyBlocks() noexcept = default;
  CopyBlocks(const CopyBlocks&) = delete;
  CopyBlocks& operator=(const CopyBlocks&) = delete;
  ~CopyBlocks() { (void)release_all(); }

  /// The block that was given last, if it has room for `size` bytes; else null.
  [[nodiscard]] detail::Block* take(std::size_t size) noexcept {
    if (count_ == 0 || blocks_[count_ - 1]->capacity < size) [[unlikely]]
      return nullptr;
    detail::Block* const block = blocks_[--count_];
    memory::unpoison(block->payload, block->capacity);
    return block;
  }
  /// Takes over the reference to a block that holds a copy.
  void give(detail::Block* block) noexcept {
    if (block->refs != 1 || block->capacity > kLongest) [[unlikely]]  // the device still reads it
      return detail::release(block);
    if (count_ == kMost) [[unlikely]]
      return detail::release(block);
    memory::poison(block->payload, block->capacity);
    blocks_[count_++] = block;
  }
  /// Returns false if there were none. Cold.
  bool release_all() noexcept {
    const bool some = count_ != 0;
    while (count_ != 0) {
      detail::Block* const block = blocks_[--count_];
      memory::unpoison(block->payload, block->capacity);
      detail::release(block);
    }
    return some;
  }

 private:
  std::array<detail::Block*, kMost> blocks_{};
  std::uint32_t count_ = 0;
};

}  // namespace spinwire::rpc
