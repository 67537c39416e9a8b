#include "wire/handshake.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "wire/codec.h"
#include "wire/endpoints.h"

namespace handshake_test {

namespace wire = spinwire::wire;
using spinwire::Endpoint;
using spinwire::GidType;
using spinwire::Status;
using wire::FrameKind;
using wire_test::decode_frame;
using wire_test::valid_endpoint;
namespace header_at = wire_test::header_at;

namespace refuse_at {
constexpr std::size_t status = 0, text = 1;
}

bool contains(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

template <typename Frame>
std::vector<std::byte> copy_of(const Frame& frame) {
  return {frame.bytes().begin(), frame.bytes().end()};
}

template <typename T>
std::vector<std::byte> with(std::vector<std::byte> bytes, std::size_t offset, T value) {
  EXPECT_LE(offset + sizeof(T), bytes.size());
  wire::put_number(bytes.data() + offset, value);
  return bytes;
}

TEST(Handshake, HelloAndAcceptComeBackAsSent) {
  const wire::Capabilities capabilities{wire::kVersions, 0xf00dbeeeu};
  const auto hello =
      decode_frame(wire::encode(wire::Hello{valid_endpoint()}, capabilities).bytes());
  ASSERT_TRUE(hello) << hello.error().message();
  EXPECT_EQ(hello->header.kind, FrameKind::hello);
  EXPECT_EQ(hello->header.versions, wire::kVersions);
  EXPECT_EQ(hello->header.version, wire::kVersions.max);
  EXPECT_EQ(hello->header.features, 0xf00dbeeeu);
  auto offers = valid_endpoint();
  offers.application_fields = offers.goodbye_reasons = true;  // bits of the features
  EXPECT_EQ(std::get<wire::Hello>(hello->body).endpoint, offers);

  const auto accept = decode_frame(wire::encode(wire::Accept{valid_endpoint()}).bytes());
  ASSERT_TRUE(accept) << accept.error().message();
  EXPECT_EQ(accept->header.kind, FrameKind::accept);
  EXPECT_EQ(std::get<wire::Accept>(accept->body).endpoint, valid_endpoint());
}

TEST(Handshake, ARawEndNeedsNoMoreThanItsAddress) {
  Endpoint e;
  e.gid = valid_endpoint().gid;
  e.gid_type = GidType::roce_v2;
  e.qp_num = 5;
  e.mtu = 256;
  e.raw = true;
  const auto frame = wire::encode(wire::Hello{e});
  const auto received = decode_frame(frame.bytes());
  ASSERT_TRUE(received) << received.error().message();
  EXPECT_EQ(received->header.features, wire::feature::raw);
  EXPECT_EQ(std::get<wire::Hello>(received->body).endpoint, e);
  // Without the bit it is an ordinary endpoint, which lacks required fields.
  const auto plain = decode_frame(with<std::uint32_t>(copy_of(frame), header_at::features, 0));
  ASSERT_FALSE(plain);
  EXPECT_EQ(plain.error().status, Status::protocol);
  e.mtu = 77;
  EXPECT_FALSE(decode_frame(wire::encode(wire::Hello{e}).bytes()));
}

TEST(Handshake, ReadyAndRefuseComeBackAsSent) {
  const auto ready = decode_frame(wire::encode(wire::Ready{77}).bytes());
  ASSERT_TRUE(ready) << ready.error().message();
  EXPECT_EQ(std::get<wire::Ready>(ready->body).incarnation, 77u);

  for (const std::size_t length : {std::size_t{0}, std::size_t{1}, wire::kRefuseTextMax}) {
    const std::string text(length, 'x');
    const auto refuse = decode_frame(wire::encode(wire::make_refuse(Status::limit, text)).bytes());
    ASSERT_TRUE(refuse) << refuse.error().message();
    EXPECT_EQ(std::get<wire::Refuse>(refuse->body).status, Status::limit);
    EXPECT_EQ(std::get<wire::Refuse>(refuse->body).message(), text);
  }
}

// The layout is a contract with other releases, so it is repeated here.
TEST(Handshake, LayoutIsFixed) {
  const auto frame = copy_of(wire::encode(wire::Hello{valid_endpoint()}, {{1, 1}, 0x04030201u}));
  const std::vector<unsigned> expected{
      'S',  'P',  'N',  'W',  1,    0,    1,    0,     // magic, versions
      1,    0,    70,   0,    1,    2,    3,    4,     // kind, body length, features
      0xa0, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7,  // gid
      0xa8, 0xa9, 0xaa, 0xab, 0xac, 0xad, 0xae, 0xaf,  //
      0xef, 0xcd, 0xab, 0,    0x56, 0x34, 0x12, 0,     // qp_num, psn
      0,    0x20, 0,    0,    64,   0,    0,    0,     // max_message, credits
      0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11,  // incarnation
      0x08, 0x10, 0,    0,    0xff, 0x7f, 0,    0,     // credit_cell_address
      0xbe, 0xba, 0xfe, 0xca, 0x34, 0x12, 0,    4,     // credit_cell_rkey, lid, mtu
      2,    16,   0,    0x10, 0,    0,                 // gid_type, max_rd_atomic, eager_bytes
      0xde, 0x51, 0,    0,    0x10, 0x27, 0,    0};    // credit_cell_token, peer_timeout_ms
  ASSERT_EQ(frame.size(), expected.size());
  for (std::size_t i = 0; i < frame.size(); ++i) {
    EXPECT_EQ(std::to_integer<unsigned>(frame[i]), expected[i]) << "byte " << i;
  }
}

TEST(Handshake, FramesOfAnAuthenticationComeBackAsSent) {
  wire::Authenticate request;
  request.key.fill(0x11);
  request.message.fill(0x22);
  const auto asked = decode_frame(wire::encode(request).bytes());
  ASSERT_TRUE(asked) << asked.error().message();
  EXPECT_EQ(std::get<wire::Authenticate>(asked->body).key, request.key);
  EXPECT_EQ(std::get<wire::Authenticate>(asked->body).message, request.message);
  wire::Authenticated answer;
  answer.message.fill(0x33);
  const auto answered = decode_frame(wire::encode(answer).bytes());
  ASSERT_TRUE(answered) << answered.error().message();
  EXPECT_EQ(std::get<wire::Authenticated>(answered->body).message, answer.message);
  for (const std::size_t size : {std::size_t{16}, sizeof(wire::Frame::storage)}) {
    const wire::SealedFrame sealed = wire::begin_sealed(size);
    EXPECT_EQ(sealed.size, wire::kHeaderBytes + size + wire::kSealTagBytes);
    const auto received = decode_frame(sealed.bytes());
    ASSERT_TRUE(received) << received.error().message();
    EXPECT_TRUE(std::holds_alternative<wire::Sealed>(received->body));
  }
}

TEST(Handshake, FramesOfAnAuthenticationHaveTheirSizes) {
  for (const auto& [frame, least, most] :
       {std::tuple{copy_of(wire::encode(wire::Authenticate{})), 64, 64},
        std::tuple{copy_of(wire::encode(wire::Authenticated{})), 64, 64},
        std::tuple{copy_of(wire::begin_sealed(100)), 32, 528}}) {
    for (const int wrong : {0, least - 1, most + 1, 65535}) {
      const auto header = wire::decode_header(
          with(frame, header_at::body_length, static_cast<std::uint16_t>(wrong)));
      ASSERT_FALSE(header) << wrong;
      EXPECT_TRUE(contains(header.error().found, "body length is " + std::to_string(wrong)));
    }
  }
}

struct FieldCase {
  std::string name;   // as in the error
  std::string value;  // as in the error
  std::function<void(Endpoint&)> set;
};

TEST(Handshake, EveryFieldBeyondItsLimitIsRefusedByName) {
  using E = Endpoint;
  const std::vector<FieldCase> cases{
      {"gid", "all zero", [](E& e) { e.gid = {}; }},
      {"gid_type", "4", [](E& e) { e.gid_type = static_cast<GidType>(4); }},
      {"gid_type", "255", [](E& e) { e.gid_type = static_cast<GidType>(255); }},
      {"lid", "0x0", [](E& e) { e.gid_type = GidType::infiniband, e.lid = 0; }},
      {"lid", "0xc000", [](E& e) { e.gid_type = GidType::infiniband, e.lid = 0xc000; }},
      {"qp_num", "0x0", [](E& e) { e.qp_num = 0; }},
      {"qp_num", "0x1", [](E& e) { e.qp_num = 1; }},
      {"qp_num", "0xffffff", [](E& e) { e.qp_num = 0xffffff; }},
      {"qp_num", "0x1000000", [](E& e) { e.qp_num = 1u << 24; }},
      {"psn", "0x1000000", [](E& e) { e.psn = 1u << 24; }},
      {"mtu", "0", [](E& e) { e.mtu = 0; }},
      {"mtu", "128", [](E& e) { e.mtu = 128; }},
      {"mtu", "257", [](E& e) { e.mtu = 257; }},
      {"mtu", "1500", [](E& e) { e.mtu = 1500; }},
      {"mtu", "8192", [](E& e) { e.mtu = 8192; }},
      {"max_message", "0", [](E& e) { e.max_message = 0; }},
      {"max_message", "2147483649", [](E& e) { e.max_message = (1u << 31) + 1; }},
      {"eager_bytes", "0", [](E& e) { e.eager_bytes = 0; }},
      {"eager_bytes", "255", [](E& e) { e.eager_bytes = 255; }},
      {"eager_bytes", "8193", [](E& e) { e.eager_bytes = 8193; }},
      {"credits", "32769", [](E& e) { e.credits = 32769; }},
      {"incarnation", "0", [](E& e) { e.incarnation = 0; }},
      {"credit_cell_address", "0x0", [](E& e) { e.credit_cell_address = 0; }},
      {"credit_cell_address", "0x7fff00001004", [](E& e) { e.credit_cell_address -= 4; }},
      {"credit_cell_rkey", "0", [](E& e) { e.credit_cell_rkey = 0; }},
      {"credit_cell_token", "0", [](E& e) { e.credit_cell_token = 0; }},
      {"peer_timeout_ms", "0", [](E& e) { e.peer_timeout_ms = 0; }},
      {"peer_timeout_ms", "24", [](E& e) { e.peer_timeout_ms = 24; }},
      {"peer_timeout_ms", "3600001", [](E& e) { e.peer_timeout_ms = 3600001; }},
  };
  for (const auto& c : cases) {
    auto e = valid_endpoint();
    c.set(e);
    const auto hello = decode_frame(wire::encode(wire::Hello{e}).bytes());
    ASSERT_FALSE(hello) << c.name << " " << c.value;
    EXPECT_EQ(hello.error().status, Status::protocol);
    EXPECT_TRUE(contains(hello.error().found, c.name + " is " + c.value + ", allowed is "))
        << hello.error().message();
    EXPECT_FALSE(hello.error().remedy.empty());
    EXPECT_FALSE(decode_frame(wire::encode(wire::Accept{e}).bytes())) << c.name;
    EXPECT_FALSE(wire::check(e)) << c.name;
  }
}

TEST(Handshake, EveryFieldAtItsLimitIsAccepted) {
  using E = Endpoint;
  const std::vector<std::function<void(E&)>> cases{
      [](E& e) { e.gid_type = GidType::infiniband, e.lid = 1; },
      [](E& e) { e.gid_type = GidType::infiniband, e.lid = 0xbfff; },
      [](E& e) { e.gid_type = GidType::roce_v1, e.lid = 0; },
      [](E& e) { e.gid_type = GidType::embedded, e.lid = 0; },
      [](E& e) { e.gid = {}, e.gid[15] = 1; },
      [](E& e) { e.qp_num = 2; },
      [](E& e) { e.qp_num = 0xfffffe; },
      [](E& e) { e.psn = 0; },
      [](E& e) { e.psn = 0xffffff; },
      [](E& e) { e.mtu = 256; },
      [](E& e) { e.mtu = 512; },
      [](E& e) { e.mtu = 2048; },
      [](E& e) { e.mtu = 4096; },
      [](E& e) { e.max_message = e.eager_bytes = 256; },
      [](E& e) { e.max_message = 1u << 31; },
      [](E& e) { e.credits = 0; },
      [](E& e) { e.credits = 32768; },
      [](E& e) { e.incarnation = UINT64_MAX; },
      [](E& e) { e.credit_cell_address = 8; },
      [](E& e) { e.credit_cell_address = UINT64_MAX - 7; },
      [](E& e) { e.credit_cell_rkey = UINT32_MAX; },
      [](E& e) { e.max_rd_atomic = 0; },
      [](E& e) { e.max_rd_atomic = 255; },
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    auto e = valid_endpoint();
    cases[i](e);
    const auto hello = decode_frame(wire::encode(wire::Hello{e}).bytes());
    ASSERT_TRUE(hello) << "case " << i << ": " << hello.error().message();
    EXPECT_EQ(std::get<wire::Hello>(hello->body).endpoint, e) << "case " << i;
  }
}

TEST(Handshake, TruncationAtEveryByteIsRefused) {
  for (const auto& frame :
       {wire::encode(wire::Hello{valid_endpoint()}), wire::encode(wire::Accept{valid_endpoint()}),
        wire::encode(wire::Ready{5}), wire::encode(wire::make_refuse(Status::limit, "full"))}) {
    ASSERT_TRUE(decode_frame(frame.bytes()));
    for (std::size_t size = 0; size < wire::kHeaderBytes; ++size) {
      EXPECT_FALSE(wire::decode_header(frame.bytes().first(size))) << size;
    }
    const auto header = wire::decode_header(frame.bytes());
    ASSERT_TRUE(header);
    for (std::size_t size = 0; size < header->body_length; ++size) {
      const auto body = frame.bytes().subspan(wire::kHeaderBytes, size);
      EXPECT_FALSE(wire::decode_body(*header, body)) << size;
    }
  }
  for (std::size_t size = 0; size < 80; ++size) {
    const std::vector<std::byte> body(size, std::byte{8});
    EXPECT_EQ(wire::decode_ready(body).has_value(), size == wire::kReadyBytes) << size;
    EXPECT_TRUE(size == wire::kEndpointBytes || !wire::decode_endpoint(body)) << size;
  }
  EXPECT_FALSE(wire::decode_refuse({}));
}

TEST(Handshake, BodyLengthMustFitTheKind) {
  struct Case {
    wire::Frame frame;
    std::uint16_t min;
    std::uint16_t max;
  };
  const Case cases[]{{wire::encode(wire::Hello{valid_endpoint()}), 70, 70},
                     {wire::encode(wire::Accept{valid_endpoint()}), 70, 70},
                     {wire::encode(wire::Ready{1}), 8, 8},
                     {wire::encode(wire::make_refuse(Status::limit, "")), 1, 201}};
  for (const auto& c : cases) {
    for (unsigned length = 0; length <= 0xffff; length += length < 600 ? 1 : 997) {
      const auto bytes =
          with(copy_of(c.frame), header_at::body_length, static_cast<std::uint16_t>(length));
      const auto header = wire::decode_header(bytes);
      ASSERT_EQ(header.has_value(), length >= c.min && length <= c.max) << length;
      if (!header) {
        EXPECT_TRUE(contains(header.error().found, "body length is " + std::to_string(length)))
            << header.error().message();
      }
    }
  }
}

TEST(Handshake, UnknownKindIsRefusedByNumber) {
  const auto hello = copy_of(wire::encode(wire::Hello{valid_endpoint()}));
  for (const unsigned kind : {0u, 12u, 257u, 65535u}) {
    const auto header =
        wire::decode_header(with(hello, header_at::kind, static_cast<std::uint16_t>(kind)));
    ASSERT_FALSE(header) << kind;
    EXPECT_TRUE(contains(header.error().found, "kind is " + std::to_string(kind)))
        << header.error().message();
  }
}

TEST(Handshake, HighestCommonVersionWins) {
  struct Case {
    wire::VersionRange ours, theirs;
    std::uint16_t agreed;
  };
  for (const auto& c : {Case{{1, 1}, {1, 1}, 1}, Case{{1, 1}, {1, 9}, 1}, Case{{1, 4}, {2, 3}, 3},
                        Case{{2, 3}, {1, 4}, 3}, Case{{1, 3}, {3, 5}, 3}, Case{{3, 5}, {1, 3}, 3},
                        Case{{1, 0xffff}, {0xffff, 0xffff}, 0xffff}}) {
    const auto frame = wire::encode(wire::Ready{1}, {c.theirs, 0});
    const auto header = wire::decode_header(frame.bytes(), c.ours);
    ASSERT_TRUE(header) << header.error().message();
    EXPECT_EQ(header->version, c.agreed);
    EXPECT_EQ(header->versions, c.theirs);
  }
}

TEST(Handshake, VersionMismatchNamesBothSides) {
  const auto newer = wire::encode(wire::Hello{valid_endpoint()}, {{3, 5}, 0});
  const auto header = wire::decode_header(newer.bytes(), {1, 2});
  ASSERT_FALSE(header);
  EXPECT_EQ(header.error().status, Status::unsupported);
  EXPECT_EQ(header.error().found, "the peer speaks version 3 to 5, we speak version 1 to 2");

  const auto older = wire::encode(wire::Hello{valid_endpoint()}, {{1, 1}, 0});
  const auto other = wire::decode_header(older.bytes(), {2, 2});
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().found, "the peer speaks version 1, we speak version 2");
  EXPECT_EQ(other.error().remedy, "upgrade the older end");

  const auto inverted = wire::encode(wire::Ready{1}, {{2, 1}, 0});
  const auto absurd = wire::decode_header(inverted.bytes());
  ASSERT_FALSE(absurd);
  EXPECT_EQ(absurd.error().status, Status::protocol);
  EXPECT_TRUE(contains(absurd.error().found, "2 to 1")) << absurd.error().message();
}

// A mismatch is detected from a header whose other fields a later version may have redefined.
TEST(Handshake, VersionMismatchComesBeforeUnknownKindsAndLengths) {
  auto bytes = copy_of(wire::encode(wire::Hello{valid_endpoint()}, {{7, 7}, 0}));
  bytes = with<std::uint16_t>(bytes, header_at::kind, 99);
  bytes = with<std::uint16_t>(bytes, header_at::body_length, 9999);
  const auto header = wire::decode_header(bytes);
  ASSERT_FALSE(header);
  EXPECT_EQ(header.error().status, Status::unsupported);
}

TEST(Handshake, FieldsAppendedByANewerPeerAreSkipped) {
  auto bytes = copy_of(wire::encode(wire::Hello{valid_endpoint()}, {{1, 2}, 0}));
  bytes.resize(bytes.size() + 6, std::byte{0xee});
  bytes = with<std::uint16_t>(bytes, header_at::body_length, wire::kEndpointBytes + 6);
  const auto hello = decode_frame(bytes);
  ASSERT_TRUE(hello) << hello.error().message();
  EXPECT_EQ(std::get<wire::Hello>(hello->body).endpoint, valid_endpoint());
  EXPECT_FALSE(decode_frame(bytes, {1, 2})) << "a peer of our own version appends nothing";

  // Even then a frame stays within its limit.
  const auto longest = static_cast<std::uint16_t>(wire::kFrameBytesMax - wire::kHeaderBytes);
  EXPECT_TRUE(wire::decode_header(with(bytes, header_at::body_length, longest)));
  const auto over = static_cast<std::uint16_t>(longest + 1);
  EXPECT_FALSE(wire::decode_header(with(bytes, header_at::body_length, over)));
}

TEST(Handshake, RefusalStatusIsChecked) {
  const auto frame = copy_of(wire::encode(wire::make_refuse(Status::limit, "no")));
  const std::size_t at = wire::kHeaderBytes + refuse_at::status;
  for (unsigned status = 0; status < 256; ++status) {
    const auto refuse = decode_frame(with(frame, at, static_cast<std::uint8_t>(status)));
    const bool known = status != 0 && status < static_cast<unsigned>(spinwire::kStatusCount);
    ASSERT_EQ(refuse.has_value(), known) << status;
    if (known) {
      EXPECT_EQ(static_cast<unsigned>(std::get<wire::Refuse>(refuse->body).status), status);
    }
  }
  // A newer peer may know more statuses than we do, but success is none of them.
  auto newer = copy_of(wire::encode(wire::make_refuse(Status::limit, "no"), {{1, 2}, 0}));
  const auto refuse = decode_frame(with<std::uint8_t>(newer, at, 200));
  ASSERT_TRUE(refuse) << refuse.error().message();
  EXPECT_EQ(std::get<wire::Refuse>(refuse->body).status, Status::refused);
  EXPECT_FALSE(decode_frame(with<std::uint8_t>(newer, at, 0)));
  EXPECT_EQ(wire::make_refuse(Status::ok, "").status, Status::refused);
}

TEST(Handshake, RefusalTextIsCutAndMadePrintable) {
  const auto refuse = wire::make_refuse(Status::limit, std::string(300, 'y') + "z");
  EXPECT_EQ(refuse.message(), std::string(200, 'y'));
  EXPECT_EQ(wire::make_refuse(Status::limit, "a\nb\x1b[31m\x7f\xff~ ").message(), "a?b?[31m??~ ");

  // The peer may have another encoder.
  auto frame = copy_of(wire::encode(wire::make_refuse(Status::limit, "abcd")));
  frame[wire::kHeaderBytes + refuse_at::text + 1] = std::byte{0x1b};
  frame[wire::kHeaderBytes + refuse_at::text + 3] = std::byte{0};
  const auto decoded = decode_frame(frame);
  ASSERT_TRUE(decoded);
  EXPECT_EQ(std::get<wire::Refuse>(decoded->body).message(), "a?c?");
}

TEST(Handshake, StrangersAreKnownByTheirFirstBytes) {
  const auto see = [](std::string_view text) {
    return wire::check_magic(std::as_bytes(std::span(text.data(), text.size())));
  };
  EXPECT_TRUE(see(""));
  EXPECT_TRUE(see("S"));
  EXPECT_TRUE(see("SPN"));
  EXPECT_TRUE(see("SPNWxyz"));
  for (const std::string_view text : {"X", "SX", "SPX", "SPNX", "spnw", "G"}) {
    EXPECT_FALSE(see(text)) << text;
  }
  const auto http = see("GET / HTTP/1.1\r\nHost: x\r\n");
  ASSERT_FALSE(http);
  EXPECT_EQ(http.error().status, Status::protocol);
  EXPECT_TRUE(contains(http.error().found, "'GET / HTTP/1.1..' (47 45 54")) << http.error().found;
  EXPECT_TRUE(contains(http.error().found, "an HTTP request")) << http.error().found;
  EXPECT_TRUE(contains(http.error().found, "ours begins with 'SPNW'")) << http.error().found;
  const auto tls = see("\x16\x03\x01");
  ASSERT_FALSE(tls);
  EXPECT_TRUE(contains(tls.error().found, "a TLS handshake")) << tls.error().found;
  const auto ssh = see("SSH-2.0-x");
  ASSERT_FALSE(ssh);
  EXPECT_TRUE(contains(ssh.error().found, "an SSH peer")) << ssh.error().found;
}

/// The conditions of a header, independent of the decoder.
bool plausible_header(std::span<const std::byte> b) {
  if (b.size() < 16) return false;
  const auto at = [&](std::size_t i) { return std::to_integer<unsigned>(b[i]); };
  if (at(0) != 'S' || at(1) != 'P' || at(2) != 'N' || at(3) != 'W') return false;
  const unsigned min = at(4) | at(5) << 8;
  const unsigned max = at(6) | at(7) << 8;
  const unsigned kind = at(8) | at(9) << 8;
  const unsigned length = at(10) | at(11) << 8;
  if (min > 1 || max < 1 || kind < 1 || kind > 11) return false;
  constexpr unsigned kLeast[] = {0, 70, 70, 1, 8, 56, 56, 82, 8, 64, 64, 32};
  const unsigned features = at(12);
  const bool has_data = (features & 16) != 0 && (kind == 1 || kind == 2 || kind == 5 || kind == 6);
  const unsigned numbers =
      kind == 3 ? ((features & 32) != 0 ? 4u : 0u) + ((features & 128) != 0 ? 4u : 0u) : 0u;
  const unsigned least = kLeast[kind] + (has_data ? 3 : numbers);
  const unsigned known = (kind == 3    ? 201
                          : kind == 11 ? 528
                                       : kLeast[kind]) +
                         (has_data ? 258 : numbers);
  const unsigned most = max > 1 ? std::max(496u, known) : known;
  return length >= least && length <= most;
}

/// A valid frame of each kind, in the order of their numbers.
std::vector<std::vector<std::byte>> one_of_each_kind() {
  const wire::SessionEnd end = wire_test::valid_session_end();
  return {copy_of(wire::encode(wire::Hello{valid_endpoint()})),
          copy_of(wire::encode(wire::Accept{valid_endpoint()})),
          copy_of(wire::encode(wire::make_refuse(Status::limit, "full"))),
          copy_of(wire::encode(wire::Ready{9})),
          copy_of(wire::encode(wire::OpenSession{end})),
          copy_of(wire::encode(wire::SessionOpened{end})),
          copy_of(wire::encode(wire::JoinSession{valid_endpoint(), 5, 7})),
          copy_of(wire::encode(wire::PathResponse{7})),
          copy_of(wire::encode(wire::Authenticate{})),
          copy_of(wire::encode(wire::Authenticated{})),
          copy_of(wire::begin_sealed(16))};
}

TEST(Handshake, RandomBytesNeverPassForAHeader) {
  std::mt19937_64 random(20240607);
  const auto frames = one_of_each_kind();
  std::array<int, 12> accepted{};
  int refused = 0;
  for (int round = 0; round < 200000; ++round) {
    // A third is noise, a third has the magic, and a third is a good frame with a few changed
    // bytes.
    std::vector<std::byte> bytes(random() % 80);
    if (round % 3 == 2) bytes = frames[random() % frames.size()];
    const std::size_t changes = round % 3 == 2 ? random() % 3 : bytes.size();
    for (std::size_t i = 0; i < changes; ++i) {
      const std::size_t at = round % 3 == 2 ? random() % 16 : i;
      bytes[at] = static_cast<std::byte>(random() % (random() % 2 == 0 ? 8 : 256));
    }
    for (std::size_t i = 0; round % 3 == 1 && i < std::min<std::size_t>(4, bytes.size()); ++i) {
      bytes[i] = static_cast<std::byte>(wire::kMagic[i]);
    }
    const auto header = wire::decode_header(bytes);
    ASSERT_EQ(header.has_value(), plausible_header(bytes)) << "round " << round;
    if (header) {
      ++accepted.at(static_cast<std::size_t>(header->kind));
    } else if (round % 3 == 2) {
      ++refused;
    }
  }
  // The inputs reach both results: each kind is accepted, and altered frames are refused.
  for (std::size_t kind = 1; kind < accepted.size(); ++kind)
    EXPECT_GT(accepted[kind], 1000) << "kind " << kind;
  EXPECT_GT(refused, 10000);
}

TEST(Handshake, RandomBodiesYieldOnlyValidValues) {
  std::mt19937_64 random(7);
  const auto good = copy_of(wire::encode(wire::Accept{valid_endpoint()}));
  int accepted = 0;
  for (int round = 0; round < 100000; ++round) {
    std::vector<std::byte> body(good.begin() + wire::kHeaderBytes, good.end());
    if (round % 2 == 0) body.resize(random() % 260);
    const std::size_t changes = round % 2 == 0 ? body.size() : random() % 3;
    for (std::size_t i = 0; i < changes; ++i) {
      body[random() % body.size()] = static_cast<std::byte>(random());
    }
    if (const auto endpoint = wire::decode_endpoint(body)) {
      ++accepted;
      EXPECT_TRUE(wire::check(*endpoint));
      // An accepted frame contains everything that was on the wire.
      const auto again = copy_of(wire::encode(wire::Accept{*endpoint}));
      EXPECT_TRUE(std::equal(body.begin(), body.end(), again.begin() + wire::kHeaderBytes));
    }
    if (const auto refuse = wire::decode_refuse(body, round % 4 == 0)) {
      EXPECT_NE(refuse->status, Status::ok);
      const auto text = refuse->message();
      EXPECT_TRUE(std::all_of(text.begin(), text.end(), [](char c) { return c >= 32 && c < 127; }));
    }
    if (const auto ready = wire::decode_ready(body)) {
      EXPECT_NE(ready->incarnation, 0u);
    }
  }
  EXPECT_GT(accepted, 1000) << "the inputs must reach both answers";
}

}  // namespace handshake_test
