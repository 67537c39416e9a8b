// A flood of frames makes no long poll, and sources take turns.
#include "control/control_port_fixture.h"

namespace control_port_test {
namespace {

class PollBudget : public testing::Test {
 protected:
  static constexpr std::uint32_t kPeers = 40;

  PollBudget() {
    listener_ = std::make_shared<ListenerRecord>(owner_);
    listening_ = server_.port.listen(loopback::any_port(), listener_).value();
  }
  ~PollBudget() override { server_.port.close(); }
  /// Adds peers that the port has accepted and that have said nothing.
  void add_peers(std::uint32_t count, const char* source) {
    const auto address = *control::Address::parse(server_.port.address_of(listening_));
    const std::uint32_t all = server_.port.handshakes() + count;
    for (std::uint32_t i = 0; i < count; ++i)
      peers_.push_back(loopback::plain_client(address, source));
    ASSERT_TRUE(loopback::eventually([&] {
      server_.port.poll();
      return server_.port.handshakes() == all;
    }));
  }
  void send_all_hellos() {
    const auto hello = wire::encode(wire::Hello{endpoint(101, kClientIncarnation)});
    for (const UniqueFd& peer : peers_) {
      EXPECT_EQ(::send(peer.get(), hello.bytes().data(), hello.bytes().size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(hello.bytes().size()));
    }
  }
  [[nodiscard]] std::size_t handled() const { return listener_->asked.size(); }

  Owner owner_;
  Port server_{kServerIncarnation, 64};
  std::shared_ptr<ListenerRecord> listener_;
  ListenerId listening_;
  std::vector<UniqueFd> peers_;
};

TEST_F(PollBudget, APollHandlesSoManyFramesAndLaterPollsTheOthers) {
  add_peers(kPeers, "127.0.0.2:0");
  send_all_hellos();
  std::size_t before = 0;
  ASSERT_TRUE(loopback::eventually([&] {
    server_.port.poll();
    EXPECT_LE(handled() - before, ControlPort::kFramesPerPoll);
    before = handled();
    return handled() == kPeers;
  }));
}

TEST_F(PollBudget, APollEndsWhenItHasTakenLong) {
  add_peers(kPeers, "127.0.0.2:0");
  send_all_hellos();
  listener_->inside = [this] { server_.pass(ControlPort::kTimePerPoll * 2 / 3); };
  ASSERT_TRUE(loopback::eventually([&] {
    const std::size_t before = handled();
    server_.port.poll();
    EXPECT_LE(handled() - before, 2u);
    return handled() == kPeers;
  }));
}

TEST_F(PollBudget, SourcesTakeTurns) {
  add_peers(kPeers, "127.0.0.2:0");
  add_peers(2, "127.0.0.3:0");
  send_all_hellos();
  ASSERT_TRUE(loopback::eventually([&] {
    server_.port.poll();
    return handled() != 0;
  }));
  EXPECT_LT(handled(), kPeers);
  EXPECT_EQ(std::count_if(listener_->asked.begin(), listener_->asked.end(),
                          [](const std::string& peer) { return peer.starts_with("127.0.0.3:"); }),
            2);
}

}  // namespace
}  // namespace control_port_test
