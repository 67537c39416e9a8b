// Sums over connections in constant time: each control step looks at a few, and replaces what they
// had added before. Cold.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "agent/agent.h"
#include "spinwire/connection_state.h"
#include "spinwire/engine.h"

namespace spinwire::engine {

class ConnectionSums {
 public:
  /// For agents with an index below `capacity`. May throw std::bad_alloc.
  explicit ConnectionSums(std::uint32_t capacity) : seen_(capacity) {}

  /// Counts a connection as it is now.
  void update(const agent::Agent& a, const ConnectionSnapshot& snapshot) noexcept;
  /// The connection ends; the engine's statistics have its counts from now on.
  void forget(const agent::Agent& a) noexcept;
  /// Completes statistics that lack the sums.
  void add_to(EngineStats& stats) const noexcept;
  [[nodiscard]] const std::array<std::uint32_t, 6>& by_blocker() const noexcept {
    return by_blocker_;
  }

 private:
  struct Seen {
    std::uint64_t messages_sent = 0;
    std::uint64_t messages_received = 0;
    std::uint32_t operations = 0;
    Blocker blocked_by = Blocker::nothing;
    bool is_counted = false;
  };
  void subtract(const Seen& seen) noexcept;

  std::vector<Seen> seen_;  ///< by agent
  std::uint64_t messages_sent_ = 0;
  std::uint64_t messages_received_ = 0;
  std::uint32_t operations_ = 0;
  std::array<std::uint32_t, 6> by_blocker_{};
};

}  // namespace spinwire::engine
