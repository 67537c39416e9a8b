// Decoders of the handshake's frames: each checks every field.
#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/printable.h"
#include "wire/frame_kinds.h"
#include "wire/goodbye.h"
#include "wire/handshake.h"

namespace spinwire::wire {
namespace {

// Statuses travel as numbers, so the numbers are part of the protocol: add new ones at the end.
static_assert(static_cast<int>(Status::ok) == 0 && static_cast<int>(Status::timed_out) == 16 &&
              static_cast<int>(Status::refused) == 17 && static_cast<int>(Status::system) == 24);

constexpr std::uint32_t kQpNumMin = 2;         // 0 and 1 are the management queue pairs
constexpr std::uint32_t kQpNumMax = 0xfffffe;  // 0xffffff means multicast
constexpr std::uint32_t kPsnMax = 0xffffff;
constexpr std::uint16_t kLidMax = 0xbfff;  // above are multicast LIDs
constexpr std::uint32_t kMessageMax = 1u << 31;
constexpr std::uint32_t kCreditsMax = 32768;
/// A peer that takes only short messages at once would make each of ours a rendezvous message.
constexpr std::uint32_t kEagerBytesMin = 256;
/// A peer gets a sign of life four times in this time.
constexpr std::uint32_t kPeerTimeoutMin = 25;         // ms
constexpr std::uint32_t kPeerTimeoutMax = 3'600'000;  // ms
constexpr std::size_t kShownMax = 16;

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

// Shows bytes as text and as numbers, because either alone hides something.
std::string show(std::span<const std::byte> bytes) {
  std::string text;
  std::string hex;
  for (const std::byte b : bytes.first(std::min(bytes.size(), kShownMax))) {
    const char c = static_cast<char>(b);
    text += base::is_printable(c) ? c : '.';
    hex += base::format("{}{:02x}", hex.empty() ? "" : " ", std::to_integer<unsigned>(b));
  }
  return base::format("'{}' ({})", text, hex);
}

// Names protocols that commonly reach the wrong port.
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

bool newer(const FrameHeader& header, VersionRange ours) noexcept {
  return header.versions.max > ours.max;
}

/// Checks the fields of a struct in turn. The first that is out of its limits is the outcome.
class Checks {
 public:
  explicit Checks(std::string_view what) noexcept : what_(what) {}

  void field(bool good, std::string_view name, std::uint64_t value, std::string_view limit) {
    if (!good) fail(name, std::to_string(value), limit);
  }
  void hex(bool good, std::string_view name, std::uint64_t value, std::string_view limit) {
    if (!good) fail(name, base::format("{:#x}", value), limit);
  }
  void not_zero(std::string_view name, std::uint64_t value) {
    field(value != 0, name, value, "any other number");
  }
  void fail(std::string_view name, const std::string& value, std::string_view limit) {
    if (outcome_) outcome_ = bad_field(what_, name, value, limit);
  }
  void part(const Result<void>& outcome) {
    if (outcome_) outcome_ = outcome;
  }
  [[nodiscard]] Result<void> outcome() && { return std::move(outcome_); }

 private:
  std::string_view what_;
  Result<void> outcome_;
};

/// Decodes a body of exactly the size of its layout. `check` gets Checks and the body.
template <typename Fields, typename Body, typename Check>
Result<Body> decode_as(std::string_view what, std::span<const std::byte> bytes, Check&& check) {
  if (bytes.size() != Fields::kBytes) {
    return bad_field(what, "its size", std::to_string(bytes.size()),
                     base::format("{} bytes", Fields::kBytes));
  }
  Body body;
  const bool exact = Fields::get(bytes.data(), body);
  Checks checks(what);
  check(checks, body);
  if (!exact) checks.fail("a reserved byte", "not 0", "0");
  if (auto good = std::move(checks).outcome(); !good) return tl::unexpected(good.error());
  return body;
}

/// Decodes an end, and the private data behind it if there is some.
template <typename Fields, typename End, typename Check>
Result<End> decode_end(std::string_view what, std::span<const std::byte> bytes,
                       std::uint32_t features, Check&& check) {
  const bool more = has(features, feature::private_data);
  const auto fixed = more ? bytes.first(std::min(bytes.size(), Fields::kBytes)) : bytes;
  auto end = decode_as<Fields, End>(what, fixed, std::forward<Check>(check));
  if (!end) return end;
  end->application_fields = has(features, feature::application_fields);
  if (!more) return end;
  const auto rest = bytes.subspan(Fields::kBytes);
  constexpr std::size_t kLength = sizeof(std::uint16_t);
  const std::size_t length =
      rest.size() >= kLength ? get_number<std::uint16_t>(rest.data()) : std::size_t{0};
  if (length == 0 || length > kPrivateDataMax || rest.size() != kLength + length) {
    return bad_field(what, "the length of its private data", std::to_string(length),
                     base::format("1 to {} bytes, all of the {} behind it", kPrivateDataMax,
                                  rest.size() - std::min(rest.size(), kLength)));
  }
  (void)end->private_data.assign(rest.subspan(kLength));
  return end;
}

void check_qp_num(Checks& checks, std::uint32_t qp_num) {
  checks.hex(qp_num >= kQpNumMin && qp_num <= kQpNumMax, "qp_num", qp_num, "0x2 to 0xfffffe");
}

/// Checks the address of an Endpoint or a SessionEnd.
template <typename End>
void check_address(Checks& checks, const End& e) {
  checks.field(e.gid_type <= GidType::embedded, "gid_type", static_cast<unsigned>(e.gid_type),
               "0 (ib), 1 (rocev1), 2 (rocev2) or 3 (softverbs)");
  if (std::all_of(e.gid.begin(), e.gid.end(), [](std::uint8_t b) { return b == 0; }))
    checks.fail("gid", "all zero", "the address of a port");
  checks.hex(e.gid_type != GidType::infiniband || (e.lid != 0 && e.lid <= kLidMax), "lid", e.lid,
             "0x1 to 0xbfff on ib");
}

void check_endpoint(Checks& checks, const Endpoint& e) {
  check_address(checks, e);
  check_qp_num(checks, e.qp_num);
  checks.hex(e.psn <= kPsnMax, "psn", e.psn, "0 to 0xffffff");
  checks.field(e.mtu >= 256 && e.mtu <= 4096 && std::has_single_bit(e.mtu), "mtu", e.mtu,
               "256, 512, 1024, 2048 or 4096 bytes");
  if (e.raw) return;  // nothing else is used
  checks.field(e.max_message != 0 && e.max_message <= kMessageMax, "max_message", e.max_message,
               "1 to 2147483648 bytes");
  if (e.eager_bytes < kEagerBytesMin || e.eager_bytes > e.max_message) {
    checks.fail("eager_bytes", std::to_string(e.eager_bytes),
                base::format("256 to max_message, {} bytes", e.max_message));
  }
  checks.field(e.credits <= kCreditsMax, "credits", e.credits, "0 to 32768");
  checks.not_zero("incarnation", e.incarnation);
  checks.hex(e.credit_cell_address != 0 && e.credit_cell_address % 8 == 0, "credit_cell_address",
             e.credit_cell_address, "a multiple of 8 above 0");
  checks.not_zero("credit_cell_rkey", e.credit_cell_rkey);
  checks.not_zero("credit_cell_token", e.credit_cell_token);
  checks.field(e.peer_timeout_ms >= kPeerTimeoutMin && e.peer_timeout_ms <= kPeerTimeoutMax,
               "peer_timeout_ms", e.peer_timeout_ms, "25 to 3600000 milliseconds");
}

}  // namespace

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
  FrameHeader header;
  if (bytes.size() < kHeaderBytes || !HeaderLayout::get(bytes.data(), header))
    return bad_field(kWhat, "its size", std::to_string(bytes.size()), "at least 16");

  const auto agreed = agree(header.versions, ours);
  if (!agreed) return tl::make_unexpected(agreed.error());
  header.version = *agreed;
  const KindInfo sizes = info_of(header.kind, header.features);
  if (sizes.max == 0) {
    return bad_field(kWhat, "kind", std::to_string(static_cast<unsigned>(header.kind)),
                     "1 (hello), 2 (accept), 3 (refuse), 4 (ready), 5 (open session), 6 (session "
                     "opened), 7 (join session), 8 (path response), 9 (authenticate), 10 "
                     "(authenticated) or 11 (sealed)");
  }
  const std::size_t max =
      newer(header, ours) ? std::max(kFrameBytesMax - kHeaderBytes, sizes.max) : sizes.max;
  if (header.body_length < sizes.min || header.body_length > max) {
    return bad_field(base::format("{} header", to_string(header.kind)), "body length",
                     std::to_string(header.body_length),
                     base::format("{} to {} bytes", sizes.min, max));
  }
  return header;
}

Result<void> check(const Endpoint& e) {
  Checks checks("endpoint");
  check_endpoint(checks, e);
  return std::move(checks).outcome();
}

Result<Endpoint> decode_endpoint(std::span<const std::byte> body, std::uint32_t features) {
  const auto check_all = [features](Checks& checks, Endpoint& e) {
    set_features(e, features);
    check_endpoint(checks, e);
  };
  return decode_end<EndpointLayout, Endpoint>("endpoint", body, features, check_all);
}

Result<Ready> decode_ready(std::span<const std::byte> body) {
  return decode_as<ReadyLayout, Ready>("ready frame", body, [](Checks& checks, const Ready& ready) {
    checks.not_zero("incarnation", ready.incarnation);
  });
}

Result<PathResponse> decode_path_response(std::span<const std::byte> body) {
  return decode_as<PathResponseLayout, PathResponse>(
      "path response", body, [](Checks& checks, const PathResponse& response) {
        checks.not_zero("token", response.token);
      });
}

/// Any bytes can be those of a key or of a message: the key decides.
Result<Authenticate> decode_authenticate(std::span<const std::byte> body) {
  return decode_as<AuthenticateLayout, Authenticate>("authentication", body,
                                                     [](Checks&, const Authenticate&) {});
}

Result<Authenticated> decode_authenticated(std::span<const std::byte> body) {
  return decode_as<AuthenticatedLayout, Authenticated>("answer to an authentication", body,
                                                       [](Checks&, const Authenticated&) {});
}

namespace {
std::uint32_t longest_datagram(std::uint32_t features) {
  if ((features & feature::page_datagrams) == 0) return 0;
  if ((features & feature::long_datagrams) == 0) return kPageDatagramBytes;
  return (features & feature::block_datagrams) != 0 ? kBlockDatagramBytes : kLongDatagramBytes;
}
}  // namespace

Result<SessionEnd> decode_session(std::span<const std::byte> body, std::uint32_t features) {
  const auto check = [features](Checks& checks, SessionEnd& e) {
    e.direct_datagrams = longest_datagram(features);
    e.goodbyes = (features & feature::goodbye) != 0;
    e.refusal_codes = has(features, feature::refusal_codes);
    if (e.qp_num != 0) {  // an end without datagrams may omit its address
      check_address(checks, e);
      check_qp_num(checks, e.qp_num);
    }
    checks.not_zero("name", e.name);
    checks.field(std::has_single_bit(e.window) && e.window <= kSessionWindowMax, "window", e.window,
                 "a power of two up to 64");
    checks.field(e.mtu >= 256 && e.mtu <= 4096, "mtu", e.mtu, "256 to 4096 bytes");
    checks.hex((e.qkey & 0x80000000) == 0, "qkey", e.qkey, "0 to 0x7fffffff");
    checks.not_zero("incarnation", e.incarnation);
    checks.field(e.first % kSessionWindowMax == 0, "first", e.first, "a multiple of 64");
    checks.not_zero("token", e.token);
  };
  return decode_end<SessionLayout, SessionEnd>("session", body, features, check);
}

Result<JoinSession> decode_join(std::span<const std::byte> body, std::uint32_t features) {
  const auto check_join = [features](Checks& checks, JoinSession& join) {
    join.endpoint.goodbye_reasons = (features & feature::goodbye) != 0;
    checks.part(check(join.endpoint));
    checks.not_zero("session", join.session);
    checks.field(join.token != 0, "token", join.token, "the server's");
  };
  return decode_as<JoinLayout, JoinSession>("join of a session", body, check_join);
}

Result<Refuse> decode_refuse(std::span<const std::byte> body, bool newer_peer,
                             std::uint32_t features) {
  const KindInfo sizes = info_of(FrameKind::refuse, features);
  if (body.size() < sizes.min || body.size() > sizes.max) {
    return bad_field("refuse frame", "its size", std::to_string(body.size()),
                     base::format("{} to {} bytes", sizes.min, sizes.max));
  }
  const auto status = std::to_integer<std::uint8_t>(body.front());
  const bool known = status != 0 && status < kStatusCount;
  if (!known && !(newer_peer && status != 0)) {
    return bad_field("refuse frame", "status", std::to_string(status),
                     base::format("1 to {}", kStatusCount - 1));
  }
  const std::byte* at = body.data() + kRefuseBytes;
  std::optional<std::uint32_t> code;
  if (has(features, feature::refusal_code)) {
    code = get_number<std::uint32_t>(at);
    at += kRefuseCodeBytes;
  }
  const auto text = body.subspan(sizes.min);
  Refuse refuse = make_refuse(known ? static_cast<Status>(status) : Status::refused,
                              {reinterpret_cast<const char*>(text.data()), text.size()}, code);
  if (!has(features, feature::goodbye)) return refuse;
  const auto number = get_number<std::uint32_t>(at);
  if (!decode(number, refuse.goodbye) || !refuse.goodbye.invites_back()) {
    return bad_field("refuse frame", "its goodbye", base::format("{:#x}", number),
                     "2 (draining) or 3 (overloaded), and up to 3600000 ms");
  }
  return refuse;
}

namespace {
/// The part of a newer peer's body that this version knows.
std::span<const std::byte> known_part(const FrameHeader& header, std::span<const std::byte> body) {
  const KindInfo info = info_of(header.kind);
  std::size_t size = info_of(header.kind, header.features).max;
  if (info.has_private_data && has(header.features, feature::private_data)) {
    constexpr std::size_t kLength = sizeof(std::uint16_t);
    if (body.size() >= info.max + kLength)
      size = info.max + kLength + get_number<std::uint16_t>(body.data() + info.max);
  }
  return body.first(std::min(body.size(), size));
}
}  // namespace

Result<Received> decode_body(const FrameHeader& header, std::span<const std::byte> body,
                             VersionRange ours) {
  if (body.size() != header.body_length) {
    return bad_field(base::format("{} frame", to_string(header.kind)), "its body",
                     base::format("{} bytes", body.size()),
                     base::format("{} bytes, as announced", header.body_length));
  }
  const bool skips = newer(header, ours);
  const auto known = skips ? known_part(header, body) : body;
  const auto wrap = [&](auto part) { return Received{header, std::move(part)}; };
  switch (header.kind) {
    case FrameKind::hello:
      return decode_endpoint(known, header.features).map([&](const Endpoint& e) {
        return wrap(Hello{e});
      });
    case FrameKind::accept:
      return decode_endpoint(known, header.features).map([&](const Endpoint& e) {
        return wrap(Accept{e});
      });
    case FrameKind::refuse:
      return decode_refuse(known, skips, header.features).map(wrap);
    case FrameKind::ready:
      return decode_ready(known).map(wrap);
    case FrameKind::open_session:
      return decode_session(known, header.features).map([&](const SessionEnd& e) {
        return wrap(OpenSession{e});
      });
    case FrameKind::session_opened:
      return decode_session(known, header.features).map([&](const SessionEnd& e) {
        return wrap(SessionOpened{e});
      });
    case FrameKind::join_session:
      return decode_join(known, header.features).map(wrap);
    case FrameKind::path_response:
      return decode_path_response(known).map(wrap);
    case FrameKind::authenticate:
      return decode_authenticate(known).map(wrap);
    case FrameKind::authenticated:
      return decode_authenticated(known).map(wrap);
    case FrameKind::sealed:
      return wrap(Sealed{});
  }
  return bad_field("frame", "kind", std::to_string(static_cast<unsigned>(header.kind)), "1 to 11");
}

}  // namespace spinwire::wire
