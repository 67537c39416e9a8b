// A goodbye as one number: in the header of a message, in that of a datagram about a session, and
// in a refusal. Bits 0 to 7 are the reason, bits 8 to 30 the time before the peer may come back, in
// ms. A goodbye that only says that the application has closed is 0.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "spinwire/goodbye.h"

namespace spinwire::wire {

/// Added to the goodbye of a connection: the sender sends no more messages but answers, and stays
/// until the receiver has sent what is under way, and its own goodbye.
inline constexpr std::uint32_t kAwaitsGoodbye = 1u << 31;

inline constexpr std::uint32_t kMaxRetryAfterMs =
    std::chrono::duration_cast<std::chrono::milliseconds>(kMaxRetryAfter).count();

constexpr std::uint32_t encode(const Goodbye& goodbye) noexcept {
  if (!goodbye.invites_back()) return 0;
  const auto ms = std::chrono::ceil<std::chrono::milliseconds>(goodbye.retry_after).count();
  return static_cast<std::uint32_t>(goodbye.reason) |
         static_cast<std::uint32_t>(std::clamp<std::int64_t>(ms, 0, kMaxRetryAfterMs)) << 8;
}

/// False if the number is malformed: an unknown reason, or too long a time.
constexpr bool decode(std::uint32_t number, Goodbye& goodbye) noexcept {
  goodbye = {GoodbyeReason::closed, Nanoseconds(0)};
  if (number == 0) return true;
  goodbye.reason = static_cast<GoodbyeReason>(number & 0xff);
  goodbye.retry_after = std::chrono::milliseconds(number >> 8);
  return goodbye.invites_back() && number >> 8 <= kMaxRetryAfterMs;
}

/// The goodbye of a connection, which may have kAwaitsGoodbye. False if it is malformed.
constexpr bool decode(std::uint32_t number, Goodbye& goodbye, bool& awaits_answer) noexcept {
  awaits_answer = (number & kAwaitsGoodbye) != 0;
  return decode(number & ~kAwaitsGoodbye, goodbye) && (!awaits_answer || goodbye.invites_back());
}

}  // namespace spinwire::wire
