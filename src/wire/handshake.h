// The frames that two engines exchange over TCP to connect two queue pairs or to open a session.
// Each frame is a 16-byte header and a body. Every integer is little-endian; frame_kinds.h lists
// the fields of each body in order. Each struct has one decoder here, which checks every field; no
// other code reads a peer's frames.
//
// Versions: the header's layout never changes. A frame's body begins with the layout of the oldest
// version that its header offers, and later versions only append. Bytes after the known ones are
// skipped if the peer offers a newer version than we know. Otherwise they are an error.
//
// Ends that have a key begin with `authenticate` and `authenticated`. Each further frame then
// travels whole, encrypted, as the body of a `sealed` frame. control/secure_channel.h has the
// rules.
//
// Features: a header's features that describe the frame itself change its body. `private_data`
// appends a length of two bytes and as many bytes, `refusal_code` puts four bytes behind the
// status. An end sends them in an answer only to a peer that has offered `application_fields`.
//
// Set-up code; only the error paths allocate.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <variant>

#include "spinwire/endpoint.h"
#include "spinwire/goodbye.h"
#include "spinwire/identity.h"
#include "spinwire/status.h"

namespace spinwire::wire {

/// Versions that one end supports, both limits included.
struct VersionRange {
  std::uint16_t min = 0;
  std::uint16_t max = 0;
  friend bool operator==(const VersionRange&, const VersionRange&) noexcept = default;
};
inline constexpr VersionRange kVersions{1, 1};  ///< the versions of this library

inline constexpr std::array<std::uint8_t, 4> kMagic{'S', 'P', 'N', 'W'};
inline constexpr std::size_t kHeaderBytes = 16;
inline constexpr std::size_t kFrameBytesMax = 512;  ///< header and body, in either direction
inline constexpr std::size_t kEndpointBytes = 70;
inline constexpr std::size_t kReadyBytes = 8;
inline constexpr std::size_t kPathResponseBytes = 8;
inline constexpr std::size_t kSessionBytes = 56;
inline constexpr std::size_t kJoinBytes = kEndpointBytes + 12;
inline constexpr std::size_t kRefuseTextMax = kRefusalTextMax;
inline constexpr std::size_t kRefuseCodeBytes = 4;
/// Private data and its length, at the end of a body.
inline constexpr std::size_t kPrivateDataBytesMin = 2 + 1;
inline constexpr std::size_t kPrivateDataBytesMax = 2 + kPrivateDataMax;
inline constexpr std::size_t kGoodbyeBytes = 4;
inline constexpr std::size_t kKeyIdBytes = 16;
inline constexpr std::size_t kSealTagBytes = 16;
inline constexpr std::size_t kAuthenticateBytes = kKeyIdBytes + 48;
inline constexpr std::size_t kAuthenticatedBytes = 48 + kHeaderBytes;
/// The body of a sealed frame: a frame and a tag.
inline constexpr std::size_t kSealedBytesMin = kHeaderBytes + kSealTagBytes;
inline constexpr std::size_t kSealedBytesMax = kFrameBytesMax + kSealTagBytes;

/// Bits of a header's features.
namespace feature {
inline constexpr std::uint32_t raw = 1;  ///< the endpoint of a raw connection
// An end of a session takes direct datagrams of up to so many bytes.
inline constexpr std::uint32_t page_datagrams = 2;   ///< kPageDatagramBytes
inline constexpr std::uint32_t long_datagrams = 4;   ///< kLongDatagramBytes; needs page_datagrams
inline constexpr std::uint32_t block_datagrams = 8;  ///< kBlockDatagramBytes; needs long_datagrams
/// The body of a hello, accept, open_session or session_opened ends with private data.
inline constexpr std::uint32_t private_data = 16;
/// The body of a refusal has an application's code.
inline constexpr std::uint32_t refusal_code = 32;
/// The sender takes both in an answer, and as a connection the tags of leases.
inline constexpr std::uint32_t application_fields = 64;
/// This end understands a goodbye with a reason. In a refusal: the body has a goodbye.
inline constexpr std::uint32_t goodbye = 128;
/// This end of a session takes the codes of refused calls; see kHasCode.
inline constexpr std::uint32_t refusal_codes = 256;
/// Through rdma_cm, this end takes private data of the application; see cm_proof.h.
inline constexpr std::uint32_t cm_private_data = 512;
}  // namespace feature

enum class FrameKind : std::uint16_t {
  hello = 1,
  accept = 2,
  refuse = 3,
  ready = 4,           ///< confirms an accept; instead of a hello: a probe, see Ready
  open_session = 5,    ///< instead of a hello: a session for remote calls
  session_opened = 6,  ///< the answer; the client confirms it by `ready`, then the stream ends
  join_session = 7,    ///< instead of a hello: a connection for a session's calls
  path_response = 8,   ///< after open_session: answers the path_challenge datagram
  authenticate = 9,    ///< before any other frame: proves a key
  authenticated = 10,  ///< the answer, which proves the same key
  sealed = 11,         ///< after both: any frame above, encrypted
};
inline constexpr FrameKind kLastFrameKind = FrameKind::sealed;
std::string_view to_string(FrameKind kind) noexcept;

struct FrameHeader {
  VersionRange versions;      ///< supported by the sender
  std::uint16_t version = 0;  ///< agreed: the highest common version; not on the wire
  FrameKind kind = FrameKind::hello;
  std::uint16_t body_length = 0;  ///< bytes
  std::uint32_t features = 0;     ///< bits offered; those that both ends offer are in effect
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
  std::optional<std::uint32_t> code{};  ///< an application has refused, with this code
  /// When the peer may come back; travels only if it invites the peer back, and only to a peer with
  /// feature::goodbye.
  Goodbye goodbye{};
  /// Printable ASCII only, whatever the peer sent.
  [[nodiscard]] std::string_view message() const noexcept { return {text.data(), length}; }
};
/// Confirms a connection. As the first frame, it is a probe: the engine of this incarnation answers
/// with its own Ready, any other engine with a refusal: in_use if that engine's listener may lie at
/// the same socket, else peer_lost.
struct Ready {
  std::uint64_t incarnation = 0;  ///< of the engine that receives the frame; not 0
};

/// One end of a session: the address of its datagrams, and its name of the session.
struct SessionEnd {
  std::array<std::uint8_t, 16> gid{};  ///< undefined without datagrams
  GidType gid_type = GidType::unknown;
  std::uint16_t lid = 0;
  std::uint32_t qp_num = 0;  ///< 0: no datagrams; all calls need a connection
  std::uint32_t qkey = 0;
  std::uint32_t name = 0;    ///< not 0
  std::uint16_t window = 0;  ///< calls at once: a power of two up to kSessionWindowMax
  std::uint16_t mtu = 0;     ///< longest datagram, bytes; without datagrams, limits inline calls
  std::uint64_t incarnation = 0;  ///< of this end's engine; not 0
  /// The first call number, a multiple of kSessionWindowMax. The client chooses it, and the server
  /// repeats it.
  std::uint32_t first = 0;
  /// Random, not 0. Datagrams about the session carry a proof of it; see session_proof(). The
  /// server's must also be presented by a connection for the session's calls.
  std::uint64_t token = 0;
  /// The longest direct datagram that this end takes: 0, or one of the three lengths below.
  /// A feature: what an end does not know, it does not use.
  std::uint32_t direct_datagrams = 0;
  bool application_fields = false;  ///< a feature
  PrivateData private_data{};       ///< of this end's application
  bool goodbyes = false;            ///< feature::goodbye
  bool refusal_codes = false;       ///< a feature
};
inline constexpr std::uint16_t kSessionWindowMax = 64;
/// Payloads of 4, 16 and 32 KiB, and their headers.
inline constexpr std::uint32_t kPageDatagramBytes = (4 << 10) + 16;
inline constexpr std::uint32_t kLongDatagramBytes = (16 << 10) + 16;
inline constexpr std::uint32_t kBlockDatagramBytes = (32 << 10) + 16;
struct OpenSession {
  SessionEnd end;
};
struct SessionOpened {
  SessionEnd end;
};

/// A hello for a session's calls, with the secret of the session.
struct JoinSession {
  Endpoint endpoint;
  std::uint32_t session = 0;  ///< the server's name of the session; not 0
  std::uint64_t token = 0;    ///< SessionEnd::token of the server's end; not 0
};

/// Proves that the client receives datagrams at the address in its open_session, before the server
/// reveals anything about itself. This is QUIC's path validation (RFC 9000, section 8.2).
struct PathResponse {
  std::uint64_t token = 0;  ///< from the path_challenge; not 0
};

/// The first message of the Noise handshake, and which key it is made with.
struct Authenticate {
  std::array<std::uint8_t, kKeyIdBytes> key{};
  std::array<std::uint8_t, 48> message{};
};
/// The second message of the Noise handshake. Its payload is the header of this frame.
struct Authenticated {
  std::array<std::uint8_t, kAuthenticatedBytes> message{};
};
/// The control port decrypts the body, which is a frame.
struct Sealed {};

struct Received {
  FrameHeader header;
  std::variant<Hello, Accept, Refuse, Ready, OpenSession, SessionOpened, JoinSession, PathResponse,
               Authenticate, Authenticated, Sealed>
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

/// The versions and features in each header of one end.
struct Capabilities {
  VersionRange versions = kVersions;
  std::uint32_t features = 0;
};

/// An encoded frame, ready to be sent. Holds the longest frame that this library makes.
struct Frame {
  std::array<std::byte, kHeaderBytes + kEndpointBytes + kPrivateDataBytesMax> storage{};
  std::size_t size = 0;
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {storage.data(), size}; }
};

/// A sealed frame, ready to be sent.
struct SealedFrame {
  std::array<std::byte, kHeaderBytes + sizeof(Frame::storage) + kSealTagBytes> storage{};
  std::size_t size = 0;
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {storage.data(), size}; }
  /// Where the encrypted frame belongs.
  [[nodiscard]] std::byte* body() noexcept { return storage.data() + kHeaderBytes; }
};

/// The encoders do not check; our own endpoint must have passed check().
Frame encode(const Hello& hello, const Capabilities& capabilities = {}) noexcept;
Frame encode(const Accept& accept, const Capabilities& capabilities = {}) noexcept;
Frame encode(const Refuse& refuse, const Capabilities& capabilities = {}) noexcept;
Frame encode(const Ready& ready, const Capabilities& capabilities = {}) noexcept;
Frame encode(const OpenSession& open, const Capabilities& capabilities = {}) noexcept;
Frame encode(const SessionOpened& opened, const Capabilities& capabilities = {}) noexcept;
Frame encode(const JoinSession& join, const Capabilities& capabilities = {}) noexcept;
Frame encode(const PathResponse& response, const Capabilities& capabilities = {}) noexcept;
Frame encode(const Authenticate& request, const Capabilities& capabilities = {}) noexcept;
Frame encode(const Authenticated& answer, const Capabilities& capabilities = {}) noexcept;
/// A sealed frame whose body is still to be filled in, for a frame of so many bytes.
SealedFrame begin_sealed(std::size_t frame_bytes, const Capabilities& capabilities = {}) noexcept;

/// Makes a refusal with as much of `text` as fits, unprintable bytes replaced; `ok` becomes
/// `refused`.
Refuse make_refuse(Status status, std::string_view text,
                   std::optional<std::uint32_t> code = {}) noexcept;
/// The refusal for an error. An application's has its text and its code, the latter unless the peer
/// does not take it.
Refuse make_refuse(const Error& why, bool takes_code) noexcept;

/// Detects, from the first byte on, that a stream is not ours. `seen` holds the bytes so far, of
/// any length; only the first bytes are checked. Errors: protocol (names what was seen instead).
Result<void> check_magic(std::span<const std::byte> seen);

/// The highest common version. Errors: protocol (no range), unsupported (names both ranges).
Result<std::uint16_t> agree(VersionRange theirs, VersionRange ours);

/// Checks the first kHeaderBytes of a frame; ignores later bytes. Errors: protocol (names the
/// field, its value and the limit); unsupported if there is no common version (names both ranges).
Result<FrameHeader> decode_header(std::span<const std::byte> bytes, VersionRange ours = kVersions);

/// Checks the body of a frame; `body` has exactly header.body_length bytes. Errors: protocol (names
/// the field, its value and the limit).
Result<Received> decode_body(const FrameHeader& header, std::span<const std::byte> body,
                             VersionRange ours = kVersions);

/// The features that fields of an endpoint stand for.
std::uint32_t features_of(const Endpoint& endpoint) noexcept;
void set_features(Endpoint& endpoint, std::uint32_t features) noexcept;

/// Decoders of single bodies, of exactly the size of this version. `features` are of the header.
Result<Endpoint> decode_endpoint(std::span<const std::byte> body, std::uint32_t features = 0);
Result<Ready> decode_ready(std::span<const std::byte> body);
Result<SessionEnd> decode_session(std::span<const std::byte> body, std::uint32_t features = 0);
Result<JoinSession> decode_join(std::span<const std::byte> body, std::uint32_t features = 0);
Result<PathResponse> decode_path_response(std::span<const std::byte> body);
Result<Authenticate> decode_authenticate(std::span<const std::byte> body);
Result<Authenticated> decode_authenticated(std::span<const std::byte> body);
/// A newer peer may send a status that we do not know, which counts as `refused`.
Result<Refuse> decode_refuse(std::span<const std::byte> body, bool newer_peer = false,
                             std::uint32_t features = 0);

/// Checks an endpoint, ours or the peer's, of any origin. Errors: protocol (names the field, its
/// value and the limit).
Result<void> check(const Endpoint& endpoint);

}  // namespace spinwire::wire
