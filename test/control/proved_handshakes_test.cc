// A port without room whose peers have proved a key, or have not: who gives way to whom.
#include <deque>

#include "control/control_port_fixture.h"
#include "control/exchange.h"
#include "control/key_files.h"
#include "control/key_ring.h"
#include "control/pair_network.h"

namespace proved_handshakes_test {
namespace {

using namespace control_port_test;  // the names of a test namespace
using control::Exchange;
using control::KeyRing;

constexpr std::uint32_t kHandshakes = 8;  // of which peers with a proof keep six

KeyRing ring() { return std::move(*KeyRing::parse(key_files::line("2026", 'a'), "keys")); }

class ProvedHandshakes : public testing::Test {
 protected:
  ProvedHandshakes() {
    EXPECT_TRUE(port_.open(&network_));
    port_.set_keys(ring());
    EXPECT_TRUE(port_.listen(at_, listener_));
  }
  void poll() {
    port_.poll();
    const auto clean = port_.audit();
    EXPECT_TRUE(clean) << clean.error().message();
  }
  void pass(int milliseconds) {
    for (int i = 0; i < milliseconds; ++i) {
      now_ += 1'000'000;
      poll();
    }
  }
  static control::Address address(int host) {
    return *control::Address::parse("127.0.0." + std::to_string(host) + ":5");
  }
  void stranger(int host) {
    network_.call_in_silence(address(host));
    poll();
  }
  /// A peer that proves the key, gets an answer to its hello, and is silent from then on.
  void holder(int host) {
    network_.next_source = address(host);
    Exchange& e = holders_.emplace_back();
    ASSERT_TRUE(e.connect(at_, wire::kinds(wire::FrameKind::accept, wire::FrameKind::refuse),
                          &network_, &keys_));
    ASSERT_EQ(e.send(wire::encode(wire::Hello{endpoint(101, 9)})), Status::ok);
    listener_->handshake = {};
    for (int i = 0; i < 20 && !listener_->handshake; ++i) {
      (void)e.advance();
      poll();
    }
    ASSERT_TRUE(listener_->handshake);
    port_.answer(listener_->handshake, endpoint(202, 1));
    poll();
  }
  /// Whether a holder, who has got an answer, has been refused since.
  static bool is_refused(Exchange& e) {
    if (e.advance() == control::Progress::frame) e.expect(wire::kinds(wire::FrameKind::refuse));
    return e.advance() != control::Progress::waiting;
  }
  [[nodiscard]] std::size_t proved_that_gave_way() const { return owner_.events.size(); }

  std::uint64_t now_ = 0;
  spinwire::Clock clock_ = spinwire::Clock::manual(&now_);
  spinwire::base::TimerWheel timers_{1, 0};
  pair_network::PairNetwork network_;
  Owner owner_;
  std::shared_ptr<ListenerRecord> listener_ = std::make_shared<ListenerRecord>(owner_);
  control::Address at_ = address(1);
  KeyRing keys_ = ring();
  std::deque<Exchange> holders_;
  ControlPort port_{{kHandshakes, kHandshakes, 10s, 1, false}, clock_, timers_};
};

// They are older, and one of them is of the source that holds the most.
TEST_F(ProvedHandshakes, StayWhileAStrangerIsDue) {
  for (const int host : {2, 2, 3, 4, 5, 6}) ASSERT_NO_FATAL_FAILURE(holder(host));
  pass(100);
  stranger(20);
  stranger(21);
  pass(100);
  for (int i = 0; i < 20; ++i) {
    stranger(30 + i);
    pass(60);
    EXPECT_EQ(port_.refusals(), static_cast<std::uint64_t>(i) + 1);
    EXPECT_EQ(port_.handshakes(), kHandshakes);
    ASSERT_EQ(proved_that_gave_way(), 0u) << "newcomer " << i;
  }
}

TEST_F(ProvedHandshakes, StayWithinTheirShareWhileNoStrangerIsDue) {
  for (const int host : {2, 3, 4, 5, 6, 7}) ASSERT_NO_FATAL_FAILURE(holder(host));
  pass(100);
  stranger(20);
  stranger(21);
  stranger(22);  // finds no room
  pass(45);
  EXPECT_EQ(network_.waiting(), 1u);
  EXPECT_EQ(port_.refusals(), 0u);
  pass(10);
  EXPECT_EQ(network_.waiting(), 0u);
  EXPECT_EQ(port_.refusals(), 1u);
  EXPECT_EQ(proved_that_gave_way(), 0u);
}

TEST_F(ProvedHandshakes, GiveWayBeyondTheirShareWhileNoStrangerIsDue) {
  for (const int host : {2, 3, 4, 5, 6, 7, 7}) ASSERT_NO_FATAL_FAILURE(holder(host));
  pass(100);
  stranger(20);
  stranger(21);
  EXPECT_EQ(network_.waiting(), 0u);
  ASSERT_EQ(proved_that_gave_way(), 1u);
  for (std::size_t i = 0; i < holders_.size(); ++i)
    EXPECT_EQ(is_refused(holders_[i]), i == 5) << i << ", not the first of the source with most";
  stranger(22);
  EXPECT_EQ(network_.waiting(), 1u) << "the others are within their share";
  EXPECT_EQ(proved_that_gave_way(), 1u);
}

TEST_F(ProvedHandshakes, BeyondTheirShareStayWhileAStrangerIsDue) {
  for (const int host : {2, 3, 4, 5, 6, 7, 8}) ASSERT_NO_FATAL_FAILURE(holder(host));
  stranger(20);
  pass(100);
  stranger(21);
  EXPECT_EQ(network_.waiting(), 0u);
  EXPECT_EQ(port_.refusals(), 1u);
  EXPECT_EQ(proved_that_gave_way(), 0u);
}

}  // namespace
}  // namespace proved_handshakes_test
