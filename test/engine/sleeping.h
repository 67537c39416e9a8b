// Shared by the tests of engines that sleep.
#pragma once

#include <poll.h>

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

/// Whether the engine's descriptor is ready.
inline bool is_readable(Engine& engine, int timeout_ms = 0) {
  auto fd = engine.fd();
  EXPECT_TRUE(fd);
  pollfd set{fd.value_or(-1), POLLIN, 0};
  return ::poll(&set, 1, timeout_ms) == 1;
}

/// Polls until the engine may sleep, and nothing is on its way any more.
inline bool armed(Node& node) {
  return until({}, [&] { return node.engine.arm() && !is_readable(node.engine); });
}

}  // namespace engine_test
