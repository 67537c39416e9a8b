// Times in ticks of a clock.
#pragma once

#include <algorithm>
#include <cstdint>

namespace spinwire::base {

/// Ticks from `then` to `now`; 0 if the clock has stepped back meanwhile.
[[nodiscard]] constexpr std::uint64_t ticks_since(std::uint64_t then, std::uint64_t now) noexcept {
  return now - std::min(then, now);
}

}  // namespace spinwire::base
