#include "wire/rpc_datagram.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <vector>

#include "base/random.h"
#include "wire/endpoints.h"
#include "wire/handshake.h"

namespace rpc_wire_test {
namespace {

using namespace spinwire;
using namespace spinwire::wire;
using wire_test::valid_session_end;

/// Whether a datagram with this header and `payload` bytes is decoded.
bool taken(const RpcHeader& header, std::size_t payload) {
  std::vector<std::byte> bytes(sizeof header + payload);
  std::memcpy(bytes.data(), &header, sizeof header);
  RpcHeader read{};
  const bool good = decode(bytes.data(), bytes.size(), read);
  EXPECT_TRUE(!good || std::memcmp(&read, &header, sizeof header) == 0);
  return good;
}

TEST(RpcHeader, TheShortChecksTakeWhatTheLongOneTakes) {
  base::Random random(1);
  int requests = 0, replies = 0;
  for (int i = 0; i < 200'000; ++i) {
    const std::size_t payload = random.below(4);
    RpcHeader h{};
    h.session = static_cast<std::uint32_t>(random.next());
    h.number = static_cast<std::uint32_t>(random.next());
    h.method = static_cast<std::uint16_t>(random.next());
    h.kind = static_cast<RpcKind>(random.below(4));
    h.status = static_cast<std::uint8_t>(random.below(3));
    h.length = static_cast<std::uint16_t>(random.below(4));
    h.window = static_cast<std::uint16_t>(random.below(3));
    RpcHeader same = unpack(pack(h));
    ASSERT_EQ(std::memcmp(&same, &h, sizeof h), 0);
    const bool good = taken(h, payload);
    const bool request = good && h.kind == RpcKind::request;
    RpcHeader granting = h;  // its receiver checks that the window is not 0
    granting.window = 1;
    const bool reply = taken(granting, payload) && h.kind == RpcKind::reply && h.status == 0;
    ASSERT_EQ(is_request(pack(h), payload), request);
    ASSERT_EQ(is_good_reply(pack(h), payload), reply);
    // Fewer bytes than a header.
    ASSERT_FALSE(is_request(pack(h), payload - 8));
    ASSERT_FALSE(is_good_reply(pack(h), payload - 8));
    RpcHeader below = h;  // an impossible length, though its low bits look valid
    below.length = static_cast<std::uint16_t>(payload - 8);
    ASSERT_FALSE(is_request(pack(below), payload - 8));
    ASSERT_FALSE(is_good_reply(pack(below), payload - 8));
    requests += request ? 1 : 0;
    replies += reply ? 1 : 0;
  }
  EXPECT_GT(requests, 100);
  EXPECT_GT(replies, 100);
}

TEST(RpcHeader, EachKindHasWhatIsItsOwn) {
  EXPECT_TRUE(taken({1, 2, 3, RpcKind::request, 0, 0, 0}, 0));
  EXPECT_TRUE(taken({1, 2, 3, RpcKind::request, 0, 4032, 0}, 4032));
  EXPECT_FALSE(taken({1, 2, 3, RpcKind::request, 0, 4, 0}, 5)) << "another length";
  EXPECT_FALSE(taken({1, 2, 3, RpcKind::request, 0, 5, 0}, 4)) << "more than came";
  EXPECT_FALSE(taken({1, 2, 3, RpcKind::request, 1, 0, 0}, 0)) << "a status";
  EXPECT_FALSE(taken({1, 2, 3, RpcKind::request, 0, 0, 1}, 0)) << "a window";
  EXPECT_TRUE(taken({1, 2, 0, RpcKind::reply, 17, 9, 8}, 9));
  EXPECT_FALSE(taken({1, 2, 0, RpcKind::reply, 0, 0, 0}, 0)) << "no window";
  EXPECT_TRUE(taken({1, 2, 0, RpcKind::reply, kStatusCount - 1, 0, 8}, 0));
  EXPECT_FALSE(taken({1, 2, 0, RpcKind::reply, kStatusCount, 0, 8}, 0)) << "no status";
  EXPECT_TRUE(taken({1, 2, 0xffff, RpcKind::reply, 0, 0, 8}, 0)) << "for how long it was there";
  for (const RpcKind kind : {RpcKind::ping, RpcKind::pong, RpcKind::close, RpcKind::closed}) {
    EXPECT_TRUE(taken({1, 0, 0, kind, 0, 0, 0}, 0));
    EXPECT_TRUE(taken(session_header(1, 2, kind, 0x12345678), 0));
    EXPECT_FALSE(taken({1, 0, 0, kind, 0, 1, 0}, 1)) << "a payload";
    EXPECT_FALSE(taken({1, 0, 0, kind, 1, 0, 0}, 0)) << "a status";
  }
  EXPECT_FALSE(taken({1, 2, 3, RpcKind{0}, 0, 0, 0}, 0));
  EXPECT_FALSE(taken({1, 2, 3, RpcKind{8}, 0, 0, 0}, 0));
}

TEST(RpcHeader, OnlyARefusalHasACode) {
  constexpr std::uint8_t kRefused = static_cast<std::uint8_t>(Status::refused) | kHasCode;
  EXPECT_TRUE(taken({1, 2, 0, RpcKind::reply, kRefused, 4, 8}, 4));
  EXPECT_TRUE(taken({1, 2, 0, RpcKind::reply, kRefused, 48, 8}, 48));
  for (std::uint16_t bytes = 0; bytes < kRefusalCodeBytes; ++bytes)
    EXPECT_FALSE(taken({1, 2, 0, RpcKind::reply, kRefused, bytes, 8}, bytes)) << "no code";
  EXPECT_FALSE(taken({1, 2, 0, RpcKind::reply, kRefused, 4, 0}, 4)) << "no window";
  EXPECT_FALSE(taken({1, 2, 3, RpcKind::request, kRefused, 4, 0}, 4)) << "a request";
  for (std::uint8_t status = 0; status < kHasCode; ++status) {
    const auto byte = static_cast<std::uint8_t>(status | kHasCode);
    EXPECT_EQ(taken({1, 2, 0, RpcKind::reply, byte, 9, 8}, 9), byte == kRefused) << int{status};
  }
}

TEST(RpcHeader, AProofComesBackAndLeavesTheTokenUnknown) {
  for (const std::uint32_t proof : {0u, 1u, 0xffffu, 0x10000u, 0xffffffffu})
    EXPECT_EQ(proof_of(unpack(pack(session_header(1, 2, RpcKind::close, proof)))), proof);
  const std::uint64_t token = 0x8899aabbccddeeff;
  EXPECT_NE(session_proof(token), session_proof(token ^ 2));
  EXPECT_NE(session_proof(token), session_proof(token ^ std::uint64_t{1} << 63));
  EXPECT_NE(session_proof(token), static_cast<std::uint32_t>(token));
  EXPECT_NE(session_proof(token), static_cast<std::uint32_t>(token >> 32));
}

TEST(RpcHeader, ATruncatedOneIsRefused) {
  const RpcHeader header{1, 2, 3, RpcKind::request, 0, 0, 0};
  std::array<std::byte, sizeof header> bytes;
  std::memcpy(bytes.data(), &header, sizeof header);
  RpcHeader read{};
  for (std::size_t n = 0; n < bytes.size(); ++n) EXPECT_FALSE(decode(bytes.data(), n, read)) << n;
}

Result<Received> decode_frame(const Frame& frame) { return wire_test::decode_frame(frame.bytes()); }

TEST(SessionFrames, ComeBackAsSent) {
  const SessionEnd e = valid_session_end();
  const auto open = decode_frame(encode(OpenSession{e}));
  ASSERT_TRUE(open) << open.error().message();
  EXPECT_EQ(std::get<OpenSession>(open->body).end.token, e.token);
  SessionEnd theirs = e;
  theirs.token = 0;
  EXPECT_FALSE(decode_frame(encode(SessionOpened{theirs}))) << "a server gives a token";
  EXPECT_FALSE(decode_frame(encode(OpenSession{theirs}))) << "and a client";
  theirs.token = 0x8899aabbccddeeff;
  const auto opened = decode_frame(encode(SessionOpened{theirs}));
  ASSERT_TRUE(opened) << opened.error().message();
  EXPECT_EQ(std::get<SessionOpened>(opened->body).end.token, theirs.token);
  for (const SessionEnd& r :
       {std::get<OpenSession>(open->body).end, std::get<SessionOpened>(opened->body).end}) {
    EXPECT_EQ(r.gid, e.gid);
    EXPECT_EQ(r.gid_type, e.gid_type);
    EXPECT_EQ(r.qp_num, e.qp_num);
    EXPECT_EQ(r.qkey, e.qkey);
    EXPECT_EQ(r.name, e.name);
    EXPECT_EQ(r.window, e.window);
    EXPECT_EQ(r.mtu, e.mtu);
    EXPECT_EQ(r.lid, e.lid);
    EXPECT_EQ(r.incarnation, e.incarnation);
    EXPECT_EQ(r.first, e.first);
  }
}

TEST(SessionFrames, TellWhetherAnEndTakesTheCodesOfRefusals) {
  for (const bool takes : {false, true}) {
    SessionEnd e = valid_session_end();
    e.refusal_codes = takes;
    const auto open = decode_frame(encode(OpenSession{e}));
    ASSERT_TRUE(open) << open.error().message();
    EXPECT_EQ(std::get<OpenSession>(open->body).end.refusal_codes, takes);
  }
}

TEST(SessionFrames, TellHowLongDirectDatagramsMayBe) {
  namespace wire = spinwire::wire;
  for (const std::uint32_t longest : {std::uint32_t{0}, wire::kPageDatagramBytes,
                                      wire::kLongDatagramBytes, wire::kBlockDatagramBytes}) {
    SessionEnd e = valid_session_end();
    e.direct_datagrams = longest;
    const auto open = decode_frame(encode(OpenSession{e}));
    const auto opened = decode_frame(encode(SessionOpened{e}));
    ASSERT_TRUE(open && opened);
    EXPECT_EQ(std::get<OpenSession>(open->body).end.direct_datagrams, longest);
    EXPECT_EQ(std::get<SessionOpened>(opened->body).end.direct_datagrams, longest);
    const std::uint32_t bits = open->header.features;
    EXPECT_EQ((bits & wire::feature::page_datagrams) != 0, longest != 0);
    EXPECT_EQ((bits & wire::feature::long_datagrams) != 0, longest > wire::kPageDatagramBytes);
    EXPECT_EQ((bits & wire::feature::block_datagrams) != 0, longest > wire::kLongDatagramBytes);
  }
  // A peer that offers a length without the shorter ones does not offer it.
  const auto offered = [](std::uint32_t features) {
    const auto frame =
        decode_frame(encode(OpenSession{valid_session_end()}, {wire::kVersions, features}));
    EXPECT_TRUE(frame);
    return frame ? std::get<OpenSession>(frame->body).end.direct_datagrams : ~0u;
  };
  EXPECT_EQ(offered(wire::feature::long_datagrams), 0u);
  EXPECT_EQ(offered(wire::feature::block_datagrams | wire::feature::long_datagrams), 0u);
  EXPECT_EQ(offered(wire::feature::block_datagrams | wire::feature::page_datagrams),
            wire::kPageDatagramBytes);
}

TEST(SessionFrames, APathResponseComesBackAsSent) {
  const auto shown = decode_frame(encode(PathResponse{0x8899aabbccddeeff}));
  ASSERT_TRUE(shown) << shown.error().message();
  EXPECT_EQ(std::get<PathResponse>(shown->body).token, 0x8899aabbccddeeff);
  const auto none = decode_frame(encode(PathResponse{0}));
  ASSERT_FALSE(none);
  EXPECT_NE(none.error().found.find("token"), std::string::npos) << none.error().message();
}

TEST(SessionFrames, TellOfAnEndWithoutDatagrams) {
  SessionEnd e = valid_session_end();
  e.qp_num = 0;
  e.gid = {};
  e.gid_type = GidType::unknown;
  const auto open = decode_frame(encode(OpenSession{e}));
  ASSERT_TRUE(open) << open.error().message();
  EXPECT_EQ(std::get<OpenSession>(open->body).end.qp_num, 0u);
  EXPECT_EQ(std::get<OpenSession>(open->body).end.qkey, e.qkey);
}

TEST(SessionFrames, EveryFieldBeyondItsLimitIsRefusedByName) {
  const auto refused = [](const SessionEnd& e, const char* field) {
    const auto read = decode_frame(encode(OpenSession{e}));
    ASSERT_FALSE(read) << field;
    EXPECT_EQ(read.error().status, Status::protocol);
    EXPECT_NE(read.error().found.find(field), std::string::npos) << read.error().message();
  };
  SessionEnd e = valid_session_end();
  e.gid = {};
  refused(e, "gid");
  e = valid_session_end();
  e.gid_type = static_cast<GidType>(9);
  refused(e, "gid_type");
  e = valid_session_end();
  e.qp_num = 1;
  refused(e, "qp_num");
  e = valid_session_end();
  e.qkey = 0x80000000;
  refused(e, "qkey");
  e = valid_session_end();
  e.name = 0;
  refused(e, "name");
  for (const unsigned window : {0u, 3u, 65u, 128u}) {
    e = valid_session_end();
    e.window = static_cast<std::uint16_t>(window);
    refused(e, "window");
  }
  for (const unsigned mtu : {0u, 255u, 4097u}) {
    e = valid_session_end();
    e.mtu = static_cast<std::uint16_t>(mtu);
    refused(e, "mtu");
  }
  e = valid_session_end();
  e.incarnation = 0;
  refused(e, "incarnation");
  e = valid_session_end();
  e.first = 32;
  refused(e, "first");
}

}  // namespace
}  // namespace rpc_wire_test
