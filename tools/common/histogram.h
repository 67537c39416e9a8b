// Durations counted in buckets whose width grows with the value: fixed memory, any 64-bit value,
// percentiles within 1 %.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

namespace spinwire::tools {

/// Values below 256 have a bucket each; above, every power of two is divided into 128 buckets. The
/// unit is the caller's. About 60 KiB: keep it on the heap or static. record() is hot.
class Histogram {
 public:
  void record(std::uint64_t value) noexcept { record(value, 1); }
  void record(std::uint64_t value, std::uint64_t times) noexcept {
    buckets_[index(value)] += times;
    count_ += times;
    min_ = std::min(min_, value);
    max_ = std::max(max_, value);
  }

  [[nodiscard]] std::uint64_t count() const noexcept { return count_; }
  /// Exact. 0 when nothing was recorded.
  [[nodiscard]] std::uint64_t min() const noexcept { return count_ != 0 ? min_ : 0; }
  [[nodiscard]] std::uint64_t max() const noexcept { return max_; }

  /// The least value that `percent` of all values do not exceed; 0 when nothing was recorded. Exact
  /// below 256 and at both ends, otherwise the middle of its bucket.
  [[nodiscard]] std::uint64_t percentile(double percent) const noexcept {
    if (count_ == 0) return 0;
    const double wanted = std::ceil(percent / 100.0 * static_cast<double>(count_));
    const std::uint64_t rank =
        std::clamp<std::uint64_t>(static_cast<std::uint64_t>(wanted), 1, count_);
    if (rank == 1) return min_;
    if (rank == count_) return max_;
    std::uint64_t seen = 0;
    std::size_t i = 0;
    while ((seen += buckets_[i]) < rank) ++i;
    return std::clamp(middle(i), min_, max_);
  }

  /// The counts by bucket, which are those of an HdrHistogram with two significant digits.
  [[nodiscard]] std::span<const std::uint64_t> buckets() const noexcept { return buckets_; }

  /// Calls `visit(value, count)` for each bucket that is not empty, with its middle.
  template <typename Visit>
  void for_each(Visit&& visit) const {
    for (std::size_t i = 0; i < buckets_.size(); ++i) {
      if (buckets_[i] != 0) visit(std::clamp(middle(i), min_, max_), buckets_[i]);
    }
  }

 private:
  static constexpr unsigned kSubBits = 7;
  static constexpr std::size_t kPerOctave = std::size_t{1} << kSubBits;
  static constexpr std::size_t kBuckets = (64 - kSubBits + 1) * kPerOctave;

  static constexpr std::size_t index(std::uint64_t value) noexcept {
    const int width = 64 - std::countl_zero(value | 1);
    const int shift = std::max(0, width - static_cast<int>(kSubBits) - 1);
    return static_cast<std::size_t>(shift) * kPerOctave + static_cast<std::size_t>(value >> shift);
  }
  static constexpr std::uint64_t middle(std::size_t i) noexcept {
    if (i < 2 * kPerOctave) return i;
    const std::size_t shift = i / kPerOctave - 1;
    const std::uint64_t low = std::uint64_t{i - shift * kPerOctave} << shift;
    return low + (std::uint64_t{1} << shift) / 2;
  }

  std::array<std::uint64_t, kBuckets> buckets_{};
  std::uint64_t count_ = 0;
  std::uint64_t min_ = ~std::uint64_t{0};
  std::uint64_t max_ = 0;
};

}  // namespace spinwire::tools
