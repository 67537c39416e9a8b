// Sessions that reconnect, whose server or own engine drains.
#include "rpc/leaving_server.h"

namespace rpc_session_reconnect_test {
namespace {

class RpcDrainedSession : public RpcLeavingServer {
 protected:
  /// A call is in progress at a server that drains, and its client knows.
  void begin_known_drain() {
    serve_at("127.0.0.1:0");
    ASSERT_NO_FATAL_FAILURE(open(WhenNotReady::wait));
    ASSERT_NO_FATAL_FAILURE(begin_drain());
    ASSERT_TRUE(until([&] { return !session_.ready(); }));
    EXPECT_EQ(session_.state(), SessionState::opening);
    EXPECT_EQ(session_.max_inline_call(), 0u);
  }
};

INSTANTIATE_TEST_SUITE_P(Transports, RpcDrainedSession,
                         testing::Values(RpcTransport::automatic, RpcTransport::connection),
                         name_of_transport);

TEST_P(RpcDrainedSession, IsOpenedAgainAfterTheCallsUnderWayAndNotTooEarly) {
  ASSERT_NO_FATAL_FAILURE(begin_known_drain());
  ASSERT_EQ(begin(kCount, filled(20, 2), waiting()), Status::ok);
  ASSERT_EQ(begin(kCount, filled(9000, 3), waiting()), Status::ok);  // over a connection
  CallOptions at_once;
  at_once.when_not_ready = WhenNotReady::fail;
  EXPECT_EQ(begin(kCount, filled(20, 4), at_once), Status::not_connected);
  turns(100);
  EXPECT_TRUE(interrupted_.empty()) << "a call is in progress";
  ASSERT_NO_FATAL_FAILURE(finish_drain());
  EXPECT_EQ(ended_[0].status, Status::ok);
  EXPECT_EQ(interrupted_[0].status, Status::flushed);
  EXPECT_EQ(interrupted_[0].found, "the peer is draining");
  EXPECT_EQ(interrupted_[0].remedy, "come back after 300 ms, or use another peer");
  EXPECT_EQ(runs_.size(), 1u) << "the server takes no more calls";
  server_.reset();
  serve_at(address_);
  ASSERT_TRUE(until([&] { return session_.ready(); }, kMillisecond));
  EXPECT_GE(now_ - interrupted_at_, 300 * kMillisecond);
  EXPECT_LE(now_ - interrupted_at_, 500 * kMillisecond);
  ASSERT_TRUE(until([&] { return all_ended(); }));
  for (const Ended& e : ended_) EXPECT_EQ(e.status, Status::ok) << to_string(e.status);
  EXPECT_EQ(runs_.size(), 3u);
  EXPECT_EQ(interrupted_.size(), 1u);
  finish();
}

TEST_P(RpcDrainedSession, IsRefusedForATimeWhileTheServerDrains) {
  serve_at("127.0.0.1:0");
  drain(server_->engine);
  session_ = client_->core->open_session(address_, options()).value();
  const std::uint64_t from = now_;
  // Without that time, the next attempts would come within 100 ms each.
  turns(150, kMillisecond);
  EXPECT_TRUE(closed_.empty());
  EXPECT_EQ(session_.state(), SessionState::opening);
  server_.reset();
  serve_at(address_);
  ASSERT_TRUE(until([&] { return session_.ready(); }, kMillisecond));
  EXPECT_GE(now_ - from, 300 * kMillisecond);
  finish();
}

/// What waits for the next server ends, and there is no further attempt.
TEST_P(RpcDrainedSession, EndsIfItsOwnEngineDrainsMeanwhile) {
  ASSERT_NO_FATAL_FAILURE(begin_known_drain());
  ASSERT_EQ(begin(kCount, filled(20, 2), waiting()), Status::ok);
  drain(*client_);
  ASSERT_TRUE(until([&] { return ended_[1].times == 1; }));
  EXPECT_EQ(ended_[1].status, Status::not_connected);
  EXPECT_TRUE(closed_.empty()) << "a call is in progress";
  answer_all();
  ASSERT_TRUE(until([&] { return !closed_.empty(); }));
  EXPECT_EQ(closed_[0].status, Status::ok);
  EXPECT_EQ(closed_[0].goodbye, kGoodbye);
  EXPECT_TRUE(interrupted_.empty());
  ASSERT_TRUE(until([&] { return client_->core->drain.is_over(); }));
}

TEST_P(RpcDrainedSession, CallsThatWaitForAServerDoNotRunIfTheirOwnEngineDrains) {
  ASSERT_NO_FATAL_FAILURE(begin_known_drain());
  answer_all();
  ASSERT_TRUE(until([&] { return !interrupted_.empty(); }));
  ASSERT_EQ(begin(kCount, filled(20, 2), waiting()), Status::ok);
  ASSERT_EQ(begin(kCount, filled(9000, 3), waiting()), Status::ok);
  drain(*client_);
  ASSERT_TRUE(until([&] { return !closed_.empty() && all_ended(); }));
  for (std::size_t i = 1; i < ended_.size(); ++i)
    EXPECT_EQ(ended_[i].status, Status::not_connected) << "they can be made elsewhere";
  EXPECT_EQ(closed_[0].status, Status::ok);
}

/// Alternatives alone are tried only until the first success.
TEST_P(RpcDrainedSession, EndsInOrderWithoutFurtherAttempts) {
  serve_at("127.0.0.1:0");
  ASSERT_NO_FATAL_FAILURE(open(options_for_one_opening()));
  ASSERT_NO_FATAL_FAILURE(begin_drain());
  ASSERT_TRUE(until([&] { return !session_.ready(); }));
  EXPECT_EQ(session_.state(), SessionState::closing);
  EXPECT_EQ(begin(kCount, filled(20, 2), waiting()), Status::not_connected);
  answer_all();
  ASSERT_TRUE(until([&] { return !closed_.empty(); }));
  EXPECT_EQ(closed_[0].status, Status::ok) << closed_[0].message();
  EXPECT_EQ(closed_[0].goodbye, kGoodbye);
  EXPECT_EQ(ended_[0].status, Status::ok);
}

/// The next attempt is later than the deadline of a long call that waits for it.
TEST_P(RpcDrainedSession, LongCallsThatWaitHaveTheirDeadlines) {
  ASSERT_NO_FATAL_FAILURE(begin_known_drain());
  CallOptions how = waiting();
  how.timeout = 50ms;
  ASSERT_EQ(begin(kCount, filled(9000, 2), how), Status::ok);
  EXPECT_TRUE(interrupted_.empty()) << "a call is in progress";
  answer_all();
  ASSERT_TRUE(until([&] { return !interrupted_.empty(); }));
  EXPECT_EQ(ended_[1].times, 0);
  const std::uint64_t from = now_;
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  EXPECT_LE(now_ - from, 60 * kMillisecond);
  EXPECT_EQ(ended_[1].status, Status::timed_out);
  finish();
}

/// The server's proof is lost, and its goodbye comes before the client asks again.
class RpcUnprovedSession : public RpcSessionReconnect {
 protected:
  void SetUp() override {
    RpcSessionReconnect::SetUp();
    if (over_connections()) GTEST_SKIP() << "only a session over datagrams awaits the proof";
  }
  void open_at_leaving_server(SessionOptions how) {
    start();
    how.when_not_ready = WhenNotReady::wait;
    session_ = client_->core->open_session(address_, how).value();
    ASSERT_EQ(begin(kCount, filled(20, 1)), Status::ok);
    ASSERT_NO_FATAL_FAILURE(meet_leaving_server());
  }
  void meet_leaving_server() {
    ASSERT_TRUE(engine_test::until({}, [&] {
      now_ += 10'000;
      (void)client_->core->poll();
      if (record().peer_address != nullptr) return true;
      (void)server_->engine.core->poll();
      return false;
    }));
    ASSERT_TRUE(spinwire::rpc::awaits_proof(record()));
    spinwire::softverbs::FaultPlan plan;
    plan.drop = 1;
    server_->engine.set(plan);
    (void)server_->engine.core->poll();
    server_->engine.set({});
    drain(server_->engine);
  }
};

TEST_F(RpcUnprovedSession, EndsByTheServersGoodbyeAndSendsNoCall) {
  ASSERT_NO_FATAL_FAILURE(open_at_leaving_server(options({})));
  ASSERT_TRUE(until([&] { return closed_.size() == 1; }));
  EXPECT_EQ(ready_, 0);
  EXPECT_EQ(closed_[0].status, Status::ok) << closed_[0].message();
  EXPECT_EQ(closed_[0].goodbye, kGoodbye);
  ASSERT_TRUE(all_ended());
  EXPECT_EQ(ended_[0].status, Status::not_connected);
  EXPECT_TRUE(runs_.empty());
  ASSERT_TRUE(until([&] { return server_->engine.core->drain.is_over(); }));
  client_->expect_clean();
}

TEST_F(RpcUnprovedSession, IsOpenedAgainAfterTheServersGoodbyeWithItsCalls) {
  ASSERT_NO_FATAL_FAILURE(open_at_leaving_server(options()));
  const std::uint64_t from = now_;
  ASSERT_TRUE(until([&] { return server_->engine.core->drain.is_over(); }));
  EXPECT_EQ(session_.state(), SessionState::opening);
  EXPECT_FALSE(all_ended()) << "the call waits for the next server";
  server_.reset();
  start(address_);
  ASSERT_TRUE(until([&] { return session_.ready(); }, kMillisecond));
  EXPECT_GE(now_ - from, 300 * kMillisecond);
  ASSERT_TRUE(until([&] { return all_ended(); }));
  EXPECT_EQ(ended_[0].status, Status::ok);
  EXPECT_EQ(ready_, 1);
  finish();
}

TEST_F(RpcUnprovedSession, EndsWithTheLossOfItsServerIfItsLastAttemptMeetsAGoodbye) {
  start();
  ASSERT_NO_FATAL_FAILURE(open(WhenNotReady::wait, Reconnect{1, 10ms, 100ms}));
  ASSERT_NO_FATAL_FAILURE(interrupt());
  ASSERT_EQ(begin(kCount, filled(20, 1)), Status::ok);
  start(address_);
  ASSERT_NO_FATAL_FAILURE(meet_leaving_server());
  ASSERT_TRUE(until([&] { return closed_.size() == 1; }));
  EXPECT_EQ(ready_, 1);
  EXPECT_EQ(closed_[0].status, Status::peer_lost) << closed_[0].message();
  EXPECT_EQ(closed_[0].goodbye, kGoodbye);
  ASSERT_TRUE(all_ended());
  EXPECT_EQ(ended_[0].status, Status::not_connected);
  EXPECT_TRUE(runs_.empty());
  client_->expect_clean();
}

}  // namespace
}  // namespace rpc_session_reconnect_test
