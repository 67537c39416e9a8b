// What travels in rdma_cm's private data with a key, or with private data of the applications:
// requests, of which the server rejects all but the last with an answer, and its answer to the
// last. control/cm_authentication.h has the rules. Each struct begins with four bytes that name it;
// bytes behind it are padding.
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
/// What a client says of itself, in parts: the endpoint's data, a piece with all private data, and
/// zeroes. A release that knows no private data has zeroes behind the endpoint, or skips them.
inline constexpr std::size_t kCmPartBytes = 32;
/// The number of parts, with so many bytes of private data.
constexpr std::size_t cm_parts(std::size_t length) noexcept {
  return (kCmDataBytes + 2 + length + kCmPartBytes - 1) / kCmPartBytes;
}
inline constexpr std::size_t kCmPartsMax = cm_parts(kPrivateDataMax);
static_assert(cm_parts(0) == 2);

/// The first request: the first message of the Noise handshake, and the first bytes of the identity
/// of its key. The answer is an `authenticated` frame.
struct CmProof {
  std::array<std::uint8_t, 4> key{};
  std::array<std::uint8_t, 48> message{};
};
/// The further requests, each with one part. The answer to all but the last is a CmContinue, to the
/// last a CmAnswer or CmLongAnswer. Instead of each: a CmRefusal. A CmMore comes before a long
/// answer; its answer is a part of zeroes.
struct CmPart {
  /// Tells which handshake of the server: the first bytes of its Noise message.
  std::array<std::uint8_t, 4> handshake{};
  std::array<std::uint8_t, kCmPartBytes + kSealTagBytes> sealed{};
};
struct CmContinue {
  std::array<std::uint8_t, kSealTagBytes> sealed{};
};
/// The server's endpoint.
struct CmAnswer {
  std::array<std::uint8_t, kCmDataBytes + kSealTagBytes> sealed{};
};
/// A piece of the server's private data, in a rejection.
inline constexpr std::size_t kCmMoreBytes = kCmRejectMax - 4 - kSealTagBytes;
struct CmMore {
  std::array<std::uint8_t, kCmMoreBytes + kSealTagBytes> sealed{};
};
/// The server's endpoint, and the last piece of its private data.
inline constexpr std::size_t kCmLongAnswerBytes = kCmAcceptMax - 4 - kSealTagBytes;
struct CmLongAnswer {
  std::array<std::uint8_t, kCmLongAnswerBytes + kSealTagBytes> sealed{};
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
std::array<std::byte, kCmRequestMax> encode(const CmPart& part) noexcept;
std::array<std::byte, kCmMagicBytes + sizeof(CmContinue::sealed)> encode(
    const CmContinue& answer) noexcept;
std::array<std::byte, kCmMagicBytes + sizeof(CmAnswer::sealed)> encode(
    const CmAnswer& answer) noexcept;
std::array<std::byte, kCmRejectMax> encode(const CmMore& more) noexcept;
std::array<std::byte, kCmAcceptMax> encode(const CmLongAnswer& answer) noexcept;
std::array<std::byte, kCmRejectMax> encode(const CmRefusal& refusal) noexcept;

/// Each answers nothing if the bytes are too few, or are no such struct.
std::optional<CmProof> decode_cm_proof(std::span<const std::byte> data) noexcept;
std::optional<CmPart> decode_cm_part(std::span<const std::byte> data) noexcept;
std::optional<CmContinue> decode_cm_continue(std::span<const std::byte> data) noexcept;
std::optional<CmAnswer> decode_cm_answer(std::span<const std::byte> data) noexcept;
std::optional<CmMore> decode_cm_more(std::span<const std::byte> data) noexcept;
std::optional<CmLongAnswer> decode_cm_long_answer(std::span<const std::byte> data) noexcept;
std::optional<CmRefusal> decode_cm_sealed_refusal(std::span<const std::byte> data) noexcept;
/// A rejection that holds an `authenticated` frame, with its header.
struct CmAuthenticated {
  std::array<std::byte, kHeaderBytes> header{};
  std::uint32_t features = 0;  ///< of the header
  Authenticated frame;
};
std::optional<CmAuthenticated> decode_cm_authenticated(std::span<const std::byte> data) noexcept;

/// Most private data in a CmMore, and in a CmLongAnswer.
inline constexpr std::size_t kCmMoreData = kCmMoreBytes - 2;
inline constexpr std::size_t kCmAnswerData = kCmLongAnswerBytes - kCmDataBytes - 2;

/// Writes a piece of private data, from the byte `from` on: the length of all, as many bytes as
/// there is room for, and zeroes. Answers how many.
std::size_t encode_cm_piece(const PrivateData& data, std::size_t from,
                            std::span<std::byte> to) noexcept;

/// Private data that arrives in pieces.
class CmPieces {
 public:
  /// Takes the next piece. The last one must have all that is left, and another one may only come
  /// while an answer has no room for that. False, without a change: the length is above the limit
  /// or has changed, or there is something behind the data.
  [[nodiscard]] bool add(std::span<const std::byte> piece, bool is_last) noexcept;
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  /// The data so far.
  [[nodiscard]] PrivateData data() const noexcept;

 private:
  std::size_t size_ = 0;
  std::size_t length_ = 0;  ///< of all; valid with the first piece
  std::array<std::byte, kPrivateDataMax> storage_{};
};

}  // namespace spinwire::wire
