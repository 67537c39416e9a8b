// What a round trip between two hosts may take.
#pragma once

#include <cstddef>
#include <string_view>

#include "doctor/findings.h"
#include "doctor/link.h"
#include "doctor/ports.h"

namespace spinwire::doctor {

/// Adds what a round trip of 64 bytes takes, and whether that is long for the link. `adapter` is
/// this host's port; null: the device is none of hardware, and any time is in order.
void judge_latency(const Port* adapter, std::string_view device, const Facts& theirs,
                   double round_trip_us, std::size_t round_trips, Findings& findings);

}  // namespace spinwire::doctor
