// Messages that are read where they lie in the device's memory (verbs/direct_messages.h), and the
// blocks for those that are kept. Hot unless marked.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "spinwire/buffer.h"

namespace spinwire::agent {

struct EngineContext;

/// Blocks of the receive pool for messages that the application keeps when the pool is empty. A
/// poll reads no more messages in place than there are spare blocks, so keeping never fails.
struct SpareBlocks {
  static constexpr std::uint32_t kMost = 32;
  std::array<detail::Block*, kMost> blocks{};
  std::uint32_t count = 0;
};

/// Begins direct messages if the configuration and the device allow them. Set-up.
void open_in_place(EngineContext& ctx) noexcept;
/// Takes blocks from the pool until all spare ones are there, or the pool is empty.
void fill_spare_blocks(EngineContext& ctx) noexcept;
/// Raises the number of messages that a poll may read in place, after the pool was empty. Cold.
void renew_spare_blocks(EngineContext& ctx) noexcept;
/// A block of the receive pool, or a spare one.
[[nodiscard]] detail::Block* block_for_kept(EngineContext& ctx) noexcept;
/// A block for a message of so many bytes: of the pool of rendezvous messages, if it is longer than
/// the eager limit. Null: that pool is empty.
[[nodiscard]] detail::Block* block_for_kept(EngineContext& ctx, std::size_t size) noexcept;

}  // namespace spinwire::agent
