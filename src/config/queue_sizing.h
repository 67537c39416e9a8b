// Sizes that follow from the settings: receives, completion entries, half-open connections.
#pragma once

#include <cstdint>

#include "spinwire/config.h"

namespace spinwire::config {

/// Work requests that each connection may post besides the application's: a credit write, a
/// request for credit, a credit return and a goodbye.
inline constexpr std::uint32_t kControlRequests = 4;
/// Work requests of rendezvous messages and leases, shared by all connections.
inline constexpr std::uint32_t kRendezvousRecords = 64;
/// Receives that no credit is granted for: goodbyes use them.
inline constexpr std::uint32_t kUnreservedReceives = 8;

/// Receives that a connection with its own protection domain has besides the shared receive queue:
/// as many as its peer's credit can use.
[[nodiscard]] std::uint32_t receives_per_own_domain(const Config& config) noexcept;
/// Receives of all connections with their own domain; 0 without a shared receive queue.
[[nodiscard]] std::uint64_t own_domain_receives(const Config& config) noexcept;
/// Work requests for rendezvous messages and leases; 0 if the settings allow neither.
[[nodiscard]] std::uint64_t rendezvous_requests(const Config& config) noexcept;
/// Inbound connections that may be half-open at once: a quarter of connections.maximum.
[[nodiscard]] std::uint32_t half_open_connections(const Config::Connections& config) noexcept;
/// Entries of the completion queue that connections can need at once.
[[nodiscard]] std::uint64_t completions_needed(const Config& config) noexcept;

}  // namespace spinwire::config
