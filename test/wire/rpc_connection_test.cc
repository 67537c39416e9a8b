#include "wire/rpc_connection.h"

#include <gtest/gtest.h>

#include <vector>

#include "wire/endpoints.h"
#include "wire/handshake.h"

namespace rpc_long_calls_wire_test {
namespace {

using namespace spinwire;
using namespace spinwire::wire;

/// Whether a message with this header and `behind` bytes is decoded, and unchanged.
bool taken(const RpcMessageHeader& header, std::size_t behind) {
  const auto head = encode(header);
  std::vector<std::byte> bytes(head.begin(), head.end());
  bytes.resize(bytes.size() + behind);
  RpcMessageHeader read;
  std::span<const std::byte> payload;
  if (!decode(bytes, read, payload)) return false;
  EXPECT_EQ(encode(read), head);
  EXPECT_EQ(payload.size(), behind);
  EXPECT_EQ(payload.data(), bytes.data() + kRpcMessageHeaderBytes);
  return true;
}

TEST(RpcLongCallsHeader, EachKindHasWhatIsItsOwn) {
  const auto call = RpcMessageKind::call;
  EXPECT_TRUE(taken({1, 2, call, 0, 0, 0, 0, 0}, 0));
  EXPECT_TRUE(taken({1, 2, call, 0, 9, 0, 0, 0}, 9));
  EXPECT_TRUE(taken({1, 2, call, 0, 9, 0, 0, 0}, 0)) << "the request comes apart";
  EXPECT_TRUE(taken({1, 2, call, 0, 9, 100, 0x1000, 7}, 9));
  EXPECT_FALSE(taken({1, 2, call, 0, 9, 0, 0, 0}, 8)) << "less than it says";
  EXPECT_FALSE(taken({1, 2, call, 0, 0, 0, 0, 0}, 1)) << "more";
  EXPECT_FALSE(taken({1, 2, call, 1, 0, 0, 0, 0}, 0)) << "a status";
  EXPECT_FALSE(taken({1, 2, call, 0, 0, 0, 0x1000, 7}, 0)) << "no room, but a place";
  EXPECT_FALSE(taken({1, 2, call, 0, 0, 0, 0, 7}, 0)) << "no room, but a key";
  EXPECT_TRUE(taken({1, 2, call, 0, 9, 100, 0, 0}, 9)) << "the client places the reply";
  EXPECT_FALSE(taken({1, 2, call, 0, 0, 100, 0x1000, 0}, 0)) << "a place without a key";
  EXPECT_FALSE(taken({1, 2, call, 0, 0, 100, ~std::uint64_t{0} - 9, 7}, 0)) << "beyond the end";
  EXPECT_TRUE(taken({1, 0, RpcMessageKind::reply, 17, 9, 0, 0, 0}, 9));
  EXPECT_TRUE(taken({1, 0, RpcMessageKind::reply, kStatusCount - 1, 0, 0, 0, 0}, 0));
  EXPECT_FALSE(taken({1, 0, RpcMessageKind::reply, kStatusCount, 0, 0, 0, 0}, 0)) << "no status";
  EXPECT_FALSE(taken({1, 0, RpcMessageKind::reply, 0, 9, 0, 0, 0}, 0)) << "its payload never comes";
  EXPECT_FALSE(taken({1, 2, RpcMessageKind::reply, 0, 0, 0, 0, 0}, 0)) << "a method";
  EXPECT_FALSE(taken({1, 0, RpcMessageKind::reply, 0, 0, 9, 0x1000, 7}, 0)) << "room";
  EXPECT_FALSE(taken({1, 0, RpcMessageKind::reply, 0, 0, 0, 0x1000, 0}, 0)) << "a place";
  for (const RpcMessageKind kind : {RpcMessageKind::cancel, RpcMessageKind::cancelled}) {
    EXPECT_TRUE(taken({1, 0, kind, 0, 0, 0, 0, 0}, 0));
    EXPECT_FALSE(taken({1, 0, kind, 0, 1, 0, 0, 0}, 1)) << "a payload";
    EXPECT_FALSE(taken({1, 0, kind, 0, 0, 0, 0, 0}, 1)) << "a payload that is not told of";
    EXPECT_FALSE(taken({1, 0, kind, 1, 0, 0, 0, 0}, 0)) << "a status";
  }
  EXPECT_FALSE(taken({1, 0, RpcMessageKind{0}, 0, 0, 0, 0, 0}, 0));
  EXPECT_FALSE(taken({1, 0, RpcMessageKind{5}, 0, 0, 0, 0, 0}, 0));
}

TEST(RpcLongCallsHeader, OnlyARefusalHasACode) {
  constexpr std::uint8_t kRefused = static_cast<std::uint8_t>(Status::refused) | kHasCode;
  const auto reply = RpcMessageKind::reply;
  EXPECT_TRUE(taken({1, 0, reply, kRefused, 9, 0, 0, 0, 77}, 9));
  EXPECT_TRUE(taken({1, 0, reply, kRefused, 0, 0, 0, 0, 0}, 0)) << "the code 0";
  EXPECT_FALSE(taken({1, 0, reply, kRefused & ~kHasCode, 9, 0, 0, 0, 77}, 9)) << "not announced";
  EXPECT_FALSE(taken({1, 0, reply, kHasCode, 9, 0, 0, 0, 77}, 9)) << "no refusal";
  EXPECT_FALSE(taken({1, 0, reply, 0, 9, 0, 0, 0, 77}, 9));
  EXPECT_FALSE(taken({1, 2, RpcMessageKind::call, 0, 0, 0, 0, 0, 77}, 0));
  EXPECT_FALSE(taken({1, 2, RpcMessageKind::call, kRefused, 0, 0, 0, 0, 77}, 0));
  EXPECT_FALSE(taken({1, 0, RpcMessageKind::cancelled, kRefused, 0, 0, 0, 0, 77}, 0));
}

TEST(RpcLongCallsHeader, ATruncatedOneAndOneWithMoreFieldsAreRefused) {
  auto bytes = encode(RpcMessageHeader{1, 2, RpcMessageKind::call, 0, 0, 0, 0, 0});
  RpcMessageHeader read;
  std::span<const std::byte> payload;
  for (std::size_t n = 0; n < bytes.size(); ++n)
    EXPECT_FALSE(decode(std::span(bytes).first(n), read, payload)) << n;
  EXPECT_TRUE(decode(bytes, read, payload));
  bytes[28] = std::byte{1};
  EXPECT_FALSE(decode(bytes, read, payload));
}

JoinSession sample_join() {
  JoinSession join;
  join.endpoint = wire_test::valid_endpoint();
  join.session = 0x100005;
  join.token = 0x1122334455667788;
  return join;
}

TEST(JoinFrame, ComesBackAsSent) {
  const JoinSession sent = sample_join();
  const auto read = wire_test::decode_frame(encode(sent).bytes());
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_EQ(to_string(read->header.kind), "join session");
  const auto& join = std::get<JoinSession>(read->body);
  EXPECT_EQ(join.endpoint, sent.endpoint);
  EXPECT_EQ(join.session, sent.session);
  EXPECT_EQ(join.token, sent.token);
}

TEST(JoinFrame, WhatIsWrongInItIsNamed) {
  const auto refused = [](const JoinSession& join, const char* field) {
    const auto read = wire_test::decode_frame(encode(join).bytes());
    ASSERT_FALSE(read) << field;
    EXPECT_EQ(read.error().status, Status::protocol);
    EXPECT_NE(read.error().found.find(field), std::string::npos) << read.error().message();
  };
  JoinSession join = sample_join();
  join.session = 0;
  refused(join, "session is 0");
  join = sample_join();
  join.token = 0;
  refused(join, "token is 0");
  join = sample_join();
  join.endpoint.incarnation = 0;
  refused(join, "incarnation");
  const Frame frame = encode(sample_join());
  EXPECT_FALSE(decode_join(frame.bytes().subspan(kHeaderBytes + 1)));
}

}  // namespace
}  // namespace rpc_long_calls_wire_test
