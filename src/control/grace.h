// How long a silent peer may hold what a new one waits for, if its source holds no more than its
// share. Strangers with many addresses hold everything by such peers, so each of them that gives
// way shortens the time of all others: a flood then makes room as fast as it comes. Honest peers
// need time to answer, so it is never less than twice what those have needed that lately were set
// up. Cold.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "spinwire/clock.h"

namespace spinwire::control {

/// All times are ticks of the port's time in which peers can be heard.
class Grace {
 public:
  /// Of a peer of whatever source, at least.
  static constexpr Nanoseconds kShortest = std::chrono::milliseconds(5);
  /// Without a flood. A flood is over when no such peer has given way for so long.
  static constexpr Nanoseconds kLongest = std::chrono::milliseconds(50);
  /// For so long a slow answer counts.
  static constexpr Nanoseconds kRemembered = std::chrono::seconds(2);

  explicit Grace(const Clock& clock) noexcept
      : shortest_(clock.ticks(kShortest)),
        longest_(clock.ticks(kLongest)),
        remembered_(clock.ticks(kRemembered)) {}

  [[nodiscard]] std::uint64_t at(std::uint64_t now) const noexcept {
    if (now >= flooded_until_) return longest_;
    const std::uint64_t needed = now < slowest_until_ ? 2 * slowest_ : 0;
    return std::clamp(std::max(flooded_, needed), shortest_, longest_);
  }
  /// A silent peer gives way whose source holds no more than its share.
  void shorten(std::uint64_t now) noexcept {
    const std::uint64_t before = at(now);
    flooded_ = before - before / 8;
    flooded_until_ = now + longest_;
  }
  /// A peer that was silent for so long has answered, and is set up.
  void on_answer(std::uint64_t now, std::uint64_t silence) noexcept {
    if (now < slowest_until_ && silence < slowest_) return;
    slowest_ = std::min(silence, longest_);
    slowest_until_ = now + remembered_;
  }

 private:
  std::uint64_t shortest_, longest_, remembered_;
  std::uint64_t flooded_ = 0;        ///< what at() answers in a flood
  std::uint64_t flooded_until_ = 0;  ///< when that ends
  std::uint64_t slowest_ = 0;        ///< the slowest answer of late
  std::uint64_t slowest_until_ = 0;  ///< when it is forgotten
};

}  // namespace spinwire::control
