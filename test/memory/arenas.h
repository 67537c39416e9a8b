// Arenas with pools of some chunks each.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>

#include "base/internals.h"
#include "memory/arena.h"

namespace arena_test {

using spinwire::Buffer;
using spinwire::Status;
using spinwire::detail::Block;
using spinwire::memory::Arena;
using spinwire::memory::ArenaOptions;
using spinwire::memory::ArenaPtr;
using spinwire::memory::kChunkBytes;
using spinwire::memory::PoolId;
using spinwire::memory::Reuse;

inline ArenaPtr make_arena(std::uint64_t send, std::uint64_t receive = 0, std::uint64_t lease = 0,
                           std::uint64_t control = 0) {
  ArenaOptions options;
  options.pool_bytes = {send * kChunkBytes, receive * kChunkBytes, lease * kChunkBytes,
                        control * kChunkBytes};
  options.hugepages = spinwire::HugepagePolicy::off;
  auto arena = Arena::make(options);
  EXPECT_TRUE(arena.has_value()) << arena.error().message();
  return arena ? std::move(*arena) : nullptr;
}

/// What an audit finds; empty: nothing.
inline std::string fault(const Arena& arena) {
  const auto result = arena.audit();
  return result ? "" : result.error().message();
}

inline void give_back(Block* block) { spinwire::detail::release(block); }

}  // namespace arena_test
