// Checks the fields of fault settings. Set-up.
#pragma once

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "base/error.h"
#include "spinwire/clock.h"

namespace spinwire::softverbs {

inline constexpr Nanoseconds kLongestDelay = std::chrono::hours(24);

/// Each check returns success, or invalid_argument with a text that names the field, its value and
/// its range.
class FieldChecks {
 public:
  /// The errors say that `asked` was asked for.
  explicit constexpr FieldChecks(const char* asked) noexcept : asked_(asked) {}

  [[nodiscard]] Result<void> probability(const char* name, double value) const {
    if (value >= 0 && value <= 1) return {};  // false for NaN
    return bad(name, base::format("{}", value), "a probability between 0 and 1");
  }
  [[nodiscard]] Result<void> number(const char* name, std::uint64_t value, std::uint64_t least,
                                    std::uint64_t most) const {
    if (value >= least && value <= most) return {};
    return bad(name, base::format("{}", value), base::format("{} to {}", least, most));
  }
  [[nodiscard]] Result<void> delay(const char* name, Nanoseconds value,
                                   Nanoseconds least = Nanoseconds(0)) const {
    if (value >= least && value <= kLongestDelay) return {};
    return bad(name, base::format("{} ns", value.count()),
               base::format("{} to {} ns", least.count(), kLongestDelay.count()));
  }

 private:
  [[nodiscard]] Result<void> bad(const char* name, const std::string& value,
                                 const std::string& range) const {
    return base::fail(Status::invalid_argument, base::format("{}: {} = {}", asked_, name, value),
                      "it is out of range", base::format("give {}", range));
  }

  const char* asked_;
};

/// The first check that failed, or success.
inline Result<void> first_failed(std::initializer_list<Result<void>> checks) {
  for (const Result<void>& check : checks) {
    if (!check) return check;
  }
  return {};
}

}  // namespace spinwire::softverbs
