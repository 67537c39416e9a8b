// Reading the latencies in the file of an engine.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "observe/page_layout.h"
#include "spinwire/observe.h"

namespace spinwire::observe {

/// Adds the histograms of a table that lies within the file. `later` is what the file held later,
/// or empty: a histogram that changed in between is not consistent.
void decode_latencies(std::span<const std::byte> file, std::span<const std::byte> later,
                      const TableDescriptor& table, std::vector<LatencyHistogram>& latencies);

}  // namespace spinwire::observe
