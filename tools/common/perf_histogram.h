// The distribution of durations as spinwire-perf draws it and writes it to a log.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "common/histogram.h"

namespace spinwire::tools {

struct HistogramStyle {
  std::size_t width = 80;  ///< columns of a line at most
  bool is_ascii = true;    ///< bars of '#', otherwise of Unicode's blocks
};
/// As wide as the terminal, with blocks if its characters are UTF-8. Plain ASCII in 80 columns if
/// stdout is no terminal.
HistogramStyle style_of_stdout();

/// Converts durations from ticks, within 1 %. Those of more than 2^36 - 1 ns count as that.
std::unique_ptr<Histogram> in_nanoseconds(const Histogram& ticks, double ticks_per_ns);

/// A line for each bucket that is not empty: where the bucket begins, its share, the share up to
/// its end, a bar. Each power of two has 2 to 16 buckets of equal width, as many as fit a screen,
/// and one above the 99th percentile.
std::string histogram_text(const Histogram& durations_ns, const HistogramStyle& style);

/// A duration in four digits with its unit: "1234 ns", "12.34 us".
std::string duration_text(double ns);

}  // namespace spinwire::tools
