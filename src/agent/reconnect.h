// Outbound connections that are made again when they are lost, or could not be made. Cold.
#pragma once

#include <cstdint>

#include "base/random.h"
#include "control/address.h"
#include "spinwire/engine.h"
#include "spinwire/status.h"

namespace spinwire::agent {

struct Agent;
struct EngineContext;

/// What such a connection keeps from one attempt to the next.
struct ReconnectState {
  ReconnectState(const Reconnect& settings, const control::Address& to, Via how) noexcept
      : options(settings), address(to), via(how), random(base::random_seed()) {}
  Reconnect options;
  control::Address address;
  Via via;
  base::Random random;
  Error first{Status::ok, {}, {}, {}};  ///< why it was lost, or not made; ok while it is ready
  Error last;                           ///< why the last attempt failed
  std::uint32_t attempts = 0;           ///< in a row, without lasting success
  std::uint64_t ready_at = 0;           ///< tick of becoming ready; 0: this attempt has not
  Nanoseconds delay{0};                 ///< until the next
  bool backing_off = false;             ///< waits for that
  bool permanent = false;               ///< neither the peer's answer nor a lost device changes
};

/// Whether the connection that just ended shall be tried again.
[[nodiscard]] bool can_reconnect(const Agent& a) noexcept;
/// Instead of the end: forgets this attempt, tells the application that the connection is
/// interrupted, and waits for the next.
void rest(EngineContext& ctx, Agent& a) noexcept;
/// The next attempt begins; false if there is no receive to promise.
[[nodiscard]] bool revive(EngineContext& ctx, Agent& a) noexcept;
/// What on_closed tells after the last attempt.
[[nodiscard]] Error final_cause(Agent& a) noexcept;

}  // namespace spinwire::agent
