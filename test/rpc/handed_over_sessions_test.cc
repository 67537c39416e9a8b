// Sessions whose server has handed its listener over, or has lost it to another engine, and serves
// on.
#include "rpc/reconnecting_session.h"

namespace rpc_session_reconnect_test {
namespace {

using spinwire::Goodbye;
using spinwire::GoodbyeReason;

/// The former server is `second_`, and the engine that listens at its address `server_`.
class RpcHandedOver : public RpcSessionReconnect {
 protected:
  void hand_over(const Config& config = reconnect_config()) {
    const int socket = server_->listener.release().value();
    second_ = std::move(server_);
    server_ = std::make_unique<Server>(socket, runs_, &now_, config);
  }
  /// Another engine listens, to which nothing was handed over.
  void drop_listener() {
    second_ = std::move(server_);
    second_->listener = Listener();
    server_ = std::make_unique<Server>(address_, runs_, &now_);
  }
  /// Lets the time pass while the former server does not run.
  void stop_former(std::uint64_t time) {
    std::unique_ptr<Server> former = std::move(second_);
    for (const std::uint64_t end = now_ + time; now_ < end;) turn(kMillisecond);
    second_ = std::move(former);
  }
  [[nodiscard]] static std::uint32_t served(const Server& server) {
    return spinwire::rpc::stats(*server.engine.core->calls).served_sessions;
  }
  void expect_served(std::uint32_t seed) {
    const std::size_t at = ended_.size();
    ASSERT_EQ(begin(kCount, filled(20, seed)), Status::ok);
    ASSERT_TRUE(until([&] { return ended_[at].times == 1; }, kMillisecond));
    EXPECT_EQ(ended_[at].status, Status::ok);
  }
};

TEST_F(RpcHandedOver, ALongCallLeadsTheSessionToTheSuccessor) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(WhenNotReady::wait));
  ASSERT_EQ(begin(kLater, filled(20, 1)), Status::ok);
  ASSERT_TRUE(until([&] { return server_->later.size() == 1; }));
  hand_over();
  ASSERT_NO_FATAL_FAILURE(expect_served(2));
  EXPECT_EQ(second_->order.size(), 2u) << "short calls stay where they are";
  const std::size_t at = ended_.size();
  ASSERT_EQ(begin(kCount, filled(60'000, 3)), Status::ok);
  ASSERT_TRUE(until([&] { return !session_.ready(); }));
  for (int i = 0; i < 300; ++i) turn(kMillisecond);
  EXPECT_EQ(ended_[0].times, 0) << "a call in progress has its reply";
  EXPECT_TRUE(interrupted_.empty());
  EXPECT_EQ(second_->later.at(0).reply(Bytes()), Status::ok);
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  EXPECT_EQ(ended_[0].status, Status::ok);
  EXPECT_EQ(ended_[at].status, Status::ok);
  EXPECT_EQ(server_->order.size(), 1u);
  ASSERT_EQ(interrupted_.size(), 1u);
  EXPECT_EQ(interrupted_[0].goodbye, (Goodbye{GoodbyeReason::draining, 0ms}));
  EXPECT_EQ(served(*second_), 0u);
  finish();
}

TEST_F(RpcHandedOver, ASessionThatDoesNotReconnectEndsInOrder) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(options({})));
  hand_over();
  ASSERT_NO_FATAL_FAILURE(expect_served(1));
  ASSERT_EQ(begin(kCount, filled(60'000, 2)), Status::ok);
  ASSERT_TRUE(until([&] { return closed_.size() == 1; }, kMillisecond));
  EXPECT_EQ(closed_[0].status, Status::ok) << closed_[0].message();
  EXPECT_EQ(closed_[0].goodbye, (Goodbye{GoodbyeReason::draining, 0ms}));
  ASSERT_TRUE(all_ended());
  EXPECT_EQ(ended_[1].status, Status::not_connected);
  EXPECT_TRUE(is_retryable(ended_[1].status));
  EXPECT_EQ(runs_.size(), 1u);
}

TEST_F(RpcHandedOver, ASessionThatIsBeingOpenedOverAConnectionGoesToTheSuccessor) {
  const Config config = over(RpcTransport::connection, reconnect_config());
  client_ = std::make_unique<Bare>(config, &now_);
  for (const std::uint32_t attempts : {5u, 0u}) {
    start("127.0.0.1:0", config);
    session_ = client_->core->open_session(address_, options({attempts, 1ms, 1ms})).value();
    ASSERT_TRUE(until([&] { return served(*server_) == 1; }));
    ASSERT_EQ(session_.state(), SessionState::opening);
    hand_over(config);
    ASSERT_TRUE(until([&] { return session_.ready() || !closed_.empty(); }, kMillisecond));
    EXPECT_EQ(session_.ready(), attempts != 0);
  }
  EXPECT_EQ(closed_[0].status, Status::refused) << closed_[0].message();
  EXPECT_EQ(closed_[0].goodbye.reason, GoodbyeReason::draining);
}

TEST_F(RpcHandedOver, ASilentServerIsWaitedForThoughItsSuccessorAnswers) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(options()));
  hand_over();
  ASSERT_NO_FATAL_FAILURE(stop_former(9'000 * kMillisecond));  // connections.peer_timeout is 10 s
  EXPECT_TRUE(session_.ready());
  ASSERT_NO_FATAL_FAILURE(expect_served(1));
  EXPECT_EQ(second_->order.size(), 1u);
  second_->silence();
  ASSERT_TRUE(until([&] { return !interrupted_.empty(); }, kMillisecond));
  EXPECT_EQ(interrupted_[0].status, Status::peer_lost);
  EXPECT_NE(interrupted_[0].found.find("another engine has its listener"), std::string::npos)
      << interrupted_[0].message();
}

TEST_F(RpcHandedOver, AnEngineAtTheAddressOfAServerThatWasHeardEndsNoSession) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(options()));
  drop_listener();
  // The refusal of its connection raises a doubt.
  ASSERT_EQ(begin(kCount, filled(60'000, 1)), Status::ok);
  ASSERT_TRUE(until([&] { return record().doubted_since != 0; }));
  ASSERT_NO_FATAL_FAILURE(stop_former(90 * kMillisecond));  // a keepalive interval is 100 ms
  EXPECT_TRUE(session_.ready());
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  EXPECT_EQ(ended_[0].status, Status::not_connected);
  ASSERT_NO_FATAL_FAILURE(expect_served(2));
  EXPECT_EQ(second_->order.size(), 1u);
  EXPECT_TRUE(interrupted_.empty());
  // A server that is silent for longer is given up.
  second_->silence();
  const std::uint64_t from = now_;
  ASSERT_TRUE(until([&] { return !interrupted_.empty(); }, kMillisecond));
  EXPECT_LE(now_ - from, 500 * kMillisecond);
}

}  // namespace
}  // namespace rpc_session_reconnect_test
