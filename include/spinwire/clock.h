// The engine's clock: ticks of the time-stamp counter, read once for each poll.
#pragma once

#include <chrono>
#include <cstdint>

#include "spinwire/export.h"

namespace spinwire {

using Nanoseconds = std::chrono::nanoseconds;

/// Monotonic time in ticks. The real clock reads the time-stamp counter, calibrated once for each
/// process against CLOCK_MONOTONIC; it reads clock_gettime if the counter is not invariant and the
/// kernel does not use it. A manual clock is for tests and simulations. Any thread. Hot, but for
/// the first real().
class SPINWIRE_API Clock {
 public:
  /// The process's real clock.
  static Clock real() noexcept;
  /// A clock that reads `*ticks`, one tick a nanosecond. The caller keeps and advances it.
  static Clock manual(const std::uint64_t* ticks) noexcept;

  [[nodiscard]] std::uint64_t now() const noexcept {
#if defined(__x86_64__)
    if (source_ == nullptr) [[likely]]
      return __builtin_ia32_rdtsc();
#endif
    return read_slow();
  }
  /// As now(). A counter that has stepped back since `last`, as that of a virtual machine that was
  /// restored does, goes on from there: deadlines in ticks stay right.
  [[nodiscard]] std::uint64_t now_from(std::uint64_t last) noexcept {
    const std::uint64_t read = now();
    if (read >= last) [[likely]]
      return read;
    return go_on_from(last, read);
  }
  /// Conversions, rounded down; saturating.
  [[nodiscard]] std::uint64_t ticks(Nanoseconds duration) const noexcept;
  [[nodiscard]] Nanoseconds duration(std::uint64_t ticks) const noexcept;
  [[nodiscard]] double ticks_per_ns() const noexcept { return ticks_per_ns_; }

 private:
  [[nodiscard]] std::uint64_t read_slow() const noexcept;
  std::uint64_t go_on_from(std::uint64_t last, std::uint64_t read) noexcept;

  const std::uint64_t* source_ = nullptr;  ///< null: the counter, which has not stepped back
  double ticks_per_ns_ = 1.0;
  std::uint64_t offset_ = 0;  ///< what steps back have taken away
};

}  // namespace spinwire
