// What spinwire-perf prints of a measurement: text, JSON, a line of a table, a histogram.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "common/histogram.h"
#include "common/perf_options.h"
#include "spinwire/clock.h"

namespace spinwire::tools {

class PerfReport {
 public:
  /// `durations` in ticks of the clock; `served`: calls of the other end.
  PerfReport(const PerfOptions& options, const Histogram& durations, double seconds,
             const Clock& clock, std::string_view device, std::uint64_t served) noexcept
      : options_(options),
        durations_(durations),
        seconds_(seconds),
        clock_(clock),
        device_(device),
        served_(served) {}

  /// As the options ask.
  void print() const;
  /// The durations as a line of HdrHistogram's log, tagged "lat.send.32"; `began`: ticks of the
  /// clock.
  [[nodiscard]] std::string hdr_line(std::uint64_t began) const;
  /// The table's head, above the first of print_row().
  static void print_head(const PerfOptions& options);

 private:
  void print_json() const;
  void print_text() const;
  void print_row() const;
  void print_histogram() const;

  [[nodiscard]] bool is_rpc() const noexcept { return options_.test == PerfTest::rpc; }
  /// The time of an operation is more telling than its rate.
  static bool is_latency(const PerfOptions& options) noexcept {
    return options.test == PerfTest::lat;
  }
  [[nodiscard]] double ns(std::uint64_t ticks) const noexcept {
    return static_cast<double>(ticks) / clock_.ticks_per_ns();
  }
  [[nodiscard]] double percentile(double percent) const noexcept {
    return ns(durations_.percentile(percent));
  }
  [[nodiscard]] double rate_mops() const noexcept {
    return static_cast<double>(options_.count) / seconds_ / 1e6;
  }
  /// Of one operation.
  [[nodiscard]] std::uint64_t bytes() const noexcept {
    return options_.size + (is_rpc() ? options_.reply_size : 0);
  }
  [[nodiscard]] double served_mops() const noexcept {
    return static_cast<double>(served_) / seconds_ / 1e6;
  }
  [[nodiscard]] double gbit_per_s() const noexcept {
    return rate_mops() * static_cast<double>(bytes()) * 8 / 1e3;
  }

  const PerfOptions& options_;
  const Histogram& durations_;
  double seconds_;
  Clock clock_;
  std::string_view device_;
  std::uint64_t served_;
};

}  // namespace spinwire::tools
