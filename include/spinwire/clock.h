// The engine's clock: ticks of the time-stamp counter, read once for each poll.
#pragma once

#include <chrono>
#include <cstdint>

#include "spinwire/export.h"

namespace spinwire {

/// Durations of the interface.
using Nanoseconds = std::chrono::nanoseconds;

/// Monotonic time in ticks. The real clock reads the time-stamp counter, calibrated once per
/// process against CLOCK_MONOTONIC. If the counter is not invariant and the kernel does not use it,
/// the real clock reads clock_gettime. A manual clock is for tests and simulations. Any thread,
/// except now_from(), which changes the clock. Hot, except for the first real().
class SPINWIRE_API Clock {
 public:
  /// The process's real clock.
  static Clock real() noexcept;
  /// A clock that reads `*ticks`, one tick per nanosecond. The caller owns and advances `*ticks`.
  static Clock manual(const std::uint64_t* ticks) noexcept;

  /// The time, in ticks. Any thread. Hot.
  [[nodiscard]] std::uint64_t now() const noexcept {
#if defined(__x86_64__)
    if (source_ == nullptr) [[likely]]
      return __builtin_ia32_rdtsc();
#endif
    return read_slow();
  }
  /// Reads the clock like now(), but never answers less than `last`. When the counter has stepped
  /// back (a restored virtual machine), time continues from `last`, so deadlines in ticks stay
  /// valid.
  [[nodiscard]] std::uint64_t now_from(std::uint64_t last) noexcept {
    const std::uint64_t read = now();
    if (read >= last) [[likely]]
      return read;
    return resume_from(last, read);
  }
  /// The ticks of a duration. Rounds down and saturates.
  [[nodiscard]] std::uint64_t ticks(Nanoseconds duration) const noexcept;
  /// The duration of so many ticks. Rounds down and saturates.
  [[nodiscard]] Nanoseconds duration(std::uint64_t ticks) const noexcept;
  /// Whether the clock is manual(): its time has nothing to do with the time that passes.
  [[nodiscard]] bool is_manual() const noexcept;
  /// Ticks in a nanosecond.
  [[nodiscard]] double ticks_per_ns() const noexcept { return ticks_per_ns_; }

 private:
  [[nodiscard]] std::uint64_t read_slow() const noexcept;
  std::uint64_t resume_from(std::uint64_t last, std::uint64_t read) noexcept;

  const std::uint64_t* source_ = nullptr;  ///< null: the time-stamp counter without steps back
  double ticks_per_ns_ = 1.0;
  std::uint64_t offset_ = 0;  ///< sum of all steps back, in ticks
};

}  // namespace spinwire
