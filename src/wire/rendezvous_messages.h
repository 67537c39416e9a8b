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
