// The header of every message on a queue pair: eight bytes, little-endian, adjacent to the payload.
// Hot.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "wire/goodbye.h"

namespace spinwire::wire {

static_assert(std::endian::native == std::endian::little, "the header is copied as it lies");

enum class MessageKind : std::uint8_t {
  data = 1,           ///< the application's bytes
  credit_return = 2,  ///< the sender returns `length` unused credits
  /// The sender closes; `length` says why, see wire/goodbye.h. No message follows; but behind one
  /// with kAwaitsGoodbye, answers about rendezvous messages, leases and credit do.
  goodbye = 3,
  rendezvous_offer = 4,   ///< a message to fetch with READs; a RendezvousOffer follows
  rendezvous_answer = 5,  ///< ends a rendezvous; a RendezvousAnswer follows
  // Leases; see wire/lease_messages.h.
  lease_request = 6,  ///< requests memory; a LeaseRequest follows
  lease_grant = 7,    ///< answers a request; a LeaseGrant follows
  lease_push = 8,     ///< offers unrequested memory; a LeaseGrant follows
  lease_call = 9,     ///< about a lease; a LeaseCall follows
  lease_reply = 10,   ///< to such a call; a LeaseReply follows
  // Credit by messages, where the receiver's credit cell is overwritten. They cost no credit.
  credit_ask = 11,  ///< allows the receiver one `credit`; the sender reads its cell no more
  credit = 12,      ///< what a word in the credit cell says: `granted`, and that the sender polls
  // Of leases with a tag, and refusals of an application. Only for a peer that takes
  // Endpoint::application_fields.
  tagged_lease_request = 13,  ///< a TaggedLeaseRequest follows
  tagged_lease_grant = 14,    ///< a TaggedLeaseGrant follows
  tagged_lease_push = 15,     ///< a TaggedLeaseGrant follows
  lease_denial = 16,          ///< answers a request; a LeaseDenial follows
  local_offer = 17,           ///< a message to fetch with READs; a LocalOffer follows
};

namespace message_flag {
inline constexpr std::uint8_t kWantCredit = 1;  ///< the sender needs more credit
inline constexpr std::uint8_t kAll = 1;
}  // namespace message_flag

struct MessageHeader {
  MessageKind kind;
  std::uint8_t flags;
  std::uint16_t granted;  ///< low bits of all credits granted to the message's receiver
  std::uint32_t length;   ///< payload bytes; for credit_return, credits; for goodbye, why
};
inline constexpr std::size_t kMessageHeaderBytes = 8;
static_assert(sizeof(MessageHeader) == kMessageHeaderBytes);

/// The header in wire format: one word, written with one store.
constexpr std::uint64_t encode(const MessageHeader& header) noexcept {
  return static_cast<std::uint64_t>(header.kind) | std::uint64_t{header.flags} << 8 |
         std::uint64_t{header.granted} << 16 | std::uint64_t{header.length} << 32;
}
inline void put(std::uint64_t header, std::byte* at) noexcept {
  std::memcpy(at, &header, sizeof header);
}

inline std::uint64_t get(const std::byte* at) noexcept {
  std::uint64_t header = 0;
  std::memcpy(&header, at, sizeof header);
  return header;
}

/// Whether this is the header of an application's message without flags, with `size` bytes of
/// payload.
constexpr bool is_data(std::uint64_t header, std::uint32_t size) noexcept {
  constexpr std::uint64_t kGranted = 0xffff0000;
  return (header & ~kGranted) ==
         (static_cast<std::uint64_t>(MessageKind::data) | std::uint64_t{size} << 32);
}
/// The same for a message of `received` bytes in all. Does the work of decode() for nearly every
/// message in one compare.
constexpr bool is_plain(std::uint64_t header, std::uint32_t received) noexcept {
  return received >= kMessageHeaderBytes &&
         is_data(header, received - std::uint32_t{kMessageHeaderBytes});
}
constexpr std::uint16_t granted_of(std::uint64_t header) noexcept {
  return static_cast<std::uint16_t>(header >> 16);
}

/// The header of a message without flags, and whether it had the flag.
constexpr std::uint64_t without_flags(std::uint64_t header) noexcept {
  return header & ~(std::uint64_t{message_flag::kAll} << 8);
}
constexpr bool wants_credit(std::uint64_t header) noexcept {
  return (header >> 8 & message_flag::kWantCredit) != 0;
}

/// The header with another count of grants.
constexpr std::uint64_t with_granted(std::uint64_t header, std::uint16_t granted) noexcept {
  return (header & ~std::uint64_t{0xffff0000}) | std::uint64_t{granted} << 16;
}

inline constexpr std::size_t kRendezvousOfferBytes = 24;
inline constexpr std::size_t kLocalOfferBytes = 28;
inline constexpr std::size_t kRendezvousAnswerBytes = 8;
inline constexpr std::size_t kLeaseRequestBytes = 32;
inline constexpr std::size_t kLeaseGrantBytes = 40;
inline constexpr std::size_t kLeaseCallBytes = 24;
inline constexpr std::size_t kLeaseReplyBytes = 16;
inline constexpr std::size_t kTaggedLeaseRequestBytes = kLeaseRequestBytes + 8;
inline constexpr std::size_t kTaggedLeaseGrantBytes = kLeaseGrantBytes + 8;
inline constexpr std::size_t kLeaseDenialBytes = 48;

/// Whether the message offers one for the receiver to fetch.
constexpr bool is_offer(MessageKind kind) noexcept {
  return kind == MessageKind::rendezvous_offer || kind == MessageKind::local_offer;
}

/// Bytes that follow the header of a control message with a body; 0 for other kinds.
constexpr std::size_t body_bytes(MessageKind kind) noexcept {
  switch (kind) {
    case MessageKind::rendezvous_offer:
      return kRendezvousOfferBytes;
    case MessageKind::local_offer:
      return kLocalOfferBytes;
    case MessageKind::rendezvous_answer:
      return kRendezvousAnswerBytes;
    case MessageKind::lease_request:
      return kLeaseRequestBytes;
    case MessageKind::lease_grant:
    case MessageKind::lease_push:
      return kLeaseGrantBytes;
    case MessageKind::lease_call:
      return kLeaseCallBytes;
    case MessageKind::lease_reply:
      return kLeaseReplyBytes;
    case MessageKind::tagged_lease_request:
      return kTaggedLeaseRequestBytes;
    case MessageKind::tagged_lease_grant:
    case MessageKind::tagged_lease_push:
      return kTaggedLeaseGrantBytes;
    case MessageKind::lease_denial:
      return kLeaseDenialBytes;
    default:
      return 0;
  }
}

/// Checks a message of `received` bytes at `at`. Returns false if it is malformed.
inline bool decode(const std::byte* at, std::size_t received, MessageHeader& header) noexcept {
  if (received < kMessageHeaderBytes) [[unlikely]]
    return false;
  std::memcpy(&header, at, sizeof header);
  const std::size_t payload = received - kMessageHeaderBytes;
  if ((header.flags & ~message_flag::kAll) != 0) [[unlikely]]
    return false;
  if (header.kind == MessageKind::data) [[likely]]
    return header.length == payload;
  if (const std::size_t body = body_bytes(header.kind); body != 0)
    return payload == body && header.length == payload;
  if (header.kind == MessageKind::credit_return) return payload == 0 && header.length <= 0x8000;
  if (header.kind == MessageKind::goodbye) {
    Goodbye goodbye;
    bool awaits_answer = false;
    return payload == 0 && decode(header.length, goodbye, awaits_answer);
  }
  const bool is_bare = header.kind == MessageKind::credit_ask || header.kind == MessageKind::credit;
  return is_bare && payload == 0 && header.length == 0;
}

}  // namespace spinwire::wire
