// How many receives and completion entries an engine needs beyond those that its settings name.
#pragma once

#include <cstdint>

#include "spinwire/config.h"

namespace spinwire::config {

/// Work requests that each connection may post besides the application's: a credit write, a
/// keepalive, a credit return and a goodbye.
inline constexpr std::uint32_t kControlRequests = 4;
/// Work requests of rendezvous messages and leases, shared by all connections.
inline constexpr std::uint32_t kRendezvousRecords = 64;
/// Receives without credit, because a goodbye needs none.
inline constexpr std::uint32_t kUnreservedReceives = 8;

/// Receives that a connection with its own protection domain has beside the shared receive queue:
/// as many as its peer's credit can use.
[[nodiscard]] std::uint32_t receives_per_own_domain(const Config& config) noexcept;
/// Receives of all such connections; 0 without a shared receive queue.
[[nodiscard]] std::uint64_t own_domain_receives(const Config& config) noexcept;
/// Work requests for rendezvous messages and leases; 0 if the settings allow neither.
[[nodiscard]] std::uint64_t rendezvous_requests(const Config& config) noexcept;
/// Entries of the completion queue that connections can need at once.
[[nodiscard]] std::uint64_t completions_needed(const Config& config) noexcept;

}  // namespace spinwire::config
