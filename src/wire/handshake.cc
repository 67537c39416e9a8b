#include "wire/handshake.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "base/error.h"
#include "wire/codec.h"

namespace spinwire::wire {
namespace {

// Statuses travel as their number, so the numbers are part of the protocol: new ones go at the end.
static_assert(static_cast<int>(Status::ok) == 0 && static_cast<int>(Status::timed_out) == 16 &&
              static_cast<int>(Status::refused) == 17 && static_cast<int>(Status::system) == 24);
static_assert(endpoint_at::peer_timeout_ms + sizeof(Endpoint::peer_timeout_ms) == kEndpointBytes);
static_assert(session_at::token + sizeof(SessionEnd::token) == kSessionBytes);
static_assert(join_at::token + sizeof(JoinSession::token) == kJoinBytes);
static_assert(header_at::features + sizeof(FrameHeader::features) == kHeaderBytes);

constexpr std::uint32_t kQpNumMin = 2;         // 0 and 1 are the management queue pairs
constexpr std::uint32_t kQpNumMax = 0xfffffe;  // 0xffffff means multicast
constexpr std::uint32_t kPsnMax = 0xffffff;
constexpr std::uint16_t kLidMax = 0xbfff;  // above are multicast LIDs
constexpr std::uint32_t kMessageMax = 1u << 31;
constexpr std::uint32_t kCreditsMax = 32768;
constexpr std::uint32_t kPeerTimeoutMax = 3'600'000;  // ms
constexpr std::size_t kShownMax = 16;

constexpr bool printable(char c) noexcept { return c >= 0x20 && c < 0x7f; }

tl::unexpected<Error> bad(std::string_view what, std::string found) {
  return base::fail(Status::protocol, base::format("decode the peer's {}", what), std::move(found),
                    "check that both ends run compatible releases of Spinwire and that nothing "
                    "between them alters the stream");
}

tl::unexpected<Error> bad_field(std::string_view what, std::string_view field,
                                const std::string& value, std::string_view limit) {
  return bad(what, base::format("{} is {}, allowed is {}", field, value, limit));
}

std::string show(VersionRange range) {
  return range.min == range.max ? base::format("{}", range.min)
                                : base::format("{} to {}", range.min, range.max);
}

// Both as text and as numbers, since either alone hides something.
std::string show(std::span<const std::byte> bytes) {
  std::string text;
  std::string hex;
  for (const std::byte b : bytes.first(std::min(bytes.size(), kShownMax))) {
    const char c = static_cast<char>(b);
    text += printable(c) ? c : '.';
    hex += base::format("{}{:02x}", hex.empty() ? "" : " ", std::to_integer<unsigned>(b));
  }
  return base::format("'{}' ({})", text, hex);
}

// Names what commonly reaches a port that it was not meant for.
std::string_view guess(std::span<const std::byte> seen) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 10> kKnown{{
      {"GET ", "an HTTP request"},
      {"POST", "an HTTP request"},
      {"HEAD", "an HTTP request"},
      {"PUT ", "an HTTP request"},
      {"OPTI", "an HTTP request"},
      {"CONN", "an HTTP request"},
      {"PRI ", "an HTTP/2 request"},
      {"HTTP", "an HTTP response"},
      {"SSH-", "an SSH peer"},
      {"\x16\x03", "a TLS handshake"},
  }};
  for (const auto& [prefix, name] : kKnown) {
    if (seen.size() >= prefix.size() &&
        std::equal(prefix.begin(), prefix.end(), seen.begin(),
                   [](char c, std::byte b) { return static_cast<std::byte>(c) == b; })) {
      return name;
    }
  }
  return "no Spinwire peer";
}

struct Sizes {
  std::size_t min;
  std::size_t max;
};

Sizes body_sizes(FrameKind kind) noexcept {
  switch (kind) {
    case FrameKind::hello:
    case FrameKind::accept:
      return {kEndpointBytes, kEndpointBytes};
    case FrameKind::ready:
      return {kReadyBytes, kReadyBytes};
    case FrameKind::refuse:
      return {refuse_at::text, refuse_at::text + kRefuseTextMax};
    case FrameKind::open_session:
    case FrameKind::session_opened:
      return {kSessionBytes, kSessionBytes};
    case FrameKind::join_session:
      return {kJoinBytes, kJoinBytes};
    case FrameKind::path_response:
      return {kPathResponseBytes, kPathResponseBytes};
  }
  return {0, 0};
}

bool newer(const FrameHeader& header, VersionRange ours) noexcept {
  return header.versions.max > ours.max;
}

Frame begin(FrameKind kind, std::size_t body_length, const Speaker& speaker) noexcept {
  Frame frame;
  frame.size = kHeaderBytes + body_length;
  Writer w(frame.storage);
  w.copy(header_at::magic, kMagic);
  w.put<std::uint16_t>(header_at::version_min, speaker.versions.min);
  w.put<std::uint16_t>(header_at::version_max, speaker.versions.max);
  w.put<std::uint16_t>(header_at::kind, static_cast<std::uint16_t>(kind));
  w.put<std::uint16_t>(header_at::body_length, static_cast<std::uint16_t>(body_length));
  w.put<std::uint32_t>(header_at::features, speaker.features);
  return frame;
}

std::span<std::byte> body_of(Frame& frame) noexcept {
  return std::span(frame.storage).subspan(kHeaderBytes);
}

void put_endpoint(Writer& w, const Endpoint& e) noexcept {
  w.copy(endpoint_at::gid, e.gid);
  w.put<std::uint32_t>(endpoint_at::qp_num, e.qp_num);
  w.put<std::uint32_t>(endpoint_at::psn, e.psn);
  w.put<std::uint32_t>(endpoint_at::max_message, e.max_message);
  w.put<std::uint32_t>(endpoint_at::credits, e.credits);
  w.put<std::uint64_t>(endpoint_at::incarnation, e.incarnation);
  w.put<std::uint64_t>(endpoint_at::control_address, e.control_address);
  w.put<std::uint32_t>(endpoint_at::control_rkey, e.control_rkey);
  w.put<std::uint32_t>(endpoint_at::control_token, e.control_token);
  w.put<std::uint32_t>(endpoint_at::peer_timeout_ms, e.peer_timeout_ms);
  w.put<std::uint16_t>(endpoint_at::lid, e.lid);
  w.put<std::uint16_t>(endpoint_at::mtu, e.mtu);
  w.put<std::uint32_t>(endpoint_at::eager_bytes, e.eager_bytes);
  w.put<std::uint8_t>(endpoint_at::gid_type, static_cast<std::uint8_t>(e.gid_type));
  w.put<std::uint8_t>(endpoint_at::max_rd_atomic, e.max_rd_atomic);
}

Frame encode_endpoint(FrameKind kind, const Endpoint& e, const Speaker& speaker) noexcept {
  Speaker with = speaker;
  if (e.raw) with.features |= feature::raw;
  Frame frame = begin(kind, kEndpointBytes, with);
  Writer w(body_of(frame));
  put_endpoint(w, e);
  return frame;
}

Frame encode_session(FrameKind kind, const SessionEnd& e, const Speaker& speaker) noexcept {
  Frame frame = begin(kind, kSessionBytes, speaker);
  Writer w(body_of(frame));
  w.copy(session_at::gid, e.gid);
  w.put<std::uint32_t>(session_at::qp_num, e.qp_num);
  w.put<std::uint32_t>(session_at::qkey, e.qkey);
  w.put<std::uint32_t>(session_at::name, e.name);
  w.put<std::uint16_t>(session_at::window, e.window);
  w.put<std::uint16_t>(session_at::mtu, e.mtu);
  w.put<std::uint16_t>(session_at::lid, e.lid);
  w.put<std::uint8_t>(session_at::gid_type, static_cast<std::uint8_t>(e.gid_type));
  w.put<std::uint8_t>(session_at::reserved, 0);
  w.put<std::uint64_t>(session_at::incarnation, e.incarnation);
  w.put<std::uint32_t>(session_at::first, e.first);
  w.put<std::uint64_t>(session_at::token, e.token);
  return frame;
}

Result<void> check_qp_num(std::string_view what, std::uint32_t qp_num) {
  if (qp_num >= kQpNumMin && qp_num <= kQpNumMax) return {};
  return bad_field(what, "qp_num", base::format("{:#x}", qp_num), "0x2 to 0xfffffe");
}

/// Of an Endpoint or a SessionEnd.
template <typename End>
Result<void> check_address(std::string_view what, const End& e) {
  if (e.gid_type > GidType::embedded) {
    return bad_field(what, "gid_type", std::to_string(static_cast<unsigned>(e.gid_type)),
                     "0 (ib), 1 (rocev1), 2 (rocev2) or 3 (softverbs)");
  }
  if (std::all_of(e.gid.begin(), e.gid.end(), [](std::uint8_t b) { return b == 0; })) {
    return bad_field(what, "gid", "all zero", "the address of a port");
  }
  if (e.gid_type == GidType::infiniband && (e.lid == 0 || e.lid > kLidMax)) {
    return bad_field(what, "lid", base::format("{:#x}", e.lid), "0x1 to 0xbfff on ib");
  }
  return {};
}

}  // namespace

std::string_view to_string(FrameKind kind) noexcept {
  switch (kind) {
    case FrameKind::hello:
      return "hello";
    case FrameKind::accept:
      return "accept";
    case FrameKind::refuse:
      return "refuse";
    case FrameKind::ready:
      return "ready";
    case FrameKind::open_session:
      return "open session";
    case FrameKind::session_opened:
      return "session opened";
    case FrameKind::join_session:
      return "join session";
    case FrameKind::path_response:
      return "path response";
  }
  return "unknown";
}

Frame encode(const Hello& hello, const Speaker& speaker) noexcept {
  return encode_endpoint(FrameKind::hello, hello.endpoint, speaker);
}

Frame encode(const Accept& accept, const Speaker& speaker) noexcept {
  return encode_endpoint(FrameKind::accept, accept.endpoint, speaker);
}

Frame encode(const Refuse& refuse, const Speaker& speaker) noexcept {
  const std::size_t length = std::min<std::size_t>(refuse.length, kRefuseTextMax);
  Frame frame = begin(FrameKind::refuse, refuse_at::text + length, speaker);
  const auto body = body_of(frame);
  Writer w(body);
  w.put<std::uint8_t>(refuse_at::status, static_cast<std::uint8_t>(refuse.status));
  for (std::size_t i = 0; i < length; ++i) {
    w.put<std::uint8_t>(refuse_at::text + i, static_cast<std::uint8_t>(refuse.text[i]));
  }
  return frame;
}

Frame encode(const Ready& ready, const Speaker& speaker) noexcept {
  Frame frame = begin(FrameKind::ready, kReadyBytes, speaker);
  Writer(body_of(frame)).put<std::uint64_t>(ready_at::incarnation, ready.incarnation);
  return frame;
}

Frame encode(const OpenSession& open, const Speaker& speaker) noexcept {
  return encode_session(FrameKind::open_session, open.end, speaker);
}

Frame encode(const SessionOpened& opened, const Speaker& speaker) noexcept {
  return encode_session(FrameKind::session_opened, opened.end, speaker);
}

Frame encode(const JoinSession& join, const Speaker& speaker) noexcept {
  Frame frame = begin(FrameKind::join_session, kJoinBytes, speaker);
  Writer w(body_of(frame));
  put_endpoint(w, join.endpoint);
  w.put<std::uint32_t>(join_at::session, join.session);
  w.put<std::uint64_t>(join_at::token, join.token);
  return frame;
}

Frame encode(const PathResponse& response, const Speaker& speaker) noexcept {
  Frame frame = begin(FrameKind::path_response, kPathResponseBytes, speaker);
  Writer(body_of(frame)).put<std::uint64_t>(path_response_at::token, response.token);
  return frame;
}

Refuse make_refuse(Status status, std::string_view text) noexcept {
  Refuse refuse;
  refuse.status = status == Status::ok ? Status::refused : status;
  refuse.length = static_cast<std::uint8_t>(std::min(text.size(), kRefuseTextMax));
  std::transform(text.begin(), text.begin() + refuse.length, refuse.text.begin(),
                 [](char c) { return printable(c) ? c : '?'; });
  return refuse;
}

Result<void> check_magic(std::span<const std::byte> seen) {
  const std::size_t known = std::min(seen.size(), kMagic.size());
  for (std::size_t i = 0; i < known; ++i) {
    if (std::to_integer<std::uint8_t>(seen[i]) == kMagic[i]) continue;
    return bad("handshake",
               base::format("the stream begins with {}, {}; ours begins with {}", show(seen),
                            guess(seen), show(std::as_bytes(std::span(kMagic)))));
  }
  return {};
}

Result<std::uint16_t> agree(VersionRange theirs, VersionRange ours) {
  if (theirs.min > theirs.max) {
    return bad_field("handshake header", "the version range", show(theirs),
                     "a minimum up to the maximum");
  }
  const std::uint16_t version = std::min(theirs.max, ours.max);
  if (version >= std::max(theirs.min, ours.min)) return version;
  return base::fail(
      Status::unsupported, "agree on a handshake version",
      base::format("the peer speaks version {}, we speak version {}", show(theirs), show(ours)),
      "upgrade the older end");
}

Result<FrameHeader> decode_header(std::span<const std::byte> bytes, VersionRange ours) {
  constexpr std::string_view kWhat = "handshake header";
  if (auto magic = check_magic(bytes); !magic) return tl::make_unexpected(magic.error());
  Reader r(bytes);
  FrameHeader header;
  header.versions.min = r.get<std::uint16_t>(header_at::version_min);
  header.versions.max = r.get<std::uint16_t>(header_at::version_max);
  const auto kind = r.get<std::uint16_t>(header_at::kind);
  header.kind = static_cast<FrameKind>(kind);
  header.body_length = r.get<std::uint16_t>(header_at::body_length);
  header.features = r.get<std::uint32_t>(header_at::features);
  if (!r.ok()) return bad_field(kWhat, "its size", std::to_string(bytes.size()), "at least 16");

  const auto agreed = agree(header.versions, ours);
  if (!agreed) return tl::make_unexpected(agreed.error());
  header.version = *agreed;
  const Sizes sizes = body_sizes(header.kind);
  if (sizes.max == 0) {
    return bad_field(kWhat, "kind", std::to_string(kind),
                     "1 (hello), 2 (accept), 3 (refuse), 4 (ready), 5 (open session), 6 (session "
                     "opened), 7 (join session) or 8 (path response)");
  }
  const std::size_t max = newer(header, ours) ? kFrameBytesMax - kHeaderBytes : sizes.max;
  if (header.body_length < sizes.min || header.body_length > max) {
    return bad_field(base::format("{} header", to_string(header.kind)), "body length",
                     std::to_string(header.body_length),
                     base::format("{} to {} bytes", sizes.min, max));
  }
  return header;
}

Result<void> check(const Endpoint& e) {
  constexpr std::string_view kWhat = "endpoint";
  if (auto address = check_address(kWhat, e); !address) return address;
  if (auto number = check_qp_num(kWhat, e.qp_num); !number) return number;
  if (e.psn > kPsnMax) {
    return bad_field(kWhat, "psn", base::format("{:#x}", e.psn), "0 to 0xffffff");
  }
  if (e.mtu < 256 || e.mtu > 4096 || (e.mtu & (e.mtu - 1)) != 0) {
    return bad_field(kWhat, "mtu", std::to_string(e.mtu), "256, 512, 1024, 2048 or 4096 bytes");
  }
  if (e.raw) return {};  // nothing else is used
  if (e.max_message == 0 || e.max_message > kMessageMax) {
    return bad_field(kWhat, "max_message", std::to_string(e.max_message), "1 to 2147483648 bytes");
  }
  if (e.eager_bytes == 0 || e.eager_bytes > e.max_message) {
    return bad_field(kWhat, "eager_bytes", std::to_string(e.eager_bytes),
                     base::format("1 to max_message, {} bytes", e.max_message));
  }
  if (e.credits > kCreditsMax) {
    return bad_field(kWhat, "credits", std::to_string(e.credits), "0 to 32768");
  }
  if (e.incarnation == 0) return bad_field(kWhat, "incarnation", "0", "any other number");
  if (e.control_address == 0 || e.control_address % 8 != 0) {
    return bad_field(kWhat, "control_address", base::format("{:#x}", e.control_address),
                     "a multiple of 8 above 0");
  }
  if (e.control_rkey == 0) return bad_field(kWhat, "control_rkey", "0", "any other number");
  if (e.control_token == 0) return bad_field(kWhat, "control_token", "0", "any other number");
  if (e.peer_timeout_ms == 0 || e.peer_timeout_ms > kPeerTimeoutMax) {
    return bad_field(kWhat, "peer_timeout_ms", std::to_string(e.peer_timeout_ms),
                     "1 to 3600000 milliseconds");
  }
  return {};
}

Result<Endpoint> decode_endpoint(std::span<const std::byte> body, bool raw) {
  if (body.size() != kEndpointBytes) {
    return bad_field("endpoint", "its size", std::to_string(body.size()), "70 bytes");
  }
  Reader r(body);
  Endpoint e;
  e.raw = raw;
  r.copy(endpoint_at::gid, e.gid);
  e.qp_num = r.get<std::uint32_t>(endpoint_at::qp_num);
  e.psn = r.get<std::uint32_t>(endpoint_at::psn);
  e.max_message = r.get<std::uint32_t>(endpoint_at::max_message);
  e.eager_bytes = r.get<std::uint32_t>(endpoint_at::eager_bytes);
  e.credits = r.get<std::uint32_t>(endpoint_at::credits);
  e.incarnation = r.get<std::uint64_t>(endpoint_at::incarnation);
  e.control_address = r.get<std::uint64_t>(endpoint_at::control_address);
  e.control_rkey = r.get<std::uint32_t>(endpoint_at::control_rkey);
  e.control_token = r.get<std::uint32_t>(endpoint_at::control_token);
  e.peer_timeout_ms = r.get<std::uint32_t>(endpoint_at::peer_timeout_ms);
  e.lid = r.get<std::uint16_t>(endpoint_at::lid);
  e.mtu = r.get<std::uint16_t>(endpoint_at::mtu);
  e.gid_type = static_cast<GidType>(r.get<std::uint8_t>(endpoint_at::gid_type));
  e.max_rd_atomic = r.get<std::uint8_t>(endpoint_at::max_rd_atomic);
  if (auto valid = check(e); !valid) return tl::make_unexpected(std::move(valid.error()));
  return e;
}

Result<Ready> decode_ready(std::span<const std::byte> body) {
  if (body.size() != kReadyBytes) {
    return bad_field("ready frame", "its size", std::to_string(body.size()), "8 bytes");
  }
  const Ready ready{Reader(body).get<std::uint64_t>(ready_at::incarnation)};
  if (ready.incarnation == 0)
    return bad_field("ready frame", "incarnation", "0", "any other number");
  return ready;
}

Result<PathResponse> decode_path_response(std::span<const std::byte> body) {
  constexpr std::string_view kWhat = "path response";
  if (body.size() != kPathResponseBytes)
    return bad_field(kWhat, "its size", std::to_string(body.size()), "8 bytes");
  const PathResponse response{Reader(body).get<std::uint64_t>(path_response_at::token)};
  if (response.token == 0) return bad_field(kWhat, "token", "0", "any other number");
  return response;
}

Result<SessionEnd> decode_session(std::span<const std::byte> body, bool of_server) {
  constexpr std::string_view kWhat = "session";
  if (body.size() != kSessionBytes)
    return bad_field(kWhat, "its size", std::to_string(body.size()), "56 bytes");
  Reader r(body);
  SessionEnd e;
  r.copy(session_at::gid, e.gid);
  e.qp_num = r.get<std::uint32_t>(session_at::qp_num);
  e.qkey = r.get<std::uint32_t>(session_at::qkey);
  e.name = r.get<std::uint32_t>(session_at::name);
  e.window = r.get<std::uint16_t>(session_at::window);
  e.mtu = r.get<std::uint16_t>(session_at::mtu);
  e.lid = r.get<std::uint16_t>(session_at::lid);
  e.gid_type = static_cast<GidType>(r.get<std::uint8_t>(session_at::gid_type));
  e.incarnation = r.get<std::uint64_t>(session_at::incarnation);
  e.first = r.get<std::uint32_t>(session_at::first);
  e.token = r.get<std::uint64_t>(session_at::token);
  if (e.qp_num != 0) {  // an end without datagrams need not tell its address
    if (auto address = check_address(kWhat, e); !address) return tl::unexpected(address.error());
    if (auto number = check_qp_num(kWhat, e.qp_num); !number) return tl::unexpected(number.error());
  }
  if (r.get<std::uint8_t>(session_at::reserved) != 0)
    return bad_field(kWhat, "the last byte", "not 0", "0");
  if (e.name == 0) return bad_field(kWhat, "name", "0", "any other number");
  if (!std::has_single_bit(e.window) || e.window > kSessionWindowMax)
    return bad_field(kWhat, "window", std::to_string(e.window), "a power of two up to 64");
  if (e.mtu < 256 || e.mtu > 4096)
    return bad_field(kWhat, "mtu", std::to_string(e.mtu), "256 to 4096 bytes");
  if ((e.qkey & 0x80000000) != 0)
    return bad_field(kWhat, "qkey", base::format("{:#x}", e.qkey), "0 to 0x7fffffff");
  if (e.incarnation == 0) return bad_field(kWhat, "incarnation", "0", "any other number");
  if (e.first % kSessionWindowMax != 0)
    return bad_field(kWhat, "first", std::to_string(e.first), "a multiple of 64");
  if ((e.token != 0) != of_server)
    return bad_field(kWhat, "token", e.token == 0 ? "0" : "not 0", of_server ? "not 0" : "0");
  return e;
}

Result<JoinSession> decode_join(std::span<const std::byte> body) {
  constexpr std::string_view kWhat = "join of a session";
  if (body.size() != kJoinBytes)
    return bad_field(kWhat, "its size", std::to_string(body.size()), "74 bytes");
  auto endpoint = decode_endpoint(body.first(kEndpointBytes));
  if (!endpoint) return tl::make_unexpected(std::move(endpoint.error()));
  Reader r(body);
  JoinSession join;
  join.endpoint = *endpoint;
  join.session = r.get<std::uint32_t>(join_at::session);
  join.token = r.get<std::uint64_t>(join_at::token);
  if (join.session == 0) return bad_field(kWhat, "session", "0", "any other number");
  if (join.token == 0) return bad_field(kWhat, "token", "0", "the server's");
  return join;
}

Result<Refuse> decode_refuse(std::span<const std::byte> body, bool newer_peer) {
  const Sizes sizes = body_sizes(FrameKind::refuse);
  if (body.size() < sizes.min || body.size() > sizes.max) {
    return bad_field("refuse frame", "its size", std::to_string(body.size()), "1 to 201 bytes");
  }
  const auto status = Reader(body).get<std::uint8_t>(refuse_at::status);
  const bool known = status != 0 && status < kStatusCount;
  if (!known && !(newer_peer && status != 0)) {
    return bad_field("refuse frame", "status", std::to_string(status),
                     base::format("1 to {}", kStatusCount - 1));
  }
  const auto text = body.subspan(refuse_at::text);
  return make_refuse(known ? static_cast<Status>(status) : Status::refused,
                     {reinterpret_cast<const char*>(text.data()), text.size()});
}

Result<Received> decode_body(const FrameHeader& header, std::span<const std::byte> body,
                             VersionRange ours) {
  if (body.size() != header.body_length) {
    return bad_field(base::format("{} frame", to_string(header.kind)), "its body",
                     base::format("{} bytes", body.size()),
                     base::format("{} bytes, as announced", header.body_length));
  }
  const bool skips = newer(header, ours);
  const auto known =
      body.first(skips ? std::min(body.size(), body_sizes(header.kind).max) : body.size());
  const bool raw = (header.features & feature::raw) != 0;
  const auto wrap = [&](auto part) { return Received{header, std::move(part)}; };
  switch (header.kind) {
    case FrameKind::hello:
      return decode_endpoint(known, raw).map([&](const Endpoint& e) { return wrap(Hello{e}); });
    case FrameKind::accept:
      return decode_endpoint(known, raw).map([&](const Endpoint& e) { return wrap(Accept{e}); });
    case FrameKind::refuse:
      return decode_refuse(known, skips).map(wrap);
    case FrameKind::ready:
      return decode_ready(known).map(wrap);
    case FrameKind::open_session:
      return decode_session(known, false).map([&](const SessionEnd& e) {
        return wrap(OpenSession{e});
      });
    case FrameKind::session_opened:
      return decode_session(known, true).map([&](const SessionEnd& e) {
        return wrap(SessionOpened{e});
      });
    case FrameKind::join_session:
      return decode_join(known).map(wrap);
    case FrameKind::path_response:
      return decode_path_response(known).map(wrap);
  }
  return bad_field("frame", "kind", std::to_string(static_cast<unsigned>(header.kind)), "1 to 8");
}

}  // namespace spinwire::wire
