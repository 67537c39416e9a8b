// The frames of the TCP handshake, as from a peer of any version.
#include <array>

#include "fuzz/fuzz.h"
#include "fuzz/samples.h"
#include "wire/handshake.h"

namespace fuzz {
namespace {

using namespace spinwire;
using namespace spinwire::wire;

/// Versions that this end may support.
constexpr std::array<VersionRange, 4> kOurs{{kVersions, {1, 3}, {2, 4}, {7, 7}}};

/// A decoder's error has all fields, and blames the peer or a version.
template <typename T>
bool refused(const Result<T>& result) {
  if (result) return false;
  const Error& e = result.error();
  expect(e.status == Status::protocol || e.status == Status::unsupported, "status of a refusal");
  expect(!e.asked.empty() && !e.found.empty() && !e.remedy.empty(), "words of a refusal");
  return true;
}

bool same_refuse(const Refuse& a, const Refuse& b) {
  return a.status == b.status && a.message() == b.message() && a.code == b.code &&
         a.goodbye == b.goodbye;
}
void check_refuse(const Refuse& refuse) {
  expect(refuse.status != Status::ok && static_cast<int>(refuse.status) < kStatusCount,
         "status of a refuse frame");
  expect(printable(refuse.message()), "text of a refuse frame");
  const Frame frame = encode(refuse);
  const std::uint32_t features = (refuse.code ? feature::refusal_code : 0) |
                                 (refuse.goodbye.invites_back() ? feature::goodbye : 0);
  const auto again = decode_refuse(frame.bytes().subspan(kHeaderBytes), false, features);
  expect(again && same_refuse(*again, refuse), "a refuse frame encoded and decoded");
}

/// The body alone, as if a frame had announced it.
void run_bodies(std::span<const std::byte> body) {
  if (const auto e = decode_endpoint(body); !refused(e)) {
    expect(check(*e).has_value(), "a decoded endpoint is in order");
    expect(same(encode(Hello{*e}).bytes().subspan(kHeaderBytes), body), "an endpoint's bytes");
  }
  if (const auto e = decode_endpoint(body, feature::private_data); !refused(e)) {
    expect(!e->private_data.empty() && e->private_data.bytes().size() <= kPrivateDataMax,
           "the length of private data");
    expect(same(encode(Hello{*e}).bytes().subspan(kHeaderBytes), body), "private data's bytes");
  }
  if (const auto e = decode_session(body, feature::private_data); !refused(e)) {
    expect(same(encode(OpenSession{*e}).bytes().subspan(kHeaderBytes), body),
           "a session's private data's bytes");
  }
  if (const auto ready = decode_ready(body); !refused(ready)) {
    expect(same(encode(*ready).bytes().subspan(kHeaderBytes), body), "a ready frame's bytes");
  }
  if (const auto e = decode_session(body); !refused(e)) {
    expect(e->name != 0 && e->window != 0 && e->window <= kSessionWindowMax, "a session's limits");
    expect(e->token != 0, "a session's token");
    expect(same(encode(OpenSession{*e}).bytes().subspan(kHeaderBytes), body), "a session's bytes");
  }
  if (const auto join = decode_join(body); !refused(join)) {
    expect(join->session != 0, "a session's name");
    expect(same(encode(*join).bytes().subspan(kHeaderBytes), body), "a join's bytes");
  }
  if (const auto shown = decode_path_response(body); !refused(shown)) {
    expect(same(encode(*shown).bytes().subspan(kHeaderBytes), body), "a path response's bytes");
  }
  if (const auto request = decode_authenticate(body); !refused(request)) {
    expect(same(encode(*request).bytes().subspan(kHeaderBytes), body), "a proof's bytes");
  }
  if (const auto answer = decode_authenticated(body); !refused(answer)) {
    expect(same(encode(*answer).bytes().subspan(kHeaderBytes), body), "a proof's answer's bytes");
  }
  for (const bool newer : {false, true}) {
    for (const std::uint32_t features : {std::uint32_t{0}, feature::refusal_code, feature::goodbye,
                                         feature::refusal_code | feature::goodbye}) {
      const auto refuse = decode_refuse(body, newer, features);
      if (!refused(refuse)) check_refuse(*refuse);
    }
  }
}

Frame encode_again(const Received& r) {
  const Capabilities capabilities{r.header.versions, r.header.features};
  return std::visit(
      [&](const auto& body) {
        if constexpr (requires { encode(body, capabilities); }) return encode(body, capabilities);
        return Frame();  // a sealed frame, whose body is the control port's to open
      },
      r.body);
}

void check_received(const Received& r, std::span<const std::byte> frame, VersionRange ours) {
  const FrameHeader& h = r.header;
  expect(h.version >= ours.min && h.version <= ours.max, "an agreed version is ours");
  expect(h.version >= h.versions.min && h.version <= h.versions.max, "and theirs");
  expect(r.body.index() + 1 == static_cast<std::size_t>(h.kind), "a body is of its kind");
  if (const auto* refuse = std::get_if<Refuse>(&r.body)) return check_refuse(*refuse);
  if (std::holds_alternative<Sealed>(r.body)) return;
  const Frame again = encode_again(r);
  // Fields that a newer version appended are unknown here.
  const std::size_t known = std::min(again.size, frame.size());
  expect(again.size <= frame.size(), "nothing was made up");
  expect(h.versions.max > ours.max || again.size == frame.size(), "nothing was left out");
  constexpr std::size_t kLength = 10, kFeatures = 12;
  expect(same(again.bytes().first(kLength), frame.first(kLength)), "a header's bytes");
  expect(same(again.bytes().subspan(kFeatures), frame.first(known).subspan(kFeatures)),
         "a frame's bytes");
}

}  // namespace

void run(std::span<const std::byte> data) {
  Input in(data);
  const VersionRange ours = kOurs[in.take<std::uint8_t>() % kOurs.size()];
  const Bytes frame = alone(in.rest());
  run_bodies(frame);
  const auto magic = check_magic(std::span(frame).first(std::min<std::size_t>(frame.size(), 9)));
  const auto header = decode_header(frame, ours);
  if (refused(header)) return;
  expect(magic.has_value(), "a frame with a good header has its magic");
  const KindSet kAny = kinds(FrameKind::hello, FrameKind::accept, FrameKind::refuse,
                             FrameKind::ready, FrameKind::open_session, FrameKind::session_opened,
                             FrameKind::join_session, FrameKind::path_response,
                             FrameKind::authenticate, FrameKind::authenticated, FrameKind::sealed);
  expect(!kAny.empty() && kAny.has(header->kind), "a frame is of a known kind");
  expect(to_string(header->kind) != "unknown", "a known kind has a name");
  expect(header->body_length <= kSealedBytesMax, "a body has its limit");
  const auto body = std::span(frame).subspan(kHeaderBytes);
  const Bytes announced =
      alone(body.first(std::min<std::size_t>(body.size(), header->body_length)));
  const auto received = decode_body(*header, announced, ours);
  if (refused(received)) return;
  check_received(*received, std::span(frame).first(kHeaderBytes + announced.size()), ours);
}

void sow(Seeds& seeds) {
  const auto sow_frame = [&](const Frame& frame, std::uint8_t ours) {
    const std::byte first{ours};
    seeds.add({{&first, 1}, frame.bytes()});
    seeds.add({{&first, 1}, frame.bytes().subspan(kHeaderBytes)});
  };
  const Capabilities newer{{1, 9}, 0x55};
  for (const std::uint8_t ours : {std::uint8_t{0}, std::uint8_t{1}}) {
    const Capabilities capabilities = ours == 0 ? Capabilities{} : newer;
    sow_frame(encode(Hello{sample_endpoint()}, capabilities), ours);
    sow_frame(encode(Accept{sample_endpoint()}, capabilities), ours);
    sow_frame(encode(make_refuse(Status::limit, "as many as there may be"), capabilities), ours);
    sow_frame(encode(make_refuse(Status::refused, "not today", 0x12345678), capabilities), ours);
    for (const std::size_t size : {std::size_t{1}, std::size_t{64}, kPrivateDataMax}) {
      Endpoint with_data = sample_endpoint();
      with_data.private_data = sample_private_data(size);
      with_data.application_fields = true;
      sow_frame(encode(Hello{with_data}, capabilities), ours);
      SessionEnd session = sample_session();
      session.private_data = sample_private_data(size);
      sow_frame(encode(SessionOpened{session}, capabilities), ours);
      Frame beyond = encode(Hello{with_data}, capabilities);
      beyond.storage[kHeaderBytes + kEndpointBytes + 1] = std::byte{2};  // of the length
      sow_frame(beyond, ours);
    }
    Refuse later = make_refuse(Status::refused, "later");
    later.goodbye = {GoodbyeReason::draining, std::chrono::seconds(2)};
    sow_frame(encode(later, capabilities), ours);
    sow_frame(encode(Ready{77}, capabilities), ours);
    sow_frame(encode(OpenSession{sample_session()}, capabilities), ours);
    SessionEnd opened = sample_session();
    opened.token = 0x1122334455667788;
    sow_frame(encode(SessionOpened{opened}, capabilities), ours);
    SessionEnd without = sample_session();  // datagrams
    without.qp_num = 0;
    sow_frame(encode(OpenSession{without}, capabilities), ours);
    sow_frame(encode(JoinSession{sample_endpoint(), 5, 6}, capabilities), ours);
    sow_frame(encode(PathResponse{0x99aa}, capabilities), ours);
    sow_frame(encode(Authenticate{{1, 2}, {3, 4}}, capabilities), ours);
    sow_frame(encode(Authenticated{{5, 6}}, capabilities), ours);
  }
  const std::byte first{};
  seeds.add({{&first, 1}, begin_sealed(100).bytes()});
  seeds.add(std::string_view("\0GET / HTTP/1.1", 15));
}

}  // namespace fuzz
