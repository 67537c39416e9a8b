// With a key, what travels in rdma_cm's private data: three requests, of which the server rejects
// the first two with an answer, and its answer to the third. control/cm_authentication.h has the
// rules. Each struct begins with four bytes that name it; bytes behind it are padding.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "wire/cm_data.h"
#include "wire/handshake.h"

namespace spinwire::wire {

inline constexpr std::size_t kCmAcceptMax = 196;  ///< bytes that the answer to a request may carry
/// The endpoint's data and zeroes, in two halves.
inline constexpr std::size_t kCmHalfBytes = 32;
static_assert(kCmDataBytes <= 2 * kCmHalfBytes);

/// The first request: the first message of the Noise handshake, and the first bytes of the identity
/// of its key. The answer is an `authenticated` frame.
struct CmProof {
  std::array<std::uint8_t, 4> key{};
  std::array<std::uint8_t, 48> message{};
};
/// The second and third requests: one half of the endpoint's data. The answer to the second is a
/// CmContinue, to the third a CmAnswer. Instead of either: a CmRefusal.
struct CmHalf {
  /// Tells which handshake of the server: the first bytes of its Noise message.
  std::array<std::uint8_t, 4> handshake{};
  std::array<std::uint8_t, kCmHalfBytes + kSealTagBytes> sealed{};
};
struct CmContinue {
  std::array<std::uint8_t, kSealTagBytes> sealed{};
};
/// The server's endpoint.
struct CmAnswer {
  std::array<std::uint8_t, kCmDataBytes + kSealTagBytes> sealed{};
};
/// A `refuse` frame and zeroes.
inline constexpr std::size_t kCmRefusalBytes = kCmRejectMax - 4 - kSealTagBytes;
struct CmRefusal {
  std::array<std::uint8_t, kCmRefusalBytes + kSealTagBytes> sealed{};
};

/// The bytes of each struct that are not encrypted, besides CmProof::message.
inline constexpr std::size_t kCmHeaderBytes = 8;  ///< of a request
inline constexpr std::size_t kCmMagicBytes = 4;   ///< of an answer

std::array<std::byte, kCmRequestMax> encode(const CmProof& proof) noexcept;
std::array<std::byte, kCmRequestMax> encode(const CmHalf& half) noexcept;
std::array<std::byte, kCmMagicBytes + sizeof(CmContinue::sealed)> encode(
    const CmContinue& answer) noexcept;
std::array<std::byte, kCmMagicBytes + sizeof(CmAnswer::sealed)> encode(
    const CmAnswer& answer) noexcept;
std::array<std::byte, kCmRejectMax> encode(const CmRefusal& refusal) noexcept;

/// Each answers nothing if the bytes are too few, or are no such struct.
std::optional<CmProof> decode_cm_proof(std::span<const std::byte> data) noexcept;
std::optional<CmHalf> decode_cm_half(std::span<const std::byte> data) noexcept;
std::optional<CmContinue> decode_cm_continue(std::span<const std::byte> data) noexcept;
std::optional<CmAnswer> decode_cm_answer(std::span<const std::byte> data) noexcept;
std::optional<CmRefusal> decode_cm_sealed_refusal(std::span<const std::byte> data) noexcept;
/// A rejection that holds an `authenticated` frame, with its header.
struct CmAuthenticated {
  std::array<std::byte, kHeaderBytes> header{};
  Authenticated frame;
};
std::optional<CmAuthenticated> decode_cm_authenticated(std::span<const std::byte> data) noexcept;

}  // namespace spinwire::wire
