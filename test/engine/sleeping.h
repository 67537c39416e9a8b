// Shared by the tests of engines that sleep.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "engine/harness.h"

namespace engine_test {

/// Peers that sleep on fd() without a deadline send no keepalives.
inline Config lenient_config(Config c = small_config()) {
  c.connections.peer_timeout = 1h;
  c.connections.keepalive_interval = 1h;
  c.connections.credit_idle_timeout = 1h;
  return c;
}

/// The shortest time that `attempt` takes. No engine sleeps longer than 250 ms.
template <typename Attempt>
spinwire::Nanoseconds shortest_of(int times, Attempt&& attempt) {
  const Clock clock = Clock::real();
  spinwire::Nanoseconds shortest = 1h;
  for (int i = 0; i < times; ++i) {
    const std::uint64_t begin = clock.now();
    attempt();
    shortest = std::min(shortest, clock.duration(clock.now() - begin));
  }
  return shortest;
}

}  // namespace engine_test
