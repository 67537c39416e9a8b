// Trouble that an engine's flight recorder has noted lately, in words.
#pragma once

#include "common/stat_findings.h"
#include "spinwire/observe.h"

namespace spinwire::tools {

/// Adds what the events of the last minute say, the newest first.
void find_events(const EngineReading& reading, const Earlier& earlier, Findings& found);

}  // namespace spinwire::tools
