// HdrHistogram's log format: latencies of engines, and the durations of spinwire-perf.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "spinwire/observe.h"

namespace spinwire::tools {

/// One histogram of a log.
struct HdrInterval {
  std::string tag;           ///< without commas and blanks
  double begin_seconds = 0;  ///< since 1970
  double length_seconds = 0;
  std::uint64_t longest_ns = 0;
  std::uint32_t digits = 1;  ///< significant digits, which decide the buckets; 1 or 2
  std::span<const std::uint64_t> buckets;
};
/// The head of a log, format version 1.3, and a line of it.
std::string hdr_head(std::string_view title);
std::string hdr_line(const HdrInterval& interval);
/// A log: an interval for each histogram, from the engine's opening on, with a
/// tag such as "engine-1.call.total". Values are nanoseconds.
std::string hdr_log(std::span<const EngineReading> readings);
/// What names a histogram: "call.total", "handler.total.method-7".
std::string latency_name(const LatencyHistogram& latency);

}  // namespace spinwire::tools
