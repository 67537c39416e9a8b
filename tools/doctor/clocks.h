// By how much the clocks of two hosts differ: NTP's formula (RFC 5905, section 8), over the
// doctors' link.
#pragma once

#include <cstdint>

#include "doctor/findings.h"
#include "doctor/host.h"
#include "doctor/link.h"

namespace spinwire::doctor {

/// How often a client asks for the time, and the fact by which each host says so. A doctor that
/// does not say it knows no such frames.
inline constexpr std::uint32_t kClockExchanges = 16;
inline constexpr std::uint32_t kMostClockExchanges = 64;
inline constexpr const char* kClockFact = "clock.exchanges";

/// Asks the other doctor for its time, and adds the difference as a finding: that of the exchange
/// with the shortest round trip, half of which is its uncertainty. False: the link has failed.
[[nodiscard]] bool measure_clock(const Host& host, Link& link, const Facts& theirs,
                                 Findings& findings);

/// Answers a client as often as it has said that it asks, within `limit` in all. Errors: those of
/// Link.
[[nodiscard]] Result<void> answer_clock(const Host& host, Link& client, const Facts& theirs,
                                        Link::Limit limit);

}  // namespace spinwire::doctor
