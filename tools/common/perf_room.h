// Pools and queues of spinwire-perf's engines, sized for what is measured.
#pragma once

#include "common/given_settings.h"
#include "common/perf_options.h"
#include "spinwire/config.h"

namespace spinwire::tools {

/// Raises the pools and queues of an engine that measures, or serves, operations of `options.size`
/// bytes and `options.window` of them at a time. Settings that the user has given stay as they are.
void make_room(Config& config, const PerfOptions& options, const GivenSettings& given);

/// Raises them for an engine that serves any test of that size and window.
void make_room_for_all(Config& config, const PerfOptions& options, const GivenSettings& given);

}  // namespace spinwire::tools
