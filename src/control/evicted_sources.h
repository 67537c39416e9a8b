// How often peers of each source have given way lately. Strangers with many addresses hold little
// at each, but come again and again, so they give way before an honest peer that comes once. Cold.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "control/address.h"
#include "spinwire/clock.h"

namespace spinwire::control {

class EvictedSources {
 public:
  /// A source is remembered for one to two of these.
  static constexpr Nanoseconds kPeriod = std::chrono::seconds(5);
  /// Sources of one period. One more begins the next period.
  static constexpr std::size_t kMost = 2048;

  explicit EvictedSources(const Clock& clock) noexcept : clock_(clock) {}

  [[nodiscard]] std::uint32_t count(const Source& source) noexcept {
    forget_old();
    return count(now_, source) + count(before_, source);
  }
  /// May throw std::bad_alloc.
  void add(const Source& source) {
    forget_old();
    if (now_.size() >= kMost) begin_period();
    ++now_[source];
  }

 private:
  static std::uint32_t count(const SourceCounts& counts, const Source& source) noexcept {
    const auto found = counts.find(source);
    return found != counts.end() ? found->second : 0;
  }
  void begin_period() noexcept {
    before_ = std::exchange(now_, {});
    begun_ = clock_.now();
  }
  void forget_old() noexcept {
    const std::uint64_t age = clock_.now() - begun_;
    if (age < clock_.ticks(kPeriod)) return;
    begin_period();
    if (age >= clock_.ticks(2 * kPeriod)) before_.clear();
  }

  const Clock& clock_;
  SourceCounts now_, before_;  ///< of this period and of the last
  std::uint64_t begun_ = 0;    ///< tick, of this period
};

}  // namespace spinwire::control
