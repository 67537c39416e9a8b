// Two hosts: what each says of itself, where they differ, and how well they reach each other.
#pragma once

#include <optional>
#include <string>

#include "doctor/certify.h"
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

/// The other doctor, and what either host says of itself.
struct Encounter {
  Link link;
  Facts ours;
  Facts theirs;
};

/// Connects to the doctor that serves at `host`, and exchanges facts with it; `nonce`, if any, goes
/// with ours. Waits while that doctor serves others, and says so on stderr. Nothing: a finding says
/// why not.
[[nodiscard]] std::optional<Encounter> meet(const Subject& subject, const std::string& host,
                                            int port, const std::string& nonce, Findings& findings);

/// Compares the two hosts and their clocks, connects our engine to the other doctor's in each way
/// that both have, and measures. The first connection says the nonce, if any.
void compare_hosts(const Subject& subject, const Config& config, Encounter& encounter,
                   const std::string& nonce, Findings& findings);

/// Compares this host with the one where a doctor serves.
[[nodiscard]] Findings examine_pair(const Subject& subject, const Config& config,
                                    const std::string& host, int port);

/// Answers one doctor after the other until a signal; those that wait are told so. Each has 20 s,
/// from when its turn begins, until its engine has connected, and a minute in all. Prints the
/// address. A peer on the link proves no key, so `config` should be small. With `certification`
/// also certifies, for clients that the configuration's security admits. Errors: those of
/// Link::listen().
[[nodiscard]] Result<void> serve(const Subject& subject, const Config& config,
                                 const std::string& address, int port,
                                 const Certification* certification = nullptr);

}  // namespace spinwire::doctor
