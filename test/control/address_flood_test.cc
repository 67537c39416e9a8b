// Silent peers that come from many addresses, of which none holds more than its share.
#include <string>
#include <vector>

#include "control/control_port_fixture.h"
#include "control/grace.h"

namespace control_port_test {
namespace {

using control::Grace;

class GraceTest : public testing::Test {
 protected:
  static std::uint64_t ticks(Nanoseconds time) { return static_cast<std::uint64_t>(time.count()); }

  std::uint64_t now_ = ticks(10s);
  Grace grace_{spinwire::Clock::manual(&now_)};
};

TEST_F(GraceTest, AFloodShortensItAndItsEndRestoresIt) {
  EXPECT_EQ(grace_.at(now_), ticks(Grace::kLongest));
  std::uint64_t before = grace_.at(now_);
  int peers = 0;
  for (; grace_.at(now_) > ticks(Grace::kShortest); ++peers, before = grace_.at(now_)) {
    grace_.shorten(now_);
    ASSERT_LT(grace_.at(now_), before);
  }
  EXPECT_LT(peers, 30);
  EXPECT_GT(peers, 10) << "a few slow peers are no flood";
  grace_.shorten(now_);
  EXPECT_EQ(grace_.at(now_), ticks(Grace::kShortest));
  EXPECT_EQ(grace_.at(now_ + ticks(Grace::kLongest) - 1), ticks(Grace::kShortest));
  EXPECT_EQ(grace_.at(now_ + ticks(Grace::kLongest)), ticks(Grace::kLongest));
}

TEST_F(GraceTest, PeersThatAnsweredLatelyKeepTwiceTheirTime) {
  const auto in_a_flood = [&] {
    for (int i = 0; i < 40; ++i) grace_.shorten(now_);
    return grace_.at(now_);
  };
  grace_.on_answer(now_, ticks(20ms));
  grace_.on_answer(now_, ticks(1ms));  // a quick one does not hide a slow one
  EXPECT_EQ(in_a_flood(), ticks(40ms));
  now_ += ticks(Grace::kRemembered);
  EXPECT_EQ(in_a_flood(), ticks(Grace::kShortest));
  grace_.on_answer(now_, ticks(1h));
  EXPECT_EQ(in_a_flood(), ticks(Grace::kLongest));
}

class FloodOfAddresses : public ControlPortTest {
 protected:
  static std::string address(int i) { return "127.0.1." + std::to_string(1 + i) + ":0"; }

  /// Uses all handshakes up, each from another address, of which the first is given.
  void fill(int first) {
    for (int i = first; i < first + 4; ++i) flood_.push_back(plain_peer(address(i).c_str()));
    ASSERT_TRUE(until([&] { return server_.port.handshakes() == 4; }));
  }
  /// How long a newcomer waits for room.
  int milliseconds_until_room(const std::string& from) {
    const std::uint64_t refused = server_.port.refusals();
    flood_.push_back(plain_peer(from.c_str()));
    int passed = 0;
    for (; passed < 200 && server_.port.refusals() == refused; ++passed)
      server_.pass_with_polls(1ms);
    return passed;
  }
  void end() {
    flood_.clear();
    ASSERT_TRUE(until([&] { return server_.port.handshakes() == 0; }));
    server_.pass_with_polls(Grace::kLongest);
  }
  /// A client whose confirmation takes so long.
  void set_up_slowly(Nanoseconds answer) {
    const UniqueFd client = plain_peer();
    listener_->handshake = {};
    say(client, wire::encode(wire::Hello{endpoint(101, 9)}).bytes());
    ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
    server_.port.answer(listener_->handshake, endpoint(202, kServerIncarnation));
    server_.pass_with_polls(answer);
    say(client, wire::encode(wire::Ready{kServerIncarnation}).bytes());
    ASSERT_TRUE(until([&] { return server_owner_.saw("confirmed 77"); }));
  }

  std::vector<UniqueFd> flood_;
};

TEST_F(FloodOfAddresses, MakesRoomFasterUntilItEnds) {
  fill(0);
  const int first = milliseconds_until_room(address(4));
  EXPECT_GE(first, 48);
  EXPECT_LT(first, 60);
  for (int i = 5; i < 60; ++i) EXPECT_LE(milliseconds_until_room(address(i)), first);
  for (int i = 60; i < 64; ++i) EXPECT_LE(milliseconds_until_room(address(i)), 6);
  end();
  fill(64);
  EXPECT_GE(milliseconds_until_room(address(68)), 48) << "the flood is over";
}

TEST_F(FloodOfAddresses, LeavesTheTimeThatPeersHaveNeeded) {
  set_up_slowly(20ms);
  fill(0);
  for (int i = 4; i < 40; ++i) (void)milliseconds_until_room(address(i));
  flood_.clear();
  ASSERT_TRUE(until([&] { return server_.port.handshakes() == 0; }));
  fill(40);
  EXPECT_GE(milliseconds_until_room(address(44)), 38);
}

TEST_F(FloodOfAddresses, OneHostThatHoldsMuchShortensNobodysTime) {
  for (int i = 0; i < 4; ++i) flood_.push_back(plain_peer("127.0.0.2:0"));
  ASSERT_TRUE(until([&] { return server_.port.handshakes() == 4; }));
  for (int i = 0; i < 40; ++i) EXPECT_LE(milliseconds_until_room("127.0.0.2:0"), 6);
  flood_.clear();
  ASSERT_TRUE(until([&] { return server_.port.handshakes() == 0; }));
  fill(0);
  EXPECT_GE(milliseconds_until_room(address(4)), 48);
}

}  // namespace
}  // namespace control_port_test
