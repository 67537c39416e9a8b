#include "common/perf_histogram.h"

#include <fmt/core.h>
#include <langinfo.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <clocale>
#include <cmath>
#include <cstdint>
#include <map>
#include <string_view>

namespace spinwire::tools {
namespace {

constexpr std::uint64_t kLongestNs = (std::uint64_t{1} << 36) - 1;
/// Lines of a drawing, unless even two buckets for each power of two make more.
constexpr std::size_t kMostBars = 30;

/// Counts by the least value of their bucket. Each power of two has 2^sub_bits buckets up to
/// `tail`, a power of two, and one from there on.
struct Bars {
  int sub_bits = 0;
  std::uint64_t tail = 0;
  std::map<std::uint64_t, std::uint64_t> counts;

  /// Both of the bucket of a value.
  [[nodiscard]] std::uint64_t width_of(std::uint64_t ns) const {
    const std::uint64_t octave = std::bit_floor(std::max<std::uint64_t>(ns, 1));
    return std::max<std::uint64_t>(ns < tail ? octave >> sub_bits : octave, 1);
  }
  [[nodiscard]] std::uint64_t begin_of(std::uint64_t ns) const {
    return ns / width_of(ns) * width_of(ns);
  }
};

/// As fine as a screen has lines for. The rare long durations do not make the others coarse.
Bars bars_of(const Histogram& durations_ns) {
  constexpr int kFinest = 4;
  Bars bars;
  bars.tail = std::bit_ceil(durations_ns.percentile(99) + 1);
  for (bars.sub_bits = kFinest; bars.sub_bits > 0; --bars.sub_bits) {
    bars.counts.clear();
    durations_ns.for_each(
        [&](std::uint64_t ns, std::uint64_t count) { bars.counts[bars.begin_of(ns)] += count; });
    if (bars.counts.size() <= kMostBars || bars.sub_bits == 1) break;
  }
  return bars;
}

/// A bar of `share` times `width` columns, of at least its smallest mark.
std::string bar_text(double share, std::size_t width, bool is_ascii) {
  const double columns = share * static_cast<double>(width);
  if (is_ascii) return std::string(std::max<std::size_t>(1, std::lround(columns)), '#');
  constexpr std::array<std::string_view, 8> kEighths{"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const std::size_t eighths = std::max<std::size_t>(1, std::lround(columns * 8));
  std::string bar;
  for (std::size_t i = 0; i < eighths / 8; ++i) bar += "█";
  return bar += kEighths[eighths % 8];
}

}  // namespace

HistogramStyle style_of_stdout() {
  if (::isatty(STDOUT_FILENO) != 1) return {};
  HistogramStyle style;
  winsize window{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col != 0)
    style.width = window.ws_col;
  (void)std::setlocale(LC_CTYPE, "");
  style.is_ascii = std::string_view(::nl_langinfo(CODESET)) != "UTF-8";
  return style;
}

std::unique_ptr<Histogram> in_nanoseconds(const Histogram& ticks, double ticks_per_ns) {
  auto durations = std::make_unique<Histogram>();
  ticks.for_each([&](std::uint64_t value, std::uint64_t count) {
    const double ns = std::round(static_cast<double>(value) / ticks_per_ns);
    durations->record(std::min(static_cast<std::uint64_t>(ns), kLongestNs), count);
  });
  return durations;
}

std::string duration_text(double ns) {
  constexpr std::array<std::string_view, 4> kUnits{"ns", "us", "ms", "s"};
  std::size_t unit = 0;
  while (unit + 1 < kUnits.size() && ns >= 9999.5) {
    ns /= 1000;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} ns", ns) : fmt::format("{:.4g} {}", ns, kUnits[unit]);
}

std::string histogram_text(const Histogram& durations_ns, const HistogramStyle& style) {
  constexpr std::size_t kColumns = 33;  // before the bar
  constexpr std::size_t kShortestBar = 10;
  const Bars bars = bars_of(durations_ns);
  const std::size_t width = std::max(style.width, kColumns + kShortestBar) - kColumns;
  std::uint64_t most = 0;
  for (const auto& [begin, count] : bars.counts) most = std::max(most, count);
  const auto total = static_cast<double>(durations_ns.count());
  std::string text = fmt::format("{:>11}  {:>8}  {:>8}\n", "from", "share", "so far");
  std::uint64_t seen = 0;
  std::uint64_t next = bars.counts.empty() ? 0 : bars.counts.begin()->first;
  for (const auto& [begin, count] : bars.counts) {
    if (begin != next) text += fmt::format("{:>11}\n", "...");
    next = begin + bars.width_of(begin);
    seen += count;
    text += fmt::format(
        "{:>11}  {:>7.3f}%  {:>7.3f}%  {}\n", duration_text(static_cast<double>(begin)),
        100 * static_cast<double>(count) / total, 100 * static_cast<double>(seen) / total,
        bar_text(static_cast<double>(count) / static_cast<double>(most), width, style.is_ascii));
  }
  return text;
}

}  // namespace spinwire::tools
