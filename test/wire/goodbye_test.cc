#include "wire/goodbye.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <vector>

#include "spinwire/status.h"
#include "wire/cm_data.h"
#include "wire/handshake.h"
#include "wire/message_header.h"
#include "wire/rpc_connection.h"
#include "wire/rpc_datagram.h"

namespace spinwire::wire {
namespace {

using namespace std::chrono_literals;

TEST(WireGoodbye, AReasonAndATimeAreTheSameAfterARoundTrip) {
  for (const Goodbye& sent :
       {Goodbye{GoodbyeReason::draining, 0ms}, Goodbye{GoodbyeReason::draining, 250ms},
        Goodbye{GoodbyeReason::overloaded, kMaxRetryAfter}}) {
    Goodbye got;
    ASSERT_TRUE(decode(encode(sent), got));
    EXPECT_EQ(got, sent);
  }
  EXPECT_EQ(encode(Goodbye{GoodbyeReason::draining, 250ms}), 250u << 8 | 2u);
}

TEST(WireGoodbye, AClosingApplicationSaysNothing) {
  EXPECT_EQ(encode(Goodbye{}), 0u);
  EXPECT_EQ(encode(Goodbye{GoodbyeReason::closed, 0ms}), 0u);
  Goodbye got;
  ASSERT_TRUE(decode(0, got));
  EXPECT_EQ(got, (Goodbye{GoodbyeReason::closed, 0ms}));
}

TEST(WireGoodbye, ATimeIsRoundedUpAndBounded) {
  Goodbye got;
  ASSERT_TRUE(decode(encode(Goodbye{GoodbyeReason::draining, 1ns}), got));
  EXPECT_EQ(got.retry_after, 1ms);
  ASSERT_TRUE(decode(encode(Goodbye{GoodbyeReason::draining, 100h}), got));
  EXPECT_EQ(got.retry_after, kMaxRetryAfter);
}

TEST(WireGoodbye, UnknownReasonsAndLongTimesAreMalformed) {
  Goodbye got;
  for (const std::uint32_t bad : {1u, 4u, 255u, 1u << 8, (kMaxRetryAfterMs + 1) << 8 | 2u,
                                  kAwaitsGoodbye | 2u, kAwaitsGoodbye})
    EXPECT_FALSE(decode(bad, got)) << bad;
  bool awaits = false;
  EXPECT_TRUE(decode(kAwaitsGoodbye | 2u, got, awaits));
  EXPECT_TRUE(awaits);
  EXPECT_TRUE(decode(2u, got, awaits));
  EXPECT_FALSE(awaits);
  EXPECT_FALSE(decode(kAwaitsGoodbye, got, awaits)) << "an application that just closes";
}

TEST(WireGoodbye, AMessageOfOneIsBareAndWellFormed) {
  const auto decodes = [](std::uint32_t number, std::size_t bytes) {
    std::array<std::byte, 16> message{};
    put(encode(MessageHeader{MessageKind::goodbye, 0, 0, number}), message.data());
    MessageHeader header{};
    return decode(message.data(), bytes, header);
  };
  EXPECT_TRUE(decodes(0, kMessageHeaderBytes));
  EXPECT_TRUE(decodes(2 | 250 << 8, kMessageHeaderBytes));
  EXPECT_TRUE(decodes(2 | kAwaitsGoodbye, kMessageHeaderBytes));
  EXPECT_FALSE(decodes(2, kMessageHeaderBytes + 1));
  EXPECT_FALSE(decodes(9, kMessageHeaderBytes));
}

TEST(WireGoodbye, OfASessionHasNoStatusAndNoPayload) {
  RpcMessageHeader sent{encode(Goodbye{GoodbyeReason::overloaded, 3ms}), 0,
                        RpcMessageKind::goodbye};
  RpcMessageHeader got;
  std::span<const std::byte> payload;
  EXPECT_TRUE(decode(encode(sent), got, payload));
  EXPECT_EQ(got.number, sent.number);
  sent.status = 1;
  EXPECT_FALSE(decode(encode(sent), got, payload));
  sent.status = 0;
  sent.number = 7;
  EXPECT_FALSE(decode(encode(sent), got, payload));

  RpcHeader datagram = session_header(1, 2, RpcKind::goodbye, 3);
  const auto is_good = [&datagram](std::size_t bytes) {
    const RpcWords words = pack(datagram);
    std::array<std::byte, 32> at{};
    std::memcpy(at.data(), &words, sizeof words);
    RpcHeader header{};
    return decode(at.data(), bytes, header);
  };
  EXPECT_TRUE(is_good(kRpcHeaderBytes));
  datagram.length = 1;
  EXPECT_FALSE(is_good(kRpcHeaderBytes + 1));
  datagram.length = 0;
  datagram.kind = static_cast<RpcKind>(10);
  EXPECT_FALSE(is_good(kRpcHeaderBytes));
}

Refuse refusal_with(const Goodbye& goodbye) {
  Refuse refuse = make_refuse(Status::refused, "later");
  refuse.goodbye = goodbye;
  return refuse;
}

/// The body of a frame, decoded with the features of its header.
Result<Refuse> decode_frame(const Frame& frame) {
  const auto header = decode_header(frame.bytes());
  if (!header) return tl::unexpected(header.error());
  const auto got = decode_body(*header, frame.bytes().subspan(kHeaderBytes));
  if (!got) return tl::unexpected(got.error());
  return std::get<Refuse>(got->body);
}

TEST(WireGoodbye, ARefusalCarriesOneThatInvitesThePeerBack) {
  const Goodbye sent{GoodbyeReason::draining, 1500ms};
  auto got = decode_frame(encode(refusal_with(sent)));
  ASSERT_TRUE(got) << got.error().message();
  EXPECT_EQ(got->goodbye, sent);
  EXPECT_EQ(got->status, Status::refused);
  EXPECT_EQ(got->message(), "later");
  EXPECT_EQ(decode_cm_refusal(encode_cm_refusal(refusal_with(sent)).bytes()).goodbye, sent);
  // Any other refusal looks as it did before there were goodbyes.
  const Frame plain = encode(make_refuse(Status::refused, "later"));
  const Frame closed = encode(refusal_with({GoodbyeReason::closed, 0ms}));
  EXPECT_TRUE(std::ranges::equal(plain.bytes(), closed.bytes()));
  EXPECT_EQ(plain.size, kHeaderBytes + 1 + 5);
}

TEST(WireGoodbye, TheLongestRefusalFits) {
  Refuse longest = make_refuse(Status::limit, std::string(kRefuseTextMax, 'x'));
  longest.goodbye = {GoodbyeReason::overloaded, kMaxRetryAfter};
  const auto got = decode_frame(encode(longest));
  ASSERT_TRUE(got) << got.error().message();
  EXPECT_EQ(got->message(), longest.message());
  EXPECT_LE(encode_cm_refusal(longest).size, kCmRejectMax);
}

TEST(WireGoodbye, AMalformedOneSpoilsTheRefusal) {
  const Frame good = encode(refusal_with({GoodbyeReason::draining, 1ms}));
  for (const unsigned reason : {0u, 1u, 4u, 255u}) {
    Frame bad = good;
    bad.storage[kHeaderBytes + 1] = static_cast<std::byte>(reason);
    const auto got = decode_frame(bad);
    ASSERT_FALSE(got);
    EXPECT_EQ(got.error().status, Status::protocol);
  }
  Frame cut = encode(refusal_with({GoodbyeReason::draining, 1ms}));
  const auto body = cut.bytes().subspan(kHeaderBytes);
  for (std::size_t size = 0; size < 1 + kGoodbyeBytes; ++size)
    EXPECT_FALSE(decode_refuse(body.first(size), false, feature::goodbye)) << size;
}

}  // namespace
}  // namespace spinwire::wire
