// What an end of a connection or session tells its peer when it closes in order.
#pragma once

#include <chrono>
#include <cstdint>

#include "spinwire/clock.h"

namespace spinwire {

/// Why a peer said goodbye.
enum class GoodbyeReason : std::uint8_t {
  none = 0,    ///< no goodbye came
  closed = 1,  ///< the peer's application has closed; a connection that reconnects ends
  // The peer wants this end to come back: a connection that reconnects does so.
  draining = 2,    ///< the peer's engine drains; see Engine::drain()
  overloaded = 3,  ///< the peer is overloaded
};

/// Longest Goodbye::retry_after.
inline constexpr Nanoseconds kMaxRetryAfter = std::chrono::hours(1);

/// Why an end closes, and when its peer may come back.
struct Goodbye {
  GoodbyeReason reason = GoodbyeReason::none;  ///< why the end closes
  /// Time before the peer's next attempt; 0 … kMaxRetryAfter, in whole milliseconds, rounded up. 0
  /// unless the reason asks the peer to come back.
  Nanoseconds retry_after{0};

  /// Whether the reason asks the peer to come back.
  [[nodiscard]] constexpr bool invites_back() const noexcept {
    return reason == GoodbyeReason::draining || reason == GoodbyeReason::overloaded;
  }
  friend bool operator==(const Goodbye&, const Goodbye&) noexcept = default;
};

}  // namespace spinwire
