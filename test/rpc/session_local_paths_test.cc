// Sessions that go on through another port of their engine's device.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "rpc/reconnecting_session.h"

namespace session_local_paths_test {
namespace {

using namespace rpc_session_reconnect_test;  // NOLINT: a test's helpers
using spinwire::LocalPath;
using spinwire::detail::Transport;
using spinwire::softverbs::LinkState;

class RpcLocalPaths : public RpcSessionReconnect {
 protected:
  void set_port(std::uint8_t port, LinkState state) const {
    ASSERT_EQ(spinwire::softverbs::set_port(client_->core->context.device->context(), port, state),
              0);
  }
  [[nodiscard]] SessionOptions over(const std::vector<LocalPath>& paths,
                                    const Reconnect& reconnect = kManyAttempts) {
    SessionOptions how = options(reconnect);
    how.when_not_ready = WhenNotReady::wait;
    how.local_paths = paths;
    return how;
  }
  /// The session uses this port, and calls of all kinds work.
  void expect_port(std::uint32_t port) {
    EXPECT_EQ(session_.local_path().port, port);
    EXPECT_EQ(record().transport, port == 1 ? Transport::datagram : Transport::connection);
    ASSERT_EQ(begin(kCount, filled(20, 100 + ++calls_)), Status::ok);
    ASSERT_EQ(begin(kCount, filled(100'000, 100 + ++calls_)), Status::ok);
    ASSERT_TRUE(until([&] { return all_ended(); }));
    for (const Ended& e : ended_) EXPECT_EQ(e.status, Status::ok);
    ended_.clear();
    if (port == 1) return;
    const spinwire::agent::Agent* const a =
        spinwire::rpc::agent_of(*client_->core->calls, *record().connection);
    ASSERT_NE(a, nullptr);
    ibv_qp_attr attr{};
    ibv_qp_init_attr init{};
    const auto& device = *client_->core->context.device;
    EXPECT_EQ(device.provider().query_qp(a->qp, &attr, IBV_QP_PORT, &init), 0);
    EXPECT_EQ(attr.port_num, port);
  }

  std::uint32_t calls_ = 0;
};

TEST_F(RpcLocalPaths, ASessionGoesOnThroughTheOtherPortAndBack) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(over({{1}, {2}})));
  ASSERT_NO_FATAL_FAILURE(expect_port(1));
  ASSERT_EQ(begin(kLater, filled(20, 1)), Status::ok);
  ASSERT_TRUE(until([&] { return server_->later.size() == 1; }));
  set_port(1, LinkState::down);
  ASSERT_TRUE(until([&] { return interrupted_.size() == 1; }));
  EXPECT_EQ(interrupted_[0].status, Status::local_error);
  EXPECT_NE(interrupted_[0].found.find("the link of local port 1 is down"), std::string::npos)
      << interrupted_[0].message();
  EXPECT_EQ(ended_[0].times, 1);
  EXPECT_EQ(ended_[0].status, Status::peer_lost) << "its handler may have run";
  ASSERT_EQ(begin(kCount, filled(20, 2)), Status::ok) << "waits";
  ASSERT_TRUE(until([&] { return session_.ready() && ended_[1].times != 0; }));
  EXPECT_EQ(ended_[1].status, Status::ok);
  ended_.clear();
  ASSERT_NO_FATAL_FAILURE(expect_port(2));
  set_port(1, LinkState::up);
  ASSERT_NO_FATAL_FAILURE(expect_port(2));
  set_port(2, LinkState::down);
  ASSERT_TRUE(until([&] { return interrupted_.size() == 2 && session_.ready(); }));
  ASSERT_NO_FATAL_FAILURE(expect_port(1));
  EXPECT_EQ(ready_, 3);
  finish();
}

// The link is up again when the event of its failure is read.
TEST_F(RpcLocalPaths, AnOldEventEndsNothing) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(over({{1}, {2}})));
  set_port(1, LinkState::down);
  set_port(1, LinkState::up);
  ASSERT_NO_FATAL_FAILURE(expect_port(1));
  EXPECT_TRUE(interrupted_.empty());
  EXPECT_EQ(ready_, 1);
  finish();
}

TEST_F(RpcLocalPaths, TheFirstAttemptTakesTheFirstLinkThatIsUp) {
  start();
  set_port(1, LinkState::down);
  ASSERT_NO_FATAL_FAILURE(open(over({{1}, {2}}, {})));
  ASSERT_NO_FATAL_FAILURE(expect_port(2));
  EXPECT_TRUE(interrupted_.empty());
  finish();
}

TEST_F(RpcLocalPaths, WithoutALinkTheSessionWaitsForOne) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(over({{1}, {2}})));
  set_port(2, LinkState::down);
  set_port(1, LinkState::down);
  ASSERT_TRUE(until([&] { return interrupted_.size() == 1; }));
  ASSERT_EQ(begin(kCount, filled(20, 1)), Status::ok);
  for (int i = 0; i < 1000; ++i) turn(kMillisecond);
  EXPECT_TRUE(closed_.empty());
  EXPECT_EQ(ended_[0].times, 0);
  const auto refused = client_->core->open_session(address_, over({{2}, {1}}));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().status, Status::system);
  EXPECT_NE(refused.error().found.find("the port is DOWN"), std::string::npos)
      << refused.error().message();
  set_port(2, LinkState::up);
  ASSERT_TRUE(until([&] { return session_.ready() && ended_[0].times != 0; }, kMillisecond));
  EXPECT_EQ(ended_[0].status, Status::ok);
  EXPECT_EQ(interrupted_.size(), 1u);
  ASSERT_NO_FATAL_FAILURE(expect_port(2));
  finish();
}

TEST_F(RpcLocalPaths, WhatDoesNotExistOrHasNoDatagramsIsRefused) {
  start();
  const auto missing = client_->core->open_session(address_, over({{1}, {3}}));
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().status, Status::no_device);
  const std::string text = missing.error().message();
  for (const char* const part : {"local path port 3", "has 2 ports", "an engine of its own"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
  Config config = reconnect_config();
  config.rpc.transport = spinwire::RpcTransport::datagram;
  Bare strict(config, &now_);
  EXPECT_TRUE(strict.core->open_session(address_, over({{1}, {1, 0}})));
  const auto other = strict.core->open_session(address_, over({{1}, {2}}));
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().status, Status::unsupported);
  EXPECT_NE(other.error().message().find("datagrams leave by port 1, GID index 0"),
            std::string::npos)
      << other.error().message();
  EXPECT_EQ(Session().local_path(), LocalPath{});
}

}  // namespace
}  // namespace session_local_paths_test
