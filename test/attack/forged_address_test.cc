// An attacker requests a session for an address where it receives nothing, to learn ours.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "attack/latencies.h"
#include "attack/victim.h"
#include "base/internals.h"
#include "rpc/raw_datagrams.h"

namespace attack_test {
namespace {

using rpc_test::RawDatagrams;

class AttackByForgedAddress : public testing::Test {
 protected:
  /// `handshake_timeout`: after which the victim closes a stream that has not proved its address.
  explicit AttackByForgedAddress(std::chrono::milliseconds handshake_timeout = 60s)
      : victim_(victim_config(handshake_timeout)), there_(small_config()) {
    datagrams_ = std::make_unique<RawDatagrams>(core());
  }
  void TearDown() override {
    datagrams_.reset();
    (void)victim_.stop();
  }
  [[nodiscard]] spinwire::detail::EngineCore& core() {
    return *spinwire::detail::core_of(there_.engine);
  }
  static Config victim_config(std::chrono::milliseconds handshake_timeout) {
    Config c = rpc_test::rpc_config();
    c.connections.handshake_timeout = handshake_timeout;
    c.connections.handshakes = 256;
    c.rpc.sessions = 512;
    return c;
  }
  /// The victim's frames until it closes the stream, which it does after its handshake time-out.
  static bool learns_anything(const Stream& stream) {
    bool learned = false;
    while (const auto got = stream.receive())
      learned = learned || std::get_if<wire::Refuse>(&got->body) == nullptr;
    return learned;
  }

  Victim victim_;
  Node there_;
  std::unique_ptr<RawDatagrams> datagrams_;
};

class AttackByForgedAddressToTheEnd : public AttackByForgedAddress {
 protected:
  AttackByForgedAddressToTheEnd() : AttackByForgedAddress(1s) {}
};

TEST_F(AttackByForgedAddressToTheEnd, OfAQueuePairThatIsNotThere) {
  wire::SessionEnd end = datagrams_->end(7);
  end.qp_num ^= 0x8000;
  const Stream stream(victim_.address());
  stream.send(wire::encode(wire::OpenSession{end}));
  EXPECT_FALSE(learns_anything(stream));
}

TEST_F(AttackByForgedAddress, OfAnotherEngineAndGuessing) {
  const Stream stream(victim_.address());
  stream.send(wire::encode(wire::OpenSession{datagrams_->end(7)}));
  std::uint64_t token = 0;
  EXPECT_TRUE(until({}, [&] { return (token = datagrams_->challenge(7)) != 0; }));
  constexpr std::uint64_t kGuesses = 200;
  for (std::uint64_t guess = 1; guess <= kGuesses; ++guess)
    stream.send(wire::encode(wire::PathResponse{guess}));
  victim_.await_control_steps(2 * kGuesses);  // each takes one frame of the stream
  EXPECT_FALSE(stream.answered(0)) << "a wrong token opens nothing";
  // The peer that receives the datagrams gets the addresses.
  stream.send(wire::encode(wire::PathResponse{token}));
  const auto opened = stream.receive();
  ASSERT_TRUE(opened);
  EXPECT_NE(std::get_if<wire::SessionOpened>(&opened->body), nullptr);
}

TEST_F(AttackByForgedAddress, WithoutDatagramsNoAddressIsTold) {
  wire::SessionEnd end = datagrams_->end(7);
  end.qp_num = 0;
  const Stream stream(victim_.address());
  stream.send(wire::encode(wire::OpenSession{end}));
  const auto got = stream.receive();
  ASSERT_TRUE(got);
  const auto* opened = std::get_if<wire::SessionOpened>(&got->body);
  ASSERT_NE(opened, nullptr);
  EXPECT_EQ(opened->end.qp_num, 0u);
  EXPECT_EQ(opened->end.gid, (std::array<std::uint8_t, 16>{}));
}

// Strangers on this host, at the address of every other client here, ask for sessions at a queue
// pair that is not there.
TEST_F(AttackByForgedAddress, OfManyAtOnceDelaysNoClient) {
  wire::SessionEnd end = datagrams_->end(7);
  end.qp_num ^= 0x8000;
  std::vector<Stream> strangers;
  for (int i = 0; i < 160; ++i)
    strangers.emplace_back(victim_.address()).send(wire::encode(wire::OpenSession{end}));
  const auto is_under_attack = [&] { return victim_.handshakes() >= 128; };
  ASSERT_TRUE(until({}, is_under_attack));
  Node client(rpc_test::rpc_config());
  expect_soon(victim_, client, "sessions", [&](Latencies& latencies) {
    for (std::uint32_t i = 0; i < std::max(amount(50), 5u); ++i) {
      spinwire::Session session;
      latencies.measure(
          is_under_attack,
          [&] {
            auto made = client.engine.open_session(victim_.address(), {});
            ASSERT_TRUE(made) << made.error().message();
            session = *made;
          },
          [&] { return session.ready(); });
      ASSERT_TRUE(session.ready()) << i;
      EXPECT_EQ(session.close(), Status::ok);
    }
  });
}

}  // namespace
}  // namespace attack_test
