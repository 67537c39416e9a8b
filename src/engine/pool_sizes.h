// Sizes of an engine's pools.
#pragma once

#include <array>
#include <cstdint>

#include "memory/arena.h"
#include "spinwire/config.h"

namespace spinwire::engine {

/// Bytes of a credit cell's block.
inline constexpr std::uint64_t kCellBytes = memory::small_block_bytes(1);

/// Bytes of each pool, in the order of memory::PoolId; not rounded to chunks.
[[nodiscard]] std::array<std::uint64_t, memory::kPoolCount> pool_bytes(
    const Config& config) noexcept;

}  // namespace spinwire::engine
