// The header of every RPC datagram: sixteen bytes, little-endian, adjacent to the payload. Hot.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "spinwire/status.h"

namespace spinwire::wire {

static_assert(std::endian::native == std::endian::little, "the header is copied as it lies");

enum class RpcKind : std::uint8_t {
  request = 1,  ///< of the client; the payload is the application's
  reply = 2,    ///< of the server; with a status other than ok its payload is a text
  ping = 3,     ///< of the client: it is there, and all calls with lower numbers are over for it
  pong = 4,     ///< the answer
  close = 5,    ///< of the client: the session is over
  closed = 6,   ///< the answer, or of the server: the session is over
  unknown = 7,  ///< of the server: it has forgotten the session that `number` names there
  /// Of the server, before it opens a session: the payload is a number that the client shows in a
  /// path_response frame.
  path_challenge = 8,
};
inline constexpr std::size_t kPathTokenBytes = 8;

/// In the number of a ping, of a session with more than one slot: it says nothing of calls.
inline constexpr std::uint32_t kNoCallsOver = 1;

/// What a session is called by the end that made the record: index and generation of it.
struct RpcName {
  static constexpr unsigned kIndexBits = 20;
  static constexpr std::uint32_t kIndexMask = (1u << kIndexBits) - 1;
  static constexpr std::uint32_t make(std::uint32_t index, std::uint32_t generation) noexcept {
    return index | generation << kIndexBits;
  }
  static constexpr std::uint32_t index(std::uint32_t name) noexcept { return name & kIndexMask; }
};

struct RpcHeader {
  std::uint32_t session;  ///< as the receiver calls it
  std::uint32_t number;   ///< of the call; its low bits are its slot
  /// Of a request. Of a reply: for how long the server had it, in units of 1024 ns; the highest:
  /// that long, or unknown.
  std::uint16_t method;
  RpcKind kind;
  std::uint8_t status;   ///< of a reply: a Status
  std::uint16_t length;  ///< of the payload, bytes
  std::uint16_t window;  ///< of a reply: calls that the session may have under way
};
inline constexpr std::size_t kRpcHeaderBytes = 16;
static_assert(sizeof(RpcHeader) == kRpcHeaderBytes);

/// The header as it goes over the wire, in two words: so it is made and read in registers.
struct RpcWords {
  std::uint64_t low;   ///< session:32 | number:32
  std::uint64_t high;  ///< method:16 | kind:8 | status:8 | length:16 | window:16
};
[[gnu::always_inline]] constexpr RpcWords pack(const RpcHeader& h) noexcept {
  return {h.session | std::uint64_t{h.number} << 32,
          h.method | std::uint64_t{static_cast<std::uint8_t>(h.kind)} << 16 |
              std::uint64_t{h.status} << 24 | std::uint64_t{h.length} << 32 |
              std::uint64_t{h.window} << 48};
}
[[gnu::always_inline]] constexpr RpcHeader unpack(const RpcWords& w) noexcept {
  return {static_cast<std::uint32_t>(w.low),       static_cast<std::uint32_t>(w.low >> 32),
          static_cast<std::uint16_t>(w.high),      static_cast<RpcKind>(w.high >> 16 & 0xff),
          static_cast<std::uint8_t>(w.high >> 24), static_cast<std::uint16_t>(w.high >> 32),
          static_cast<std::uint16_t>(w.high >> 48)};
}

/// Longest payload of a datagram whose MTU is `mtu`.
constexpr std::uint32_t rpc_payload(std::uint32_t mtu) noexcept {
  return mtu - static_cast<std::uint32_t>(kRpcHeaderBytes);
}

/// Whether a header is that of a request, or of a reply with status ok, before so many bytes, and
/// in order: what decode() would take, in one compare and two. Any number of bytes is allowed, also
/// the difference of two that is below 0.
constexpr bool is_request(const RpcWords& w, std::uint64_t bytes) noexcept {
  return w.high >> 16 == (std::uint64_t{static_cast<std::uint8_t>(RpcKind::request)} | bytes << 16);
}
/// The latter but for its window, which may be 0.
constexpr bool is_good_reply(const RpcWords& w, std::uint64_t bytes) noexcept {
  constexpr std::uint64_t kKind = static_cast<std::uint8_t>(RpcKind::reply);
  return static_cast<std::uint32_t>(w.high >> 16) == (kKind | bytes << 16);  // of all its bits
}

/// Checks a datagram of `received` bytes that begins at `at`; false if it is malformed. What the
/// names in it mean is for the receiver to check.
inline bool decode(const std::byte* at, std::size_t received, RpcHeader& header) noexcept {
  if (received < kRpcHeaderBytes) [[unlikely]]
    return false;
  RpcWords words{};
  std::memcpy(&words, at, sizeof words);
  header = unpack(words);
  if (header.length != received - kRpcHeaderBytes) [[unlikely]]
    return false;
  if (header.kind == RpcKind::request) return header.status == 0 && header.window == 0;
  if (header.kind == RpcKind::reply) return header.window != 0 && header.status < kStatusCount;
  const bool known = header.kind >= RpcKind::ping && header.kind <= RpcKind::path_challenge;
  const std::size_t length = header.kind == RpcKind::path_challenge ? kPathTokenBytes : 0;
  return known && header.length == length && header.status == 0 && header.window == 0;
}

}  // namespace spinwire::wire
