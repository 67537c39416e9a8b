#include "common/perf_report.h"

#include <fmt/core.h>

#include <chrono>
#include <string>

#include "common/json.h"
#include "common/perf_histogram.h"
#include "common/stat_hdr.h"

namespace spinwire::tools {

void PerfReport::print() const {
  if (options_.json) return print_json();
  options_.all_sizes ? print_row() : print_text();
  if (options_.histogram) print_histogram();
}

void PerfReport::print_json() const {
  Json json{{"test", to_string(options_.test)}, {"op", to_string(options_.op)},
            {"size_bytes", options_.size},      {"window", options_.window},
            {"count", options_.count},          {"seconds", seconds_},
            {"rate_mops", rate_mops()},         {"gbit_per_s", gbit_per_s()},
            {"min_ns", ns(durations_.min())},   {"p50_ns", percentile(50)},
            {"p90_ns", percentile(90)},         {"p99_ns", percentile(99)},
            {"p999_ns", percentile(99.9)},      {"p9999_ns", percentile(99.99)},
            {"max_ns", ns(durations_.max())},   {"device", device_}};
  if (is_rpc()) {
    json.update({{"reply_size_bytes", options_.reply_size},
                 {"batch", options_.batch},
                 {"sessions", options_.sessions},
                 {"served_mops", served_mops()}});
  }
  fmt::print("{}", json_line(json));
}

void PerfReport::print_text() const {
  const std::string more =
      is_rpc()
          ? fmt::format(", replies of {} bytes, {} session{}, batches of {}", options_.reply_size,
                        options_.sessions, options_.sessions == 1 ? "" : "s", options_.batch)
          : "";
  fmt::print("{} {}, {} bytes{}, window {}, {} operations in {:.3f} s on {}{}\n",
             to_string(options_.test), to_string(options_.op), options_.size, more, options_.window,
             options_.count, seconds_, device_, options_.one_thread ? ", one thread" : "");
  fmt::print("  {:.3f} million/s, {:.3f} Gbit/s{}\n", rate_mops(), gbit_per_s(),
             options_.symmetric ? fmt::format("; {:.3f} million/s served", served_mops()) : "");
  fmt::print(
      "  {}: min {:.0f} ns  p50 {:.0f} ns  p90 {:.0f} ns  p99 {:.0f} ns  p99.9 {:.0f} ns  max "
      "{:.0f} ns\n",
      is_latency(options_) || is_rpc() ? "round trip" : "completion", ns(durations_.min()),
      percentile(50), percentile(90), percentile(99), percentile(99.9), ns(durations_.max()));
}

void PerfReport::print_head(const PerfOptions& options) {
  fmt::print("{} {}{}\n", to_string(options.test), to_string(options.op),
             options.one_thread ? ", one thread" : "");
  if (is_latency(options)) {
    fmt::print("{:>9} {:>10} {:>11} {:>11} {:>11} {:>11} {:>11} {:>11}\n", "bytes", "operations",
               "min[ns]", "p50[ns]", "p90[ns]", "p99[ns]", "p99.9[ns]", "max[ns]");
  } else {
    fmt::print("{:>9} {:>10} {:>7} {:>11} {:>11} {:>11} {:>11}\n", "bytes", "operations", "window",
               "million/s", "Gbit/s", "p50[ns]", "p99[ns]");
  }
}

void PerfReport::print_row() const {
  if (is_latency(options_)) {
    fmt::print("{:>9} {:>10} {:>11.0f} {:>11.0f} {:>11.0f} {:>11.0f} {:>11.0f} {:>11.0f}\n",
               options_.size, options_.count, ns(durations_.min()), percentile(50), percentile(90),
               percentile(99), percentile(99.9), ns(durations_.max()));
  } else {
    fmt::print("{:>9} {:>10} {:>7} {:>11.4f} {:>11.3f} {:>11.0f} {:>11.0f}\n", options_.size,
               options_.count, options_.window, rate_mops(), gbit_per_s(), percentile(50),
               percentile(99));
  }
}

void PerfReport::print_histogram() const {
  const auto durations = in_nanoseconds(durations_, clock_.ticks_per_ns());
  fmt::print("\n{}\n", histogram_text(*durations, style_of_stdout()));
  for (const double percent : {50.0, 90.0, 99.0, 99.9, 99.99, 99.999}) {
    fmt::print("  p{:<7g} {:>10}\n", percent, duration_text(this->percentile(percent)));
  }
  fmt::print("  {:<8} {:>10}\n", "max", duration_text(ns(durations_.max())));
}

std::string PerfReport::hdr_line(std::uint64_t began) const {
  const auto durations = in_nanoseconds(durations_, clock_.ticks_per_ns());
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const double age = ns(clock_.now() - began) / 1e9;
  return tools::hdr_line({.tag = fmt::format("{}.{}.{}", to_string(options_.test),
                                             to_string(options_.op), options_.size),
                          .begin_seconds = std::chrono::duration<double>(now).count() - age,
                          .length_seconds = seconds_,
                          .longest_ns = durations->max(),
                          .digits = 2,
                          .buckets = durations->buckets()});
}

}  // namespace spinwire::tools
