// What the operations of connections do with memory, for checked accesses. Cold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace spinwire::agent {

struct EngineContext;

enum class MemoryUse : std::uint8_t { none, read, changed };

/// What operations that have not ended do with any of the bytes: the most of it. Takes time in
/// proportion to the connections and their operations.
MemoryUse memory_use(EngineContext& ctx, std::span<const std::byte> bytes) noexcept;

}  // namespace spinwire::agent
