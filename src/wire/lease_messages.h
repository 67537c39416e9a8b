// Control messages about leases: in the layouts below, after the message header.
// Times are durations, because the two clocks are unrelated.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/printable.h"
#include "wire/codec.h"
#include "wire/message_header.h"

namespace spinwire::wire {

/// Remote rights as Access numbers them; a lease needs at least one.
constexpr bool is_remote_access(std::uint8_t access) noexcept { return access - 1u < 7; }

inline constexpr std::uint64_t kLongestLease = 3600 * std::uint64_t{1'000'000'000};  ///< ns

/// Why a lease, or a call about a lease, is refused.
enum class LeaseVerdict : std::uint8_t {
  granted = 0,
  too_long = 1,      ///< more bytes than one lease may have
  misaligned = 2,    ///< an invalid or too large alignment
  too_many = 3,      ///< as many leases as the connection may have
  too_much = 4,      ///< as many bytes in all as the connection may have
  no_room = 5,       ///< the pool or the device's keys are used up
  no_right = 6,      ///< none of the rights is allowed
  bad_duration = 7,  ///< too long or too short a time
  over = 8,          ///< the lease has ended
  unwanted = 9,      ///< refused by the application
  closing = 10,      ///< the owner is closing
};
constexpr bool is_verdict(LeaseVerdict verdict) noexcept {
  return verdict <= LeaseVerdict::closing;
}

/// Requests memory of the peer.
struct LeaseRequest {
  std::uint64_t bytes = 0;
  std::uint64_t time = 0;  ///< ns
  std::uint32_t id = 0;    ///< the requester's id, for the answer
  std::uint32_t alignment = 0;
  std::uint8_t access = 0;
  std::uint64_t tag = 0;  ///< of a TaggedLeaseRequest only
};
using LeaseRequestLayout = Layout<&LeaseRequest::bytes, &LeaseRequest::time, &LeaseRequest::id,
                                  &LeaseRequest::alignment, &LeaseRequest::access, zeros<7>>;

/// A request with a tag, which is not 0.
struct TaggedLeaseRequest : LeaseRequest {};
using TaggedLeaseRequestLayout =
    Layout<&LeaseRequest::bytes, &LeaseRequest::time, &LeaseRequest::id, &LeaseRequest::alignment,
           &LeaseRequest::access, zeros<7>, &LeaseRequest::tag>;

/// Grants memory for a time, or says why not.
struct LeaseGrant {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  std::uint64_t time = 0;   ///< ns
  std::uint32_t id = 0;     ///< the requester's id; 0 for a push
  std::uint32_t lease = 0;  ///< the owner's id, for calls about the lease
  std::uint32_t rkey = 0;
  std::uint8_t access = 0;
  LeaseVerdict verdict = LeaseVerdict::granted;
  bool invalidate = false;  ///< the holder's return invalidates the key
  std::uint64_t tag = 0;    ///< of a TaggedLeaseGrant only
};
using LeaseGrantLayout =
    Layout<&LeaseGrant::address, &LeaseGrant::bytes, &LeaseGrant::time, &LeaseGrant::id,
           &LeaseGrant::lease, &LeaseGrant::rkey, &LeaseGrant::access, &LeaseGrant::verdict,
           flag<&LeaseGrant::invalidate, std::uint8_t>, zeros<1>>;

/// A grant with a tag, which is not 0.
struct TaggedLeaseGrant : LeaseGrant {};
using TaggedLeaseGrantLayout =
    Layout<&LeaseGrant::address, &LeaseGrant::bytes, &LeaseGrant::time, &LeaseGrant::id,
           &LeaseGrant::lease, &LeaseGrant::rkey, &LeaseGrant::access, &LeaseGrant::verdict,
           flag<&LeaseGrant::invalidate, std::uint8_t>, zeros<1>, &LeaseGrant::tag>;

/// The owner's application refuses a request.
inline constexpr std::size_t kDenialTextMax = 40;
struct LeaseDenial {
  std::uint32_t id = 0;                             ///< the requester's id
  std::uint32_t code = 0;                           ///< the application's
  std::array<std::uint8_t, kDenialTextMax> text{};  ///< printable ASCII, then zeros
};
using LeaseDenialLayout = Layout<&LeaseDenial::id, &LeaseDenial::code, &LeaseDenial::text>;

enum class LeaseAction : std::uint8_t {
  took = 0,       ///< the holder accepts or refuses a push
  release = 1,    ///< the holder ends the lease; no reply
  give_back = 2,  ///< the holder ends the lease and notifies the owner's application; a reply
  renew = 3,      ///< the holder asks for more time; a reply
  recall = 4,     ///< the owner wants the memory back: the holder releases it at once
};

/// A call about one lease, which has the owner's id.
struct LeaseCall {
  std::uint64_t time = 0;   ///< ns, for renew
  std::uint32_t lease = 0;  ///< the owner's id
  std::uint32_t id = 0;     ///< the caller's id, for the reply
  LeaseAction action = LeaseAction::took;
  LeaseVerdict verdict = LeaseVerdict::granted;  ///< for took
};
using LeaseCallLayout = Layout<&LeaseCall::time, &LeaseCall::lease, &LeaseCall::id,
                               &LeaseCall::action, &LeaseCall::verdict, zeros<6>>;

struct LeaseReply {
  std::uint64_t time = 0;  ///< ns, for renew
  std::uint32_t id = 0;
  LeaseVerdict verdict = LeaseVerdict::granted;
};
using LeaseReplyLayout = Layout<&LeaseReply::time, &LeaseReply::id, &LeaseReply::verdict, zeros<3>>;

constexpr std::array<std::byte, kLeaseRequestBytes> encode(const LeaseRequest& r) noexcept {
  return LeaseRequestLayout::encode(r);
}
/// False if the request is malformed. A request that exceeds a limit is valid and gets an answer.
constexpr bool decode(std::span<const std::byte> bytes, LeaseRequest& r) noexcept {
  return LeaseRequestLayout::decode(bytes, r) && r.bytes != 0;
}

constexpr std::array<std::byte, kLeaseGrantBytes> encode(const LeaseGrant& g) noexcept {
  return LeaseGrantLayout::encode(g);
}
/// False if the grant is malformed: granted without bytes, key, rights or time, beyond the end of
/// memory, or with unknown flags or an unknown verdict.
constexpr bool decode(std::span<const std::byte> bytes, LeaseGrant& g) noexcept {
  if (!LeaseGrantLayout::decode(bytes, g) || !is_verdict(g.verdict)) return false;
  return g.verdict != LeaseVerdict::granted ||
         (g.bytes != 0 && g.address + g.bytes > g.address && g.rkey != 0 && g.time != 0 &&
          g.time <= kLongestLease && is_remote_access(g.access));
}

constexpr std::array<std::byte, kTaggedLeaseRequestBytes> encode(
    const TaggedLeaseRequest& r) noexcept {
  return TaggedLeaseRequestLayout::encode(r);
}
constexpr bool decode(std::span<const std::byte> bytes, TaggedLeaseRequest& r) noexcept {
  return TaggedLeaseRequestLayout::decode(bytes, r) &&
         decode(bytes.first(kLeaseRequestBytes), static_cast<LeaseRequest&>(r)) && r.tag != 0;
}

constexpr std::array<std::byte, kTaggedLeaseGrantBytes> encode(const TaggedLeaseGrant& g) noexcept {
  return TaggedLeaseGrantLayout::encode(g);
}
constexpr bool decode(std::span<const std::byte> bytes, TaggedLeaseGrant& g) noexcept {
  return TaggedLeaseGrantLayout::decode(bytes, g) &&
         decode(bytes.first(kLeaseGrantBytes), static_cast<LeaseGrant&>(g)) && g.tag != 0;
}

/// As much of the text as fits; '?' replaces bytes that are not printable ASCII.
constexpr void set_text(LeaseDenial& d, std::string_view text) noexcept {
  for (std::size_t i = 0; i < text.size() && i < d.text.size(); ++i)
    d.text[i] = static_cast<std::uint8_t>(base::shown(text[i]));
}
constexpr std::array<std::byte, kLeaseDenialBytes> encode(const LeaseDenial& d) noexcept {
  return LeaseDenialLayout::encode(d);
}
/// False if the text has other bytes than it may.
constexpr bool decode(std::span<const std::byte> bytes, LeaseDenial& d) noexcept {
  if (!LeaseDenialLayout::decode(bytes, d)) return false;
  const auto end = std::find(d.text.begin(), d.text.end(), std::uint8_t{0});
  return std::all_of(d.text.begin(), end,
                     [](std::uint8_t c) { return base::is_printable(static_cast<char>(c)); }) &&
         std::all_of(end, d.text.end(), [](std::uint8_t c) { return c == 0; });
}

constexpr std::array<std::byte, kLeaseCallBytes> encode(const LeaseCall& c) noexcept {
  return LeaseCallLayout::encode(c);
}
/// False if the call is malformed: an unknown action or verdict.
constexpr bool decode(std::span<const std::byte> bytes, LeaseCall& c) noexcept {
  return LeaseCallLayout::decode(bytes, c) && c.action <= LeaseAction::recall &&
         is_verdict(c.verdict);
}

constexpr std::array<std::byte, kLeaseReplyBytes> encode(const LeaseReply& r) noexcept {
  return LeaseReplyLayout::encode(r);
}
/// False if the reply is malformed: an unknown verdict.
constexpr bool decode(std::span<const std::byte> bytes, LeaseReply& r) noexcept {
  return LeaseReplyLayout::decode(bytes, r) && is_verdict(r.verdict) && r.time <= kLongestLease;
}

}  // namespace spinwire::wire
