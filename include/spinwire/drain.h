// Ending an engine in order, for a restart; see Engine::drain().
#pragma once

#include <cstdint>

#include "spinwire/callback.h"
#include "spinwire/clock.h"

namespace spinwire {

/// What a drain had to cut off when its time was over; all 0 if everything had ended before.
struct DrainReport {
  std::uint32_t served_sessions = 0;  ///< opened by peers
  std::uint32_t served_calls = 0;     ///< in progress there
  std::uint32_t sessions = 0;         ///< opened here
  std::uint32_t connections = 0;      ///< including those of sessions
};

/// How Engine::drain() ends the engine.
struct DrainOptions {
  /// Peers are asked not to come back before; 0 … kMaxRetryAfter. Those that reconnect come back at
  /// random times within a quarter of it afterwards.
  Nanoseconds retry_after{0};
  /// The drain is over. Runs once, in a control step (see TimerCallback), unless another drain() or
  /// the engine's end came first. May destroy the engine.
  Callback<void(const DrainReport&)> on_drained{};
};

}  // namespace spinwire
