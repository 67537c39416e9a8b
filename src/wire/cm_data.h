// rdma_cm's private data: the parts of an endpoint that rdma_cm does not carry itself.
// Little-endian, after the magic, versions and features of every handshake. A request of
// any transport holds at most 56 bytes of private data (RDMA_PS_TCP: the 92 of InfiniBand's REQ
// less rdma_cm's own header of 36).
#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "wire/handshake.h"

namespace spinwire::wire {

inline constexpr std::size_t kCmDataBytes = 56;
inline constexpr std::size_t kCmRequestMax = 56;
inline constexpr std::size_t kCmIncarnationAt = 20;  ///< where an engine's number is in the data
inline constexpr std::size_t kCmRejectMax = 148;     ///< bytes that a rejection may carry

/// `endpoint` must have passed check(). Its application's private data has no room; see cm_proof.h.
std::array<std::byte, kCmDataBytes> encode_cm(const Endpoint& endpoint,
                                              const Capabilities& capabilities = {}) noexcept;

/// Fills in the rest of `endpoint`, whose address, queue pair and PSN come from rdma_cm, and checks
/// the whole endpoint. Bytes after the known ones are padding. Errors: protocol (names the field,
/// its value and the limit); unsupported if the ends have no common version.
Result<void> decode_cm(std::span<const std::byte> data, Endpoint& endpoint,
                       VersionRange ours = kVersions);

/// Whether the sender of a request takes the code of a refusal. Any bytes.
bool takes_application_fields(std::span<const std::byte> data) noexcept;
/// Whether the sender of a request takes private data of the application through rdma_cm.
bool takes_cm_private_data(std::span<const std::byte> data) noexcept;
/// Whether private data of the application follows, in an answer. Any bytes.
bool announces_private_data(std::span<const std::byte> data) noexcept;
/// Announces it in what encode_cm() has made.
void announce_private_data(std::span<std::byte, kCmDataBytes> data) noexcept;
/// Whether the sender of a request's private data understands a refusal with a goodbye.
bool takes_goodbyes(std::span<const std::byte> data) noexcept;

/// Encodes a refusal for a rejection, with its text cut to fit `room` bytes.
Frame encode_cm_refusal(const Refuse& refuse, std::size_t room = kCmRejectMax) noexcept;
/// Decodes a rejection; a plain `refused` without text if the rejection is not one of ours.
Refuse decode_cm_refusal(std::span<const std::byte> data) noexcept;

}  // namespace spinwire::wire
