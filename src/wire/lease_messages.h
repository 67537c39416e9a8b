// What two engines tell each other of leases: little-endian at the offsets written below, behind
// the message header. Times are durations, since the ends' clocks have nothing in common.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "wire/codec.h"
#include "wire/message_header.h"

namespace spinwire::wire {

/// Remote rights as Access numbers them; none is not worth a lease.
constexpr bool is_remote_access(std::uint8_t access) noexcept { return access - 1u < 7; }

inline constexpr std::uint64_t kLongestLease = 3600 * std::uint64_t{1'000'000'000};  ///< ns

/// Why a lease, or a call about one, is refused.
enum class LeaseVerdict : std::uint8_t {
  granted = 0,
  too_long = 1,    ///< more bytes than one lease may have
  misaligned = 2,  ///< an alignment that is none, or too large
  too_many = 3,    ///< as many leases as the connection may have
  too_much = 4,    ///< as many bytes in all as the connection may have
  no_room = 5,     ///< the pool, or the device's keys, are used up
  no_right = 6,    ///< none of the rights is to be had
  bad_time = 7,    ///< too long a time, or too short
  over = 8,        ///< the lease has ended
  unwanted = 9,    ///< by the application
  closing = 10,    ///< the owner closes
};
constexpr bool is_verdict(std::uint8_t verdict) noexcept {
  return verdict <= static_cast<std::uint8_t>(LeaseVerdict::closing);
}

/// Asks for memory of the peer's.
struct LeaseRequest {
  std::uint64_t bytes = 0;
  std::uint64_t time = 0;  ///< ns
  std::uint32_t id = 0;    ///< the asker's, to be answered with
  std::uint32_t alignment = 0;
  std::uint8_t access = 0;
};
namespace lease_request_at {
inline constexpr std::size_t bytes = 0, time = 8, id = 16, alignment = 20, access = 24, zero = 25;
}

/// Memory to be used until its time is over, or why there is none.
struct LeaseGrant {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  std::uint64_t time = 0;   ///< ns
  std::uint32_t id = 0;     ///< the asker's; of a push, 0
  std::uint32_t lease = 0;  ///< the owner's, to be called by
  std::uint32_t rkey = 0;
  std::uint8_t access = 0;
  LeaseVerdict verdict = LeaseVerdict::granted;
  bool invalidate = false;  ///< who returns it is to invalidate the key
};
namespace lease_grant_at {
inline constexpr std::size_t address = 0, bytes = 8, time = 16, id = 24, lease = 28, rkey = 32,
                             access = 36, verdict = 37, flags = 38, zero = 39;
}
inline constexpr std::uint8_t kGrantInvalidate = 1;

enum class LeaseAction : std::uint8_t {
  took = 0,       ///< the holder has what was pushed, or refuses it
  release = 1,    ///< the holder is done; no reply
  give_back = 2,  ///< the holder is done, and the owner's application shall have it; a reply
  renew = 3,      ///< the holder wants it for longer; a reply
  recall = 4,     ///< the owner wants it back: the holder releases it at once
};

/// Something about one lease; what the holder calls it is the owner's number.
struct LeaseCall {
  std::uint64_t time = 0;   ///< ns, of renew
  std::uint32_t lease = 0;  ///< the owner's number
  std::uint32_t id = 0;     ///< the caller's, to be replied with
  LeaseAction action = LeaseAction::took;
  LeaseVerdict verdict = LeaseVerdict::granted;  ///< of took
};
namespace lease_call_at {
inline constexpr std::size_t time = 0, lease = 8, id = 12, action = 16, verdict = 17, zero = 18,
                             zeroes = 20;
}

struct LeaseReply {
  std::uint64_t time = 0;  ///< ns, of renew
  std::uint32_t id = 0;
  LeaseVerdict verdict = LeaseVerdict::granted;
};
namespace lease_reply_at {
inline constexpr std::size_t time = 0, id = 8, verdict = 12, zero = 13, zeroes = 14;
}

constexpr std::array<std::byte, kLeaseRequestBytes> encode(const LeaseRequest& r) noexcept {
  std::array<std::byte, kLeaseRequestBytes> bytes{};
  Writer w(bytes);
  w.put<std::uint64_t>(lease_request_at::bytes, r.bytes);
  w.put<std::uint64_t>(lease_request_at::time, r.time);
  w.put<std::uint32_t>(lease_request_at::id, r.id);
  w.put<std::uint32_t>(lease_request_at::alignment, r.alignment);
  w.put<std::uint8_t>(lease_request_at::access, r.access);
  return bytes;
}

/// False if it is malformed. What is merely more than is granted is not: that gets an answer.
constexpr bool decode(std::span<const std::byte> bytes, LeaseRequest& r) noexcept {
  Reader in(bytes);
  r.bytes = in.get<std::uint64_t>(lease_request_at::bytes);
  r.time = in.get<std::uint64_t>(lease_request_at::time);
  r.id = in.get<std::uint32_t>(lease_request_at::id);
  r.alignment = in.get<std::uint32_t>(lease_request_at::alignment);
  r.access = in.get<std::uint8_t>(lease_request_at::access);
  std::uint32_t rest = 0;
  for (std::size_t at = lease_request_at::zero; at < kLeaseRequestBytes; ++at)
    rest |= in.get<std::uint8_t>(at);
  return in.ok() && bytes.size() == kLeaseRequestBytes && r.bytes != 0 && rest == 0;
}

constexpr std::array<std::byte, kLeaseGrantBytes> encode(const LeaseGrant& g) noexcept {
  std::array<std::byte, kLeaseGrantBytes> bytes{};
  Writer w(bytes);
  w.put<std::uint64_t>(lease_grant_at::address, g.address);
  w.put<std::uint64_t>(lease_grant_at::bytes, g.bytes);
  w.put<std::uint64_t>(lease_grant_at::time, g.time);
  w.put<std::uint32_t>(lease_grant_at::id, g.id);
  w.put<std::uint32_t>(lease_grant_at::lease, g.lease);
  w.put<std::uint32_t>(lease_grant_at::rkey, g.rkey);
  w.put<std::uint8_t>(lease_grant_at::access, g.access);
  w.put<std::uint8_t>(lease_grant_at::verdict, static_cast<std::uint8_t>(g.verdict));
  w.put<std::uint8_t>(lease_grant_at::flags, g.invalidate ? kGrantInvalidate : std::uint8_t{0});
  return bytes;
}

/// False if it is malformed: granted without bytes, key, rights or time, beyond the end of memory,
/// with unknown flags or an unknown verdict.
constexpr bool decode(std::span<const std::byte> bytes, LeaseGrant& g) noexcept {
  Reader in(bytes);
  g.address = in.get<std::uint64_t>(lease_grant_at::address);
  g.bytes = in.get<std::uint64_t>(lease_grant_at::bytes);
  g.time = in.get<std::uint64_t>(lease_grant_at::time);
  g.id = in.get<std::uint32_t>(lease_grant_at::id);
  g.lease = in.get<std::uint32_t>(lease_grant_at::lease);
  g.rkey = in.get<std::uint32_t>(lease_grant_at::rkey);
  g.access = in.get<std::uint8_t>(lease_grant_at::access);
  const auto verdict = in.get<std::uint8_t>(lease_grant_at::verdict);
  const auto flags = in.get<std::uint8_t>(lease_grant_at::flags);
  g.verdict = static_cast<LeaseVerdict>(verdict);
  g.invalidate = (flags & kGrantInvalidate) != 0;
  if (!in.ok() || bytes.size() != kLeaseGrantBytes || !is_verdict(verdict) ||
      (flags & ~kGrantInvalidate) != 0 || in.get<std::uint8_t>(lease_grant_at::zero) != 0)
    return false;
  return g.verdict != LeaseVerdict::granted ||
         (g.bytes != 0 && g.address + g.bytes > g.address && g.rkey != 0 && g.time != 0 &&
          g.time <= kLongestLease && is_remote_access(g.access));
}

constexpr std::array<std::byte, kLeaseCallBytes> encode(const LeaseCall& c) noexcept {
  std::array<std::byte, kLeaseCallBytes> bytes{};
  Writer w(bytes);
  w.put<std::uint64_t>(lease_call_at::time, c.time);
  w.put<std::uint32_t>(lease_call_at::lease, c.lease);
  w.put<std::uint32_t>(lease_call_at::id, c.id);
  w.put<std::uint8_t>(lease_call_at::action, static_cast<std::uint8_t>(c.action));
  w.put<std::uint8_t>(lease_call_at::verdict, static_cast<std::uint8_t>(c.verdict));
  return bytes;
}

/// False if it is malformed: of no known action or verdict.
constexpr bool decode(std::span<const std::byte> bytes, LeaseCall& c) noexcept {
  Reader in(bytes);
  c.time = in.get<std::uint64_t>(lease_call_at::time);
  c.lease = in.get<std::uint32_t>(lease_call_at::lease);
  c.id = in.get<std::uint32_t>(lease_call_at::id);
  const auto action = in.get<std::uint8_t>(lease_call_at::action);
  const auto verdict = in.get<std::uint8_t>(lease_call_at::verdict);
  c.action = static_cast<LeaseAction>(action);
  c.verdict = static_cast<LeaseVerdict>(verdict);
  return in.ok() && bytes.size() == kLeaseCallBytes &&
         action <= static_cast<std::uint8_t>(LeaseAction::recall) && is_verdict(verdict) &&
         in.get<std::uint16_t>(lease_call_at::zero) == 0 &&
         in.get<std::uint32_t>(lease_call_at::zeroes) == 0;
}

constexpr std::array<std::byte, kLeaseReplyBytes> encode(const LeaseReply& r) noexcept {
  std::array<std::byte, kLeaseReplyBytes> bytes{};
  Writer w(bytes);
  w.put<std::uint64_t>(lease_reply_at::time, r.time);
  w.put<std::uint32_t>(lease_reply_at::id, r.id);
  w.put<std::uint8_t>(lease_reply_at::verdict, static_cast<std::uint8_t>(r.verdict));
  return bytes;
}

/// False if it is malformed: of no known verdict.
constexpr bool decode(std::span<const std::byte> bytes, LeaseReply& r) noexcept {
  Reader in(bytes);
  r.time = in.get<std::uint64_t>(lease_reply_at::time);
  r.id = in.get<std::uint32_t>(lease_reply_at::id);
  const auto verdict = in.get<std::uint8_t>(lease_reply_at::verdict);
  r.verdict = static_cast<LeaseVerdict>(verdict);
  return in.ok() && bytes.size() == kLeaseReplyBytes && is_verdict(verdict) &&
         r.time <= kLongestLease && in.get<std::uint8_t>(lease_reply_at::zero) == 0 &&
         in.get<std::uint16_t>(lease_reply_at::zeroes) == 0;
}

}  // namespace spinwire::wire
