// Time as the engine sees it: ticks of the time-stamp counter, read once per poll.
#pragma once

#include <chrono>
#include <cstdint>

#include "spinwire/export.h"

namespace spinwire {

using Nanoseconds = std::chrono::nanoseconds;

/// Monotonic time in ticks. The default clock reads the time-stamp counter, calibrated once per
/// process against CLOCK_MONOTONIC (and falls back to clock_gettime where the counter is not
/// invariant and the kernel does not keep time by it either). A clock can also be stepped by hand,
/// for tests and simulations. Hot: now().
class SPINWIRE_API Clock {
 public:
  /// The process's real clock.
  static Clock real() noexcept;
  /// A clock that reads `*ticks`, one tick per nanosecond; the caller keeps it alive and moves it.
  static Clock manual(const std::uint64_t* ticks) noexcept;

  [[nodiscard]] std::uint64_t now() const noexcept {
#if defined(__x86_64__)
    if (source_ == nullptr) [[likely]]
      return __builtin_ia32_rdtsc();
#endif
    return read_slow();
  }
  /// Conversions, rounded down; saturating.
  [[nodiscard]] std::uint64_t ticks(Nanoseconds duration) const noexcept;
  [[nodiscard]] Nanoseconds duration(std::uint64_t ticks) const noexcept;
  [[nodiscard]] double ticks_per_ns() const noexcept { return ticks_per_ns_; }

 private:
  [[nodiscard]] std::uint64_t read_slow() const noexcept;

  const std::uint64_t* source_ = nullptr;  ///< null: counter
  double ticks_per_ns_ = 1.0;
};

}  // namespace spinwire
