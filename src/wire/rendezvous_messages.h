// Control messages of rendezvous: in the layouts below, after the message header.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "wire/codec.h"
#include "wire/message_header.h"

namespace spinwire::wire {

/// Offers a message that the sender has exposed.
struct RendezvousOffer {
  std::uint64_t address = 0;
  std::uint32_t length = 0;  ///< bytes, not 0
  std::uint32_t rkey = 0;    ///< opens exactly these bytes
  std::uint32_t id = 0;      ///< the sender's id, for the answer
  bool invalidate = false;   ///< the answer must invalidate the key
};
using RendezvousOfferLayout =
    Layout<&RendezvousOffer::address, &RendezvousOffer::length, &RendezvousOffer::rkey,
           &RendezvousOffer::id, flag<&RendezvousOffer::invalidate, std::uint32_t>>;

/// Offers a message that the receiver may read by the local key of its memory, so that no key has
/// to be opened. Only between ends of the embedded device, which both can (verbs::kNamedByPeer).
struct LocalOffer {
  std::uint64_t address = 0;
  std::uint32_t length = 0;     ///< bytes, not 0
  std::uint32_t lkey = 0;       ///< of memory in which these bytes lie
  std::uint32_t id = 0;         ///< the sender's id, for the answer
  std::uint32_t immediate = 0;  ///< the message's, if it has one; else 0
  bool has_immediate = false;
};
using LocalOfferLayout =
    Layout<&LocalOffer::address, &LocalOffer::length, &LocalOffer::lkey, &LocalOffer::id,
           &LocalOffer::immediate, flag<&LocalOffer::has_immediate, std::uint8_t>, zeros<3>>;

enum class RendezvousVerdict : std::uint8_t {
  received = 0,
  no_room = 1,  ///< no block became free in time
  refused = 2,  ///< refused by the receiver's application
  closing = 3,  ///< the receiver is closing
};

/// Ends a rendezvous.
struct RendezvousAnswer {
  std::uint32_t id = 0;
  RendezvousVerdict verdict = RendezvousVerdict::received;
};
using RendezvousAnswerLayout = Layout<&RendezvousAnswer::id, &RendezvousAnswer::verdict, zeros<3>>;

constexpr std::array<std::byte, kRendezvousOfferBytes> encode(
    const RendezvousOffer& offer) noexcept {
  return RendezvousOfferLayout::encode(offer);
}
/// False if the offer is malformed: of another size, empty, beyond the end of memory, or with
/// unknown flags.
constexpr bool decode(std::span<const std::byte> bytes, RendezvousOffer& offer) noexcept {
  return RendezvousOfferLayout::decode(bytes, offer) && offer.length != 0 &&
         offer.address + offer.length > offer.address;
}

constexpr std::array<std::byte, kLocalOfferBytes> encode(const LocalOffer& offer) noexcept {
  return LocalOfferLayout::encode(offer);
}
/// False if the offer is malformed: of another size, empty, beyond the end of memory, with unknown
/// flags, or with an immediate that it says it has not.
constexpr bool decode(std::span<const std::byte> bytes, LocalOffer& offer) noexcept {
  return LocalOfferLayout::decode(bytes, offer) && offer.length != 0 &&
         offer.address + offer.length > offer.address &&
         (offer.has_immediate || offer.immediate == 0);
}

constexpr std::array<std::byte, kRendezvousAnswerBytes> encode(
    const RendezvousAnswer& answer) noexcept {
  return RendezvousAnswerLayout::encode(answer);
}
/// False if the answer is malformed: of another size, or with an unknown verdict.
constexpr bool decode(std::span<const std::byte> bytes, RendezvousAnswer& answer) noexcept {
  return RendezvousAnswerLayout::decode(bytes, answer) &&
         answer.verdict <= RendezvousVerdict::closing;
}

}  // namespace spinwire::wire
