// What two engines tell each other of a message that is pulled: little-endian at the offsets
// written below, behind the message header.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "wire/codec.h"
#include "wire/message_header.h"

namespace spinwire::wire {

/// The sender has exposed a message.
struct RendezvousOffer {
  std::uint64_t address = 0;
  std::uint32_t length = 0;  ///< bytes, not 0
  std::uint32_t rkey = 0;    ///< opens exactly those
  std::uint32_t id = 0;      ///< the sender's, to be answered with
  bool invalidate = false;   ///< the answer is to invalidate the key
};
namespace offer_at {
inline constexpr std::size_t address = 0, length = 8, rkey = 12, id = 16, flags = 20;
}
inline constexpr std::uint32_t kOfferInvalidate = 1;

enum class RendezvousVerdict : std::uint8_t {
  received = 0,
  no_room = 1,  ///< no block became free in time
  refused = 2,  ///< by the receiver's application
  closing = 3,  ///< the receiver closes
};

/// The receiver is done with it.
struct RendezvousAnswer {
  std::uint32_t id = 0;
  RendezvousVerdict verdict = RendezvousVerdict::received;
};
namespace answer_at {
inline constexpr std::size_t id = 0, verdict = 4;
}

constexpr std::array<std::byte, kRendezvousOfferBytes> encode(
    const RendezvousOffer& offer) noexcept {
  std::array<std::byte, kRendezvousOfferBytes> bytes{};
  Writer w(bytes);
  w.put<std::uint64_t>(offer_at::address, offer.address);
  w.put<std::uint32_t>(offer_at::length, offer.length);
  w.put<std::uint32_t>(offer_at::rkey, offer.rkey);
  w.put<std::uint32_t>(offer_at::id, offer.id);
  w.put<std::uint32_t>(offer_at::flags, offer.invalidate ? kOfferInvalidate : 0);
  return bytes;
}

/// False if it is malformed: of another size, empty, beyond the end of memory, with unknown flags.
constexpr bool decode(std::span<const std::byte> bytes, RendezvousOffer& offer) noexcept {
  Reader r(bytes);
  offer.address = r.get<std::uint64_t>(offer_at::address);
  offer.length = r.get<std::uint32_t>(offer_at::length);
  offer.rkey = r.get<std::uint32_t>(offer_at::rkey);
  offer.id = r.get<std::uint32_t>(offer_at::id);
  const auto flags = r.get<std::uint32_t>(offer_at::flags);
  offer.invalidate = (flags & kOfferInvalidate) != 0;
  return r.ok() && bytes.size() == kRendezvousOfferBytes && (flags & ~kOfferInvalidate) == 0 &&
         offer.length != 0 && offer.address + offer.length > offer.address;
}

constexpr std::array<std::byte, kRendezvousAnswerBytes> encode(
    const RendezvousAnswer& answer) noexcept {
  std::array<std::byte, kRendezvousAnswerBytes> bytes{};
  Writer w(bytes);
  w.put<std::uint32_t>(answer_at::id, answer.id);
  w.put<std::uint8_t>(answer_at::verdict, static_cast<std::uint8_t>(answer.verdict));
  return bytes;
}

/// False if it is malformed: of another size, of no known verdict.
constexpr bool decode(std::span<const std::byte> bytes, RendezvousAnswer& answer) noexcept {
  Reader r(bytes);
  answer.id = r.get<std::uint32_t>(answer_at::id);
  const auto verdict = r.get<std::uint8_t>(answer_at::verdict);
  answer.verdict = static_cast<RendezvousVerdict>(verdict);
  return r.ok() && bytes.size() == kRendezvousAnswerBytes &&
         verdict <= static_cast<std::uint8_t>(RendezvousVerdict::closing) &&
         r.get<std::uint8_t>(5) == 0 && r.get<std::uint16_t>(6) == 0;
}

}  // namespace spinwire::wire
