// Random numbers that are the same in each run and cost a few instructions.
#pragma once

#include <cstdint>

namespace spinwire::bench {

/// The generator xorshift64 (Marsaglia).
class Random {
 public:
  /// A number below `limit`.
  [[nodiscard]] std::uint32_t below(std::uint64_t limit) noexcept {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<std::uint32_t>((state_ >> 32) * limit >> 32);
  }

 private:
  std::uint64_t state_ = 88172645463325252;
};

}  // namespace spinwire::bench
