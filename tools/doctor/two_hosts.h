// Two hosts: what each says of itself, where they differ, and how well they reach each other.
#pragma once

#include <string>

#include "doctor/checks.h"
#include "doctor/findings.h"
#include "doctor/link.h"
#include "spinwire/config.h"

namespace spinwire::doctor {

/// What a host says of itself: versions, its first usable port, and the settings that must agree.
[[nodiscard]] Facts facts_of(const Subject& subject);

/// Adds what differs between two hosts, and what does that matters.
void compare_facts(const Facts& ours, const Facts& theirs, Findings& findings);

/// The engine that measures: the settings, or, if `is_small`, their device and key with small
/// pools. A retransmission then means a lost datagram, not a busy host.
[[nodiscard]] Config measuring_config(const Config& config, bool is_small);

/// Connects our engine to the other doctor's, in each way that both have, and measures. `ours` has
/// the facts of this host; `theirs` those of the other one, which say where its engine listens.
void measure(const Subject& subject, const Config& config, const std::string& host,
             const Facts& theirs, Findings& findings);

/// Compares this host with the one where a doctor serves.
[[nodiscard]] Findings examine_pair(const Subject& subject, const Config& config,
                                    const std::string& host, int port);

/// Answers one doctor after the other until a signal, each for a minute at most. Prints the
/// address. A peer on the link proves no key, so `config` should be small. Errors: those of
/// Link::listen().
[[nodiscard]] Result<void> serve(const Subject& subject, const Config& config,
                                 const std::string& address, int port);

}  // namespace spinwire::doctor
