// Latencies in HdrHistogram's log format.
#pragma once

#include <span>
#include <string>

#include "spinwire/observe.h"

namespace spinwire::tools {

/// A histogram in HdrHistogram's compressed encoding V2, as base64.
std::string hdr_encoding(const LatencyHistogram& latency);
/// A log, format version 1.3: an interval for each histogram, from the engine's opening on, with a
/// tag such as "engine-1.call.total". Values are nanoseconds.
std::string hdr_log(std::span<const EngineReading> readings);
/// What names a histogram: "call.total", "handler.total.method-7".
std::string latency_name(const LatencyHistogram& latency);

}  // namespace spinwire::tools
