// The text that shows all of an engine, for people: Engine::describe(). Cold.
#pragma once

#include <cstddef>
#include <string>

namespace spinwire::detail {
class EngineCore;
}

namespace spinwire::engine {

/// Lines of each kind: connections, sessions, served sessions, leases, listeners, timers.
inline constexpr std::size_t kDescribedOfEach = 64;

/// See Engine::describe(). May throw std::bad_alloc.
std::string describe(const detail::EngineCore& core);

}  // namespace spinwire::engine
