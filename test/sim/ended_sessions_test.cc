// Sessions that have ended, while their connection for long calls has not.
#include "sim/serving_nodes.h"

namespace sim_ended_sessions_test {
namespace {

using namespace sim_test;  // NOLINT: a test's helpers

Config slow_connections() {
  Config c = watchful();
  c.connections.close_timeout = 500ms;
  c.queue_pair.ack_timeout = 20;  // 4 s: lost packets end no connection here
  return c;
}

/// A session whose connection for long calls is ready, and whose server never answers three inline
/// calls.
class SimEndedSessions : public testing::Test {
 protected:
  void SetUp() override {
    const Buffer memory = world_.sim.engine(0).allocate(50'000);
    CallOptions options;
    options.reply_into = memory.slice();
    ASSERT_EQ(begin(kEcho, memory.slice(), options), Status::ok);
    ASSERT_TRUE(world_.sim.run_until([&] { return ended_.size() == 1; }, 1s));
    ASSERT_EQ(world_.sim.engine(0).stats().connections, 1u);
    ASSERT_EQ(ServingNodes::good(world_.call(session_, 1)), 1u) << "the window is advertised";
    for (int i = 0; i < 3; ++i) ASSERT_EQ(begin(kNever), Status::ok);
    ASSERT_TRUE(world_.sim.run_until([&] { return world_.homes[1].pending.size() == 3; }, 1s));
    ended_.clear();
  }
  Status begin(Method method, const BufferSlice& request = {}, const CallOptions& options = {}) {
    const ReplyCallback done = [this](Reply& r) { ended_.push_back(r.status()); };
    if (request) return session_.call(method, request, done, options);
    return session_.call(method, std::span<const std::byte>(), done, options);
  }
  bool until_closed() {
    return world_.sim.run_until([&] { return world_.closed.size() == 1; }, 1s);
  }

  std::vector<Status> ended_;
  ServingNodes world_{41, 2, slow_connections()};
  Session session_ = world_.ready(0, 1);
};

/// The server cuts its drain off. Its last datagram comes, the end of its connection does not.
TEST_F(SimEndedSessions, InlineCallsDoNotWaitForTheEndOfTheConnection) {
  NetworkFaults faults;
  faults.packet_loss = 1;
  ASSERT_TRUE(world_.sim.set_faults(faults));
  ASSERT_TRUE(world_.sim.engine(1).drain(1ms));
  ASSERT_TRUE(world_.sim.run_until([&] { return ended_.size() == 3; }, 20ms));
  EXPECT_EQ(ended_, std::vector(3, Status::flushed));
  EXPECT_EQ(session_.state(), SessionState::closing) << "its connection has not ended";
  EXPECT_TRUE(world_.closed.empty());
  ASSERT_TRUE(until_closed());
  EXPECT_EQ(world_.closed[0].status, Status::ok) << world_.closed[0].message();
  EXPECT_EQ(world_.closed[0].goodbye.reason, GoodbyeReason::draining);
  EXPECT_EQ(ended_.size(), 3u);
  world_.expect_clean();
}

/// Only datagrams are lost, so the connection still lives when the session ends.
TEST_F(SimEndedSessions, ALostSessionTakesNoCallBeforeItsConnectionHasEnded) {
  NetworkFaults faults;
  faults.drop = 1;
  ASSERT_TRUE(world_.sim.set_faults(faults));
  ASSERT_TRUE(world_.sim.run_until([&] { return session_.state() == SessionState::closing; }, 1s));
  EXPECT_EQ(ended_, std::vector(3, Status::peer_lost));
  EXPECT_TRUE(world_.closed.empty());
  EXPECT_EQ(begin(kNever), Status::not_connected);
  ASSERT_TRUE(until_closed());
  EXPECT_EQ(world_.closed[0].status, Status::peer_lost) << world_.closed[0].message();
  EXPECT_EQ(ended_.size(), 3u);
  world_.expect_clean();
}

}  // namespace
}  // namespace sim_ended_sessions_test
