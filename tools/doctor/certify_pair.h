// Certifies a device between two hosts: each host runs its own suites, and spinwire-perf and
// perftest measure the way between them.
//
// After the doctors have met (link.h), the client requests and the server answers, in facts:
//
//   request=begin                           certify=yes
//   request=start measurement=1 … 3         port=N operations=N
//     program=1 … 2
//   request=tests seconds=N                 a finding each, and at last done=yes
//   request=end
//
// error=TEXT answers what was refused or failed. All programs and their arguments are the server's;
// a client chooses one of the measurements only.
#pragma once

#include <string>
#include <string_view>

#include "doctor/certify.h"
#include "doctor/two_hosts.h"

namespace spinwire::doctor {

/// 32 digits that nobody can guess. Errors: system.
[[nodiscard]] Result<std::string> make_nonce();
[[nodiscard]] bool is_nonce(std::string_view text) noexcept;

/// Certifies the device with the one of the doctor that serves at `host`.
[[nodiscard]] Findings certify_pair(const Certification& what, const Subject& subject,
                                    const Config& config, const std::string& host, int port);

/// Does what the client requests until it ends or `what.minutes` are over. `is_known`: its engine
/// has said the client's nonce; else it is refused, if it asks before `deadline`. `address`: to
/// serve at. Errors: those of Link::receive().
[[nodiscard]] Result<void> serve_certification(const Certification& what,
                                               const std::string& address, bool is_known,
                                               SteadyTime deadline, Link& client);

}  // namespace spinwire::doctor
