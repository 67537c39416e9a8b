// Reading the flight recorder in the file of an engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "observe/page_layout.h"
#include "spinwire/observe.h"

namespace spinwire::observe {

/// Events of one file that are decoded at most; a hostile file may name more.
inline constexpr std::uint64_t kEventsMax = std::uint64_t{1} << 20;

/// A copy of an event. The number of its write orders events, whatever the system's clock did.
struct EventCopy {
  EngineEvent event;
  std::uint64_t sequence = 0;
};
/// Adds the events of a table that lies within the file. `later` is what the file held later, or
/// empty: an event that changed in between is not consistent.
void decode_events(std::span<const std::byte> file, std::span<const std::byte> later,
                   const TableDescriptor& table, std::vector<EventCopy>& events);
/// Each event once, in the order in which they came last. An event is in the common ring and in
/// that of its subject.
std::vector<EngineEvent> order_events(std::vector<EventCopy> copies);

}  // namespace spinwire::observe
