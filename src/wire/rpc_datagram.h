// The header of every RPC datagram: sixteen bytes, little-endian, adjacent to the payload. Hot.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/random.h"
#include "spinwire/status.h"

namespace spinwire::wire {

static_assert(std::endian::native == std::endian::little, "the header is copied as it lies");

enum class RpcKind : std::uint8_t {
  request = 1,  ///< from the client; the payload is the application's
  reply = 2,    ///< from the server; unless the status is ok, the payload is a text; see kHasCode
  ping = 3,     ///< from the client: it is alive, and calls with lower numbers are over
  pong = 4,     ///< answers a ping
  close = 5,    ///< from the client: the session is over
  /// Answers a close, or from the server: the session is over. Its number says why; see
  /// wire/goodbye.h.
  closed = 6,
  unknown = 7,  ///< from the server: it has forgotten the session `number`
  /// From the server, before it opens a session: the payload is a token that the client returns in
  /// a path_response frame. Its proof is of the client's token; those above are of the server's.
  path_challenge = 8,
  /// From the server: it takes no new calls, for the reason in the number. The client closes the
  /// session when its calls are over. Repeated until then.
  goodbye = 9,
};
inline constexpr std::size_t kPathTokenBytes = 8;

/// In the number of a ping for more than one slot: the number says nothing about calls.
inline constexpr std::uint32_t kNoCallsOver = 1;

/// The name of a session at one end: index and generation of that end's record.
struct RpcName {
  static constexpr unsigned kIndexBits = 20;
  static constexpr std::uint32_t kIndexMask = (1u << kIndexBits) - 1;
  static constexpr std::uint32_t make(std::uint32_t index, std::uint32_t generation) noexcept {
    return index | generation << kIndexBits;
  }
  static constexpr std::uint32_t index(std::uint32_t name) noexcept { return name & kIndexMask; }
};

/// Datagrams about a session itself carry a proof of its token, which their sender got over TCP:
/// nobody else can end a session, or say which calls are over. 32 bits of a mix, so that half of
/// the token stays unknown to a network that shows the proof.
constexpr std::uint32_t session_proof(std::uint64_t token) noexcept {
  return static_cast<std::uint32_t>(base::Random::mix(token) >> 32);
}

struct RpcHeader {
  std::uint32_t session;  ///< the receiver's name of the session
  std::uint32_t number;   ///< the call's number; its low bits are its slot
  /// Request: the method. Reply: the time for which the server had the request, in units of 1024
  /// ns; the two highest values mean "that long or longer" and "unknown". Others: the lower half of
  /// the proof.
  std::uint16_t method;
  RpcKind kind;
  std::uint8_t status;   ///< for a reply: a Status, and kHasCode
  std::uint16_t length;  ///< bytes of the payload
  /// Reply: calls that the session may have in flight. Request: 0. Others: the upper half of the
  /// proof.
  std::uint16_t window;
};
inline constexpr std::size_t kRpcHeaderBytes = 16;
static_assert(sizeof(RpcHeader) == kRpcHeaderBytes);
/// Bit of a reply's status byte: the handler has refused the call with a code. In a datagram, the
/// code is the first kRefusalCodeBytes of the payload. Only for clients that offer
/// feature::refusal_codes.
inline constexpr std::uint8_t kHasCode = 0x80;
inline constexpr std::size_t kRefusalCodeBytes = sizeof(std::uint32_t);
/// The status in a reply's status byte.
constexpr Status status_in(std::uint8_t byte) noexcept {
  return static_cast<Status>(byte & ~kHasCode);
}
constexpr bool has_code(std::uint8_t byte) noexcept { return (byte & kHasCode) != 0; }
/// Whether a reply may have this status byte.
constexpr bool is_reply_status(std::uint8_t byte) noexcept {
  return has_code(byte) ? status_in(byte) == Status::refused : byte < kStatusCount;
}
/// For how long the server had the request of this reply; see RpcHeader::method.
constexpr std::uint16_t server_time_of(const RpcHeader& reply) noexcept { return reply.method; }

/// The header of a datagram about a session itself.
constexpr RpcHeader session_header(std::uint32_t session, std::uint32_t number, RpcKind kind,
                                   std::uint32_t proof) noexcept {
  return {session,
          number,
          static_cast<std::uint16_t>(proof),
          kind,
          0,
          kind == RpcKind::path_challenge ? std::uint16_t{kPathTokenBytes} : std::uint16_t{0},
          static_cast<std::uint16_t>(proof >> 16)};
}
/// The proof in such a header.
constexpr std::uint32_t proof_of(const RpcHeader& header) noexcept {
  return header.method | std::uint32_t{header.window} << 16;
}

/// The header in wire format, in two words, so that registers can hold it.
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

/// Whether a valid header is that of a request before `bytes` bytes. Accepts what decode() accepts,
/// in one compare. `bytes` may be any number, even a negative difference.
constexpr bool is_request(const RpcWords& w, std::uint64_t bytes) noexcept {
  return w.high >> 16 == (std::uint64_t{static_cast<std::uint8_t>(RpcKind::request)} | bytes << 16);
}
/// Whether a header is that of a reply with status ok before `bytes` bytes. The caller checks the
/// window, which may be 0.
constexpr bool is_good_reply(const RpcWords& w, std::uint64_t bytes) noexcept {
  constexpr std::uint64_t kKind = static_cast<std::uint8_t>(RpcKind::reply);
  return static_cast<std::uint32_t>(w.high >> 16) == (kKind | bytes << 16);  // of all its bits
}

/// Checks a datagram of `received` bytes at `at`. Returns false if it is malformed. The receiver
/// checks the names in the datagram.
inline bool decode(const std::byte* at, std::size_t received, RpcHeader& header) noexcept {
  if (received < kRpcHeaderBytes) [[unlikely]]
    return false;
  RpcWords words{};
  std::memcpy(&words, at, sizeof words);
  header = unpack(words);
  if (header.length != received - kRpcHeaderBytes) [[unlikely]]
    return false;
  if (header.kind == RpcKind::request) return header.status == 0 && header.window == 0;
  if (header.kind == RpcKind::reply) {
    return header.window != 0 && is_reply_status(header.status) &&
           (!has_code(header.status) || header.length >= kRefusalCodeBytes);
  }
  const bool known = header.kind >= RpcKind::ping && header.kind <= RpcKind::goodbye;
  const std::size_t length = header.kind == RpcKind::path_challenge ? kPathTokenBytes : 0;
  return known && header.length == length && header.status == 0;
}

}  // namespace spinwire::wire
