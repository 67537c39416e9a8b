// The middle of many measurements.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace spinwire::bench {

/// The value below which a share of all values lies; 0 without values.
inline double quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  const auto at = static_cast<std::ptrdiff_t>(share * static_cast<double>(values.size() - 1) + 0.5);
  const auto middle = values.begin() + at;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}
inline double median(std::vector<double> values) { return quantile(std::move(values), 0.5); }

}  // namespace spinwire::bench
