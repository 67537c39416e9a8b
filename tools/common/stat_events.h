// The flight recorder as spinwire-stat shows it.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spinwire/observe.h"

namespace spinwire::tools {

/// Which events are shown. "INDEX-GENERATION", or INDEX alone; both empty: all events.
struct EventFilter {
  std::string_view connection;
  std::string_view session;  ///< opened or served
};
/// The time from which an event's age counts: now, or of a dead engine its last sign of life. Since
/// the Unix epoch.
Nanoseconds reference_time(const EngineReading& reading);
std::vector<EngineEvent> chosen_events(const EngineReading& reading, const EventFilter& filter);
/// "connection 3-1", "engine"
std::string subject_text(const EngineEvent& event);

/// A line for each event, the oldest first. A last line says how many others were displaced.
std::string events_text(std::span<const EngineReading> readings, const EventFilter& filter);
/// {"engines":[{...,"recorded":N,"displaced":N,"events":[...]}]}
std::string events_json(std::span<const EngineReading> readings, const EventFilter& filter);

}  // namespace spinwire::tools
