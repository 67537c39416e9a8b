// Statistics of an engine, for the application and for observers. Cold, except for memory_stats().
#pragma once

#include <string_view>

#include "control/control_port.h"
#include "memory/arena.h"
#include "spinwire/engine.h"

namespace spinwire::detail {
class EngineCore;
}

namespace spinwire::engine {

memory::PoolId pool_id(Pool pool) noexcept;
std::string_view name_of(Pool pool) noexcept;
MemoryStats memory_stats(const detail::EngineCore& core, Pool pool) noexcept;
/// Adds the counters of handshakes.
void add_control_counters(const control::ControlPort& control, EngineStats& stats) noexcept;
/// In constant time.
EngineStats stats_at_a_glance(const detail::EngineCore& core) noexcept;
RpcStats call_stats(const detail::EngineCore& core) noexcept;
EngineSnapshot snapshot(const detail::EngineCore& core) noexcept;

}  // namespace spinwire::engine
