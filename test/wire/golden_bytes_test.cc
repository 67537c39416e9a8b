// The bytes of each message, recorded once: they are the protocol, and must not change.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <span>
#include <string>

#include "wire/cm_data.h"
#include "wire/cm_proof.h"
#include "wire/credit_word.h"
#include "wire/handshake.h"
#include "wire/lease_messages.h"
#include "wire/message_header.h"
#include "wire/region_token.h"
#include "wire/rendezvous_messages.h"
#include "wire/rpc_connection.h"
#include "wire/rpc_datagram.h"

namespace golden_bytes_test {
namespace {

using namespace spinwire::wire;
using spinwire::Endpoint;
using spinwire::GidType;
using spinwire::Goodbye;
using spinwire::GoodbyeReason;
using spinwire::Status;

std::string hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte b : bytes) text += fmt::format("{:02x}", std::to_integer<unsigned>(b));
  return text;
}

/// The bytes of what is written as words.
template <typename Words>
std::string hex_of(const Words& words) {
  return hex(std::as_bytes(std::span(&words, 1)));
}

/// Every byte of every field differs from its neighbours.
Endpoint an_endpoint() {
  Endpoint e;
  for (std::size_t i = 0; i < e.gid.size(); ++i) e.gid[i] = static_cast<std::uint8_t>(0x10 + i);
  e.gid_type = GidType::embedded;
  e.lid = 0x2120;
  e.qp_num = 0x00322322;
  e.psn = 0x00352524;
  e.mtu = 0x2726;
  e.max_message = 0x2b2a2928;
  e.eager_bytes = 0x2f2e2d2c;
  e.credits = 0x33323130;
  e.incarnation = 0x3b3a393837363534;
  e.credit_cell_address = 0x434241403f3e3d3c;
  e.credit_cell_rkey = 0x47464544;
  e.credit_cell_token = 0x4b4a4948;
  e.peer_timeout_ms = 0x4f4e4d4c;
  e.max_rd_atomic = 0x50;
  return e;
}

SessionEnd a_session_end() {
  SessionEnd e;
  e.gid = an_endpoint().gid;
  e.gid_type = GidType::roce_v2;
  e.lid = 0x6160;
  e.qp_num = 0x65646362;
  e.qkey = 0x69686766;
  e.name = 0x6d6c6b6a;
  e.window = 0x6f6e;
  e.mtu = 0x7170;
  e.incarnation = 0x7978777675747372;
  e.first = 0x7d7c7b7a;
  e.token = 0x858483828180 << 16 | 0x7f7e;
  return e;
}

const Capabilities kCapabilities{{0x0201, 0x0403}, 0x08070605};

TEST(GoldenBytes, FramesOfConnections) {
  Endpoint raw = an_endpoint();
  raw.raw = true;
  EXPECT_EQ(
      hex(encode(Hello{an_endpoint()}, kCapabilities).bytes()),
      "53504e57010203040100460005060708101112131415161718191a1b1c1d1e1f222332002425350028292a2b3031"
      "32333435363738393a3b3c3d3e3f40414243444546472021262703502c2d2e2f48494a4b4c4d4e4f");
  EXPECT_EQ(
      hex(encode(Accept{raw}).bytes()),
      "53504e57010001000200460001000000101112131415161718191a1b1c1d1e1f222332002425350028292a2b3031"
      "32333435363738393a3b3c3d3e3f40414243444546472021262703502c2d2e2f48494a4b4c4d4e4f");
  EXPECT_EQ(hex(encode(make_refuse(Status::limit, "full\n"), kCapabilities).bytes()),
            "53504e570102030403000600050607081766756c6c3f");
  Refuse later = make_refuse(Status::refused, "later");
  later.goodbye = {GoodbyeReason::draining, std::chrono::milliseconds(0x121110)};
  EXPECT_EQ(hex(encode(later).bytes()), "53504e570100010003000a008000000011021011126c61746572");
  EXPECT_EQ(hex(encode(Ready{0x1716151413121110}, kCapabilities).bytes()),
            "53504e570102030404000800050607081011121314151617");
}

TEST(GoldenBytes, FramesOfSessions) {
  EXPECT_EQ(hex(encode(OpenSession{a_session_end()}, kCapabilities).bytes()),
            "53504e57010203040500380005060708101112131415161718191a1b1c1d1e1f62636465666768696a6b6c"
            "6d6e6f70716061020072737475767778797a7b7c7d7e7f808182838485");
  EXPECT_EQ(hex(encode(SessionOpened{a_session_end()}).bytes()),
            "53504e57010001000600380000000000101112131415161718191a1b1c1d1e1f62636465666768696a6b6c"
            "6d6e6f70716061020072737475767778797a7b7c7d7e7f808182838485");
  EXPECT_EQ(
      hex(encode(JoinSession{an_endpoint(), 0x93929190, 0x9b9a999897969594}, kCapabilities)
              .bytes()),
      "53504e57010203040700520005060708101112131415161718191a1b1c1d1e1f222332002425350028292a2b3031"
      "32333435363738393a3b3c3d3e3f40414243444546472021262703502c2d2e2f48494a4b4c4d4e4f909192939495"
      "969798999a9b");
  EXPECT_EQ(hex(encode(PathResponse{0x1716151413121110}).bytes()),
            "53504e570100010008000800000000001011121314151617");
}

TEST(GoldenBytes, FramesOfAnAuthentication) {
  Authenticate request;
  for (std::size_t i = 0; i < request.key.size(); ++i)
    request.key[i] = static_cast<std::uint8_t>(0x10 + i);
  for (std::size_t i = 0; i < request.message.size(); ++i)
    request.message[i] = static_cast<std::uint8_t>(0x20 + i);
  EXPECT_EQ(hex(encode(request, kCapabilities).bytes()),
            "53504e57010203040900400005060708101112131415161718191a1b1c1d1e1f2021222324252627"
            "28292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f");
  Authenticated answer;
  for (std::size_t i = 0; i < answer.message.size(); ++i)
    answer.message[i] = static_cast<std::uint8_t>(0x40 + i);
  EXPECT_EQ(hex(encode(answer).bytes()),
            "53504e57010001000a00400000000000404142434445464748494a4b4c4d4e4f5051525354555657"
            "58595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f");
  EXPECT_EQ(hex(begin_sealed(16).bytes()).substr(0, 32), "53504e57010001000b00200000000000");
}

TEST(GoldenBytes, PrivateDataOfRdmaCm) {
  EXPECT_EQ(hex(encode_cm(an_endpoint(), kCapabilities)),
            "53504e57010203040506070828292a2b303132333435363738393a3b3c3d3e3f4041424344454647262750"
            "002c2d2e2f48494a4b4c4d4e4f");
}

TEST(GoldenBytes, RegionTokens) {
  EXPECT_EQ(hex(encode(Token{0x1716151413121110, 0x1f1e1d1c1b1a1918, 0x2726252423222120, 0x2b2a2928,
                             0x2f2e2d2c, 0x30})),
            "5357525401300000101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f9512e9"
            "c0af233292");
  EXPECT_EQ(hex(encode(Token{0x1716151413121110, 0x1f1e1d1c1b1a1918, 0x2726252423222120, 0x2b2a2928,
                             0x2f2e2d2c, 0x30, 0x353433323130})),
            "5357525402303435101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132"
            "33d76a70ed");
}

TEST(GoldenBytes, HeadersOfMessages) {
  EXPECT_EQ(hex_of(encode(MessageHeader{MessageKind::data, 0x11, 0x1312, 0x17161514})),
            "0111121314151617");
  std::string kinds;
  for (const MessageKind kind :
       {MessageKind::data, MessageKind::credit_return, MessageKind::goodbye,
        MessageKind::rendezvous_offer, MessageKind::rendezvous_answer, MessageKind::lease_request,
        MessageKind::lease_grant, MessageKind::lease_push, MessageKind::lease_call,
        MessageKind::lease_reply, MessageKind::credit_ask, MessageKind::credit}) {
    kinds += hex_of(encode(MessageHeader{kind, 0, 0, 0})).substr(0, 2);
  }
  EXPECT_EQ(kinds, "0102030405060708090a0b0c");
  EXPECT_EQ(encode(Goodbye{GoodbyeReason::draining, std::chrono::milliseconds(0x121110)}),
            0x12111002u);
  EXPECT_EQ(encode(Goodbye{GoodbyeReason::overloaded, {}}), 3u);
  EXPECT_EQ(kAwaitsGoodbye, 0x80000000u);
  EXPECT_EQ(message_flag::kWantCredit, 1);
}

TEST(GoldenBytes, WordsOfCredit) {
  EXPECT_EQ(hex_of(encode(CreditWord{0x121110, 0x13}, 0x17161514)), "10111213027934a9");
}

TEST(GoldenBytes, HeadersOfCalls) {
  EXPECT_EQ(
      hex_of(pack(RpcHeader{0x13121110, 0x17161514, 0x1918, RpcKind::reply, 0x1b, 0x1d1c, 0x1f1e})),
      "10111213141516171819021b1c1d1e1f");
  std::string kinds;
  for (const RpcKind kind :
       {RpcKind::request, RpcKind::reply, RpcKind::ping, RpcKind::pong, RpcKind::close,
        RpcKind::closed, RpcKind::unknown, RpcKind::path_challenge, RpcKind::goodbye}) {
    kinds += hex_of(pack(RpcHeader{0, 0, 0, kind, 0, 0, 0})).substr(20, 2);
  }
  EXPECT_EQ(kinds, "010203040506070809");
  EXPECT_EQ(hex_of(pack(session_header(0x13121110, 0x17161514, RpcKind::close, 0x1f1e1918))),
            "10111213141516171819050000001e1f");
  EXPECT_EQ(hex_of(pack(session_header(1, 0, RpcKind::path_challenge, 0))),
            "01000000000000000000080008000000");
  EXPECT_EQ(session_proof(0x8899aabbccddeeff), 0x909fc137u);
}

TEST(GoldenBytes, LeaseMessages) {
  EXPECT_EQ(hex(encode(LeaseRequest{0x1716151413121110, 0x1f1e1d1c1b1a1918, 0x23222120, 0x27262524,
                                    0x28})),
            "101112131415161718191a1b1c1d1e1f20212223242526272800000000000000");
  EXPECT_EQ(
      hex(encode(LeaseGrant{0x1716151413121110, 0x1f1e1d1c1b1a1918, 0x2726252423222120, 0x2b2a2928,
                            0x2f2e2d2c, 0x33323130, 0x34, LeaseVerdict::unwanted, true})),
      "101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f3031323334090100");
  EXPECT_EQ(hex(encode(LeaseCall{0x1716151413121110, 0x1b1a1918, 0x1f1e1d1c, LeaseAction::recall,
                                 LeaseVerdict::closing})),
            "101112131415161718191a1b1c1d1e1f040a000000000000");
  EXPECT_EQ(hex(encode(LeaseReply{0x1716151413121110, 0x1b1a1918, LeaseVerdict::over})),
            "101112131415161718191a1b08000000");
}

TEST(GoldenBytes, RendezvousMessages) {
  EXPECT_EQ(
      hex(encode(RendezvousOffer{0x1716151413121110, 0x1b1a1918, 0x1f1e1d1c, 0x23222120, true})),
      "101112131415161718191a1b1c1d1e1f2021222301000000");
  EXPECT_EQ(hex(encode(LocalOffer{0x1716151413121110, 0x1b1a1918, 0x1f1e1d1c, 0x23222120,
                                  0x27262524, true})),
            "101112131415161718191a1b1c1d1e1f202122232425262701000000");
  EXPECT_EQ(hex(encode(RendezvousAnswer{0x13121110, RendezvousVerdict::closing})),
            "1011121303000000");
}

TEST(GoldenBytes, CallsOnAConnection) {
  EXPECT_EQ(
      hex(encode(RpcMessageHeader{0x13121110, 0x1514, RpcMessageKind::cancelled, 0x17, 0x1b1a1918,
                                  0x1f1e1d1c, 0x2726252423222120, 0x2b2a2928, 0x2f2e2d2c})),
      "101112131415041718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f");
  EXPECT_EQ(kHasCode, 0x80);
}

/// A struct whose bytes count up.
template <typename Struct, auto... members>
Struct counted() {
  Struct made;
  std::uint8_t next = 1;
  const auto fill = [&](auto& bytes) {
    for (std::uint8_t& byte : bytes) byte = next++;
  };
  (fill(made.*members), ...);
  return made;
}

TEST(GoldenBytes, ProofsThroughRdmaCm) {
  EXPECT_EQ(hex(encode(counted<CmProof, &CmProof::key, &CmProof::message>())).substr(0, 40),
            "53504e31"
            "01020304"
            "05060708090a0b0c0d0e0f10");
  EXPECT_EQ(hex(encode(counted<CmPart, &CmPart::handshake, &CmPart::sealed>())).substr(0, 40),
            "53504e32"
            "01020304"
            "05060708090a0b0c0d0e0f10");
  EXPECT_EQ(hex(encode(counted<CmContinue, &CmContinue::sealed>())),
            "53504e33"
            "0102030405060708090a0b0c0d0e0f10");
  EXPECT_EQ(hex(encode(counted<CmAnswer, &CmAnswer::sealed>())).substr(0, 24),
            "53504e34"
            "0102030405060708");
  EXPECT_EQ(hex(encode(counted<CmRefusal, &CmRefusal::sealed>())).substr(0, 24),
            "53504e35"
            "0102030405060708");
  EXPECT_EQ(hex(encode(counted<CmMore, &CmMore::sealed>())).substr(0, 24),
            "53504e36"
            "0102030405060708");
  EXPECT_EQ(hex(encode(counted<CmLongAnswer, &CmLongAnswer::sealed>())).substr(0, 24),
            "53504e37"
            "0102030405060708");
  spinwire::PrivateData data;
  EXPECT_EQ(data.assign(std::as_bytes(std::span("abc", 3))), Status::ok);
  std::array<std::byte, 6> piece;
  EXPECT_EQ(encode_cm_piece(data, 0, piece), 3u);
  EXPECT_EQ(hex(piece), "030061626300");
  EXPECT_EQ(feature::cm_private_data, 512u);
}

}  // namespace
}  // namespace golden_bytes_test
