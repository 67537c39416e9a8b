// What two engines tell each other in rdma_cm's private data: the parts of an endpoint that rdma_cm
// does not carry itself. Little-endian at the offsets written below, behind the magic and versions
// of every handshake. The longest of all transports' requests holds 56 bytes of it (RDMA_PS_TCP:
// the 92 of InfiniBand's REQ less rdma_cm's own header of 36).
#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "wire/handshake.h"

namespace spinwire::wire {

inline constexpr std::size_t kCmDataBytes = 56;
inline constexpr std::size_t kCmRequestMax = 56;
inline constexpr std::size_t kCmRejectMax = 148;  ///< bytes that a rejection may carry

namespace cm_at {
inline constexpr std::size_t magic = 0, version_min = 4, version_max = 6, features = 8,
                             max_message = 12, credits = 16, incarnation = 20, control_address = 28,
                             control_rkey = 36, mtu = 40, max_rd_atomic = 42, eager_bytes = 44,
                             control_token = 48, peer_timeout_ms = 52;
}  // namespace cm_at

/// `endpoint` is to pass check() first.
std::array<std::byte, kCmDataBytes> encode_cm(const Endpoint& endpoint,
                                              const Speaker& speaker = {}) noexcept;

/// Fills the rest of `endpoint`, whose address, queue pair and PSN rdma_cm told, and checks all of
/// it. Bytes behind the known ones are padding. Errors: protocol naming the field, its value and
/// the limit; unsupported when no version is spoken by both.
Result<void> decode_cm(std::span<const std::byte> data, Endpoint& endpoint,
                       VersionRange ours = kVersions);

/// A refusal as a rejection carries it, its text cut to fit.
Frame encode_cm_refusal(const Refuse& refuse) noexcept;
/// What a rejection says; a plain `refused` without words if it is not one of ours.
Refuse decode_cm_refusal(std::span<const std::byte> data) noexcept;

}  // namespace spinwire::wire
