// The frames that two engines exchange over TCP to connect a pair of queue pairs. Each frame is a
// 16-byte header and a body; every integer is little-endian, at the offset written below, with no
// padding. Every struct has one decoder here, which checks each field, and nothing is read from a
// peer in any other way.
//
// Versions: the header's layout never changes. The body of a frame begins with the layout of the
// oldest version its header offers, and later versions only append: bytes after the known ones are
// skipped when the peer offers a newer version than we know, and are an error else.
//
// Set-up code; only the error paths allocate.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <variant>

#include "spinwire/endpoint.h"
#include "spinwire/status.h"

namespace spinwire::wire {

/// Versions that one end speaks, both included.
struct VersionRange {
  std::uint16_t min = 0;
  std::uint16_t max = 0;
  friend bool operator==(const VersionRange&, const VersionRange&) noexcept = default;
};
inline constexpr VersionRange kVersions{1, 1};  ///< what this library speaks

inline constexpr std::array<std::uint8_t, 4> kMagic{'S', 'P', 'N', 'W'};
inline constexpr std::size_t kHeaderBytes = 16;
inline constexpr std::size_t kFrameBytesMax = 512;  ///< header and body, in either direction
inline constexpr std::size_t kEndpointBytes = 70;
inline constexpr std::size_t kReadyBytes = 8;
inline constexpr std::size_t kPathResponseBytes = 8;
inline constexpr std::size_t kSessionBytes = 56;
inline constexpr std::size_t kJoinBytes = kEndpointBytes + 12;
inline constexpr std::size_t kRefuseTextMax = 200;

/// Where each field begins.
namespace header_at {
inline constexpr std::size_t magic = 0, version_min = 4, version_max = 6, kind = 8,
                             body_length = 10, features = 12;
}
namespace endpoint_at {
inline constexpr std::size_t gid = 0, qp_num = 16, psn = 20, max_message = 24, credits = 28,
                             incarnation = 32, control_address = 40, control_rkey = 48, lid = 52,
                             mtu = 54, gid_type = 56, max_rd_atomic = 57, eager_bytes = 58,
                             control_token = 62, peer_timeout_ms = 66;
}
namespace refuse_at {
inline constexpr std::size_t status = 0, text = 1;
}
namespace ready_at {
inline constexpr std::size_t incarnation = 0;
}
namespace path_response_at {
inline constexpr std::size_t token = 0;
}
namespace session_at {
inline constexpr std::size_t gid = 0, qp_num = 16, qkey = 20, name = 24, window = 28, mtu = 30,
                             lid = 32, gid_type = 34, reserved = 35, incarnation = 36, first = 44,
                             token = 48;
}
namespace join_at {
inline constexpr std::size_t endpoint = 0, session = kEndpointBytes, token = kEndpointBytes + 4;
}

/// Bits of a header's features.
namespace feature {
inline constexpr std::uint32_t raw = 1;  ///< the endpoint is a raw connection's
}

enum class FrameKind : std::uint16_t {
  hello = 1,
  accept = 2,
  refuse = 3,
  ready = 4,           ///< instead of a hello: asks for the engine that it names, see Ready
  open_session = 5,    ///< instead of a hello: a session for remote calls
  session_opened = 6,  ///< the answer, which the client confirms by `ready`; then the stream ends
  join_session = 7,    ///< instead of a hello: the connection is for a session's calls
  path_response = 8,   ///< after open_session, once its path_challenge has come as a datagram
};
std::string_view to_string(FrameKind kind) noexcept;

struct FrameHeader {
  VersionRange versions;      ///< what the sender speaks
  std::uint16_t version = 0;  ///< agreed: the highest that both ends speak; not on the wire
  FrameKind kind = FrameKind::hello;
  std::uint16_t body_length = 0;  ///< bytes
  std::uint32_t features = 0;     ///< bits offered; in force are those that both ends offer
};

struct Hello {
  Endpoint endpoint;
};
struct Accept {
  Endpoint endpoint;
};
struct Refuse {
  Status status = Status::refused;  ///< never ok
  std::uint8_t length = 0;          ///< of the text
  std::array<char, kRefuseTextMax> text{};
  /// Printable ASCII only, whatever the peer sent.
  [[nodiscard]] std::string_view message() const noexcept { return {text.data(), length}; }
};
/// To an engine that has none of ours in hand, the same is a question: it answers alike if it is
/// the one, else by a refusal with peer_lost.
struct Ready {
  std::uint64_t incarnation = 0;  ///< of the engine that receives this; not 0
};

/// One end of a session for remote calls: where its datagrams go, and what it is called there.
struct SessionEnd {
  std::array<std::uint8_t, 16> gid{};  ///< means nothing without datagrams
  GidType gid_type = GidType::unknown;
  std::uint16_t lid = 0;
  std::uint32_t qp_num = 0;  ///< 0: no datagrams, so that all calls need a connection
  std::uint32_t qkey = 0;
  std::uint32_t name = 0;    ///< not 0
  std::uint16_t window = 0;  ///< calls at once: a power of two up to kSessionWindowMax
  std::uint16_t mtu = 0;     ///< longest datagram, bytes; without such, what bounds short calls
  std::uint64_t incarnation = 0;  ///< of the engine; not 0
  /// Calls are numbered from here on, a multiple of kSessionWindowMax: as the client says, and the
  /// server after it.
  std::uint32_t first = 0;
  /// Of the server's end: what a connection for the session's calls shows that it is the client's.
  /// Random and not 0. 0 of the client's end.
  std::uint64_t token = 0;
};
inline constexpr std::uint16_t kSessionWindowMax = 64;
struct OpenSession {
  SessionEnd end;
};
struct SessionOpened {
  SessionEnd end;
};

/// A hello, and what only who opened the session knows of it.
struct JoinSession {
  Endpoint endpoint;
  std::uint32_t session = 0;  ///< as the server calls it; not 0
  std::uint64_t token = 0;    ///< of the server's end; not 0
};

/// Shows that the client gets what is sent to the address that its open_session names, before the
/// server tells anything of itself: path validation as QUIC has it (RFC 9000, section 8.2).
struct PathResponse {
  std::uint64_t token = 0;  ///< of the path_challenge; not 0
};

struct Received {
  FrameHeader header;
  std::variant<Hello, Accept, Refuse, Ready, OpenSession, SessionOpened, JoinSession, PathResponse>
      body;
};

/// A set of frame kinds.
struct KindSet {
  std::uint16_t bits = 0;
  [[nodiscard]] constexpr bool has(FrameKind kind) const noexcept {
    return (bits >> static_cast<unsigned>(kind) & 1u) != 0;
  }
  [[nodiscard]] constexpr bool empty() const noexcept { return bits == 0; }
};
template <typename... Kinds>
constexpr KindSet kinds(Kinds... each) noexcept {
  return {static_cast<std::uint16_t>((0u | ... | (1u << static_cast<unsigned>(each))))};
}

/// What one end says of itself in each header.
struct Speaker {
  VersionRange versions = kVersions;
  std::uint32_t features = 0;
};

/// An encoded frame, ready to be sent. Holds the longest that this library makes.
struct Frame {
  std::array<std::byte, kHeaderBytes + refuse_at::text + kRefuseTextMax> storage{};
  std::size_t size = 0;
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {storage.data(), size}; }
};

/// The encoders write what they are given; an endpoint of our own is to pass check() first.
Frame encode(const Hello& hello, const Speaker& speaker = {}) noexcept;
Frame encode(const Accept& accept, const Speaker& speaker = {}) noexcept;
Frame encode(const Refuse& refuse, const Speaker& speaker = {}) noexcept;
Frame encode(const Ready& ready, const Speaker& speaker = {}) noexcept;
Frame encode(const OpenSession& open, const Speaker& speaker = {}) noexcept;
Frame encode(const SessionOpened& opened, const Speaker& speaker = {}) noexcept;
Frame encode(const JoinSession& join, const Speaker& speaker = {}) noexcept;
Frame encode(const PathResponse& response, const Speaker& speaker = {}) noexcept;

/// A refusal with as much of `text` as fits, unprintable bytes replaced; `ok` becomes `refused`.
Refuse make_refuse(Status status, std::string_view text) noexcept;

/// Tells as early as the first byte that a stream is not ours. `seen` is what arrived so far, any
/// length; only its first bytes are looked at. Errors: protocol, naming what was seen instead.
Result<void> check_magic(std::span<const std::byte> seen);

/// The highest version that both speak. Errors: protocol (no range), unsupported naming both
/// ranges.
Result<std::uint16_t> agree(VersionRange theirs, VersionRange ours);

/// Checks the first kHeaderBytes of a frame; later bytes are ignored. Errors: protocol naming the
/// field, its value and the limit; unsupported when no version is spoken by both, naming both
/// ranges.
Result<FrameHeader> decode_header(std::span<const std::byte> bytes, VersionRange ours = kVersions);

/// Checks the body that `header` announced; `body` has exactly header.body_length bytes. Errors:
/// protocol, as above.
Result<Received> decode_body(const FrameHeader& header, std::span<const std::byte> body,
                             VersionRange ours = kVersions);

/// Decoders of single bodies, of exactly the size of this version.
/// `raw`: what the header's features say.
Result<Endpoint> decode_endpoint(std::span<const std::byte> body, bool raw = false);
Result<Ready> decode_ready(std::span<const std::byte> body);
Result<SessionEnd> decode_session(std::span<const std::byte> body, bool of_server);
Result<JoinSession> decode_join(std::span<const std::byte> body);
Result<PathResponse> decode_path_response(std::span<const std::byte> body);
/// From a peer of a newer version, a status that we do not know counts as `refused`.
Result<Refuse> decode_refuse(std::span<const std::byte> body, bool newer_peer = false);

/// Checks an endpoint, ours or the peer's, however it was obtained. Errors: protocol naming the
/// field, its value and the limit.
Result<void> check(const Endpoint& endpoint);

}  // namespace spinwire::wire
