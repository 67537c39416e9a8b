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
/// Records of operations that agents begin themselves, besides queues.operations.
[[nodiscard]] std::uint32_t internal_operations(const Config& config) noexcept;
/// Receives of the shared queue that can be reserved for peers.
[[nodiscard]] std::uint32_t reservable_receives(const Config& config) noexcept;
/// Bytes of the receive pool for the receives of connections, without spare ones.
[[nodiscard]] std::uint64_t receive_block_bytes(const Config& config) noexcept;
/// Least size of the receive pool, a quarter spare.
[[nodiscard]] std::uint64_t receive_pool_needed(const Config& config) noexcept;
/// Bytes of the rendezvous pool that the longest message takes; 0 if no message uses it.
[[nodiscard]] std::uint64_t longest_message_bytes(const Config& config) noexcept;
/// Receives for datagrams that may be reserved. The last quarter is for sessions without a
/// reservation, which have one call at a time.
[[nodiscard]] std::uint32_t datagram_receive_budget(const Config& config) noexcept;
/// Entries of the completion queue that connections can need at once.
[[nodiscard]] std::uint64_t completions_needed(const Config& config) noexcept;
/// Entries that connections and datagrams of remote calls can need at once.
[[nodiscard]] std::uint64_t completions_needed_with_calls(const Config& config) noexcept;

}  // namespace spinwire::config
