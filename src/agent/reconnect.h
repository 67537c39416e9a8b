// Outbound connections that reconnect, with backoff, after a loss or a failed attempt. Cold.
#pragma once

#include <cstdint>

#include "base/random.h"
#include "control/address.h"
#include "spinwire/engine.h"
#include "spinwire/status.h"

namespace spinwire::agent {

struct Agent;
struct EngineContext;

/// State that a reconnecting connection keeps between attempts.
struct ReconnectState {
  ReconnectState(const Reconnect& settings, const control::Address& to, Via how) noexcept
      : options(settings), address(to), via(how), random(base::random_seed()) {}
  Reconnect options;
  control::Address address;
  Via via;
  base::Random random;
  Error first{Status::ok, {}, {}, {}};  ///< why the connection was lost; ok while it is ready
  Error last;                           ///< why the last attempt failed
  std::uint32_t attempts = 0;           ///< in a row without lasting success
  std::uint64_t ready_at = 0;           ///< tick of becoming ready; 0 before that
  Nanoseconds delay{0};                 ///< backoff before the next attempt
  bool backing_off = false;             ///< `delay` runs
  /// Another attempt would also fail: the peer refused, or the device is lost.
  bool permanent = false;
};

/// Whether the connection that has just ended reconnects.
[[nodiscard]] bool can_reconnect(const Agent& a) noexcept;
/// Drops this attempt, runs on_interrupted, and waits for the next attempt.
void back_off(EngineContext& ctx, Agent& a) noexcept;
/// How to reach the peer again.
struct ReconnectWay {
  const control::Address& to;
  Via via;
  Nanoseconds timeout;
};
/// Starts the next attempt. Errors: limit (no receive is left to reserve).
[[nodiscard]] Result<ReconnectWay> start_attempt(EngineContext& ctx, Agent& a);
/// The error that on_closed reports after the last attempt.
[[nodiscard]] Error final_cause(Agent& a) noexcept;

}  // namespace spinwire::agent
