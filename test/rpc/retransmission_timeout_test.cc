// When unanswered calls end or are retransmitted: at the exact tick, although the queue's scan
// alone would be late, and no more often than useful.
#include "base/internals.h"
#include "rpc/bare_engine.h"
#include "rpc/client_call.h"
#include "rpc/client_session.h"

namespace rpc_retransmission_timeout_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::rpc::ClientSession;

/// A session whose server no longer polls. Each poll advances the time by a microsecond.
struct TimedCalls {
  TimedCalls()
      : server(over(RpcTransport::datagram), &now), client(over(RpcTransport::datagram), &now) {
    listener = server.core->listen("127.0.0.1:0", {}).value();
    EXPECT_TRUE(server.core->serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); }));
    EXPECT_TRUE(server.core->serve(kLater, [this](Request& r) { later.push_back(r.defer()); }));
    session = client.core->open_session(listener.address(), {}).value();
    EXPECT_TRUE(both_until([&] { return session.ready(); }));
    begin();  // from now on the whole window is granted
    EXPECT_TRUE(both_until([&] { return ended == 1; }));
    whole = client.core->calls->min_rto;
    EXPECT_EQ(ours().rto, whole);
    pass(2 * whole);  // the queue is empty
  }
  template <typename Done>
  bool both_until(Done&& done) {
    for (int i = 0; i < 1'000'000 && !done(); ++i) {
      pass(1000);
      (void)server.core->poll();
    }
    return done();
  }
  /// Polls the client until that time.
  void until(std::uint64_t then) {
    while (now < then) {
      now += 1000;
      (void)client.core->poll();
    }
  }
  void pass(std::uint64_t ticks) { until(now + ticks); }
  void begin(std::uint64_t deadline = 0, spinwire::Method method = kEcho) {
    CallOptions options;
    options.timeout = Nanoseconds(static_cast<std::int64_t>(deadline));
    const auto done = [this](Reply&) { ++ended; };
    ASSERT_EQ(session.call(method, std::span<const std::byte>(), done, options), Status::ok);
  }
  [[nodiscard]] ClientSession& ours() const {
    return *spinwire::rpc::find_client(*client.core->calls,
                                       spinwire::detail::Internals::name(session));
  }
  [[nodiscard]] std::uint64_t again() const {
    return client.core->calls->stats.retransmitted_requests;
  }

  std::uint64_t now = 1'000'000'000;
  std::uint64_t whole = 0;
  int ended = 0;  // before the engines, whose destructors end calls
  std::vector<PendingCall> later;
  Bare server, client;
  Listener listener;
  Session session;
};

TEST(RpcRetransmissionTimeout, ADeadlineThatIsNearEndsTheCallBeforeTheWatchLooks) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  TimedCalls t;
  // Before the first scan; between the first and the second, just after a retransmission.
  for (const std::uint64_t deadline : {t.whole / 4, t.whole / 2 * 3}) {
    const int before = t.ended;
    const std::uint64_t begun = t.now;
    t.begin(deadline);
    t.until(begun + deadline - t.whole / 8);
    EXPECT_EQ(t.ended, before);
    t.until(begun + deadline + t.whole / 8);
    EXPECT_EQ(t.ended, before + 1) << deadline;
    EXPECT_EQ(t.ours().in_flight, 0u);
    t.pass(2 * t.whole);
  }
}

TEST(RpcRetransmissionTimeout, OfSeveralDeadlinesTheNearestCounts) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  TimedCalls t;
  const std::uint64_t begun = t.now;
  t.begin(t.whole / 8 * 11);
  t.begin(t.whole / 8 * 15);
  t.until(begun + t.whole / 8 * 10);
  EXPECT_EQ(t.ended, 1);
  t.until(begun + t.whole / 8 * 12);
  EXPECT_EQ(t.ended, 2);
  t.until(begun + 2 * t.whole);
  EXPECT_EQ(t.ended, 3);
}

TEST(RpcRetransmissionTimeout, TheFirstReplyOfABatchIsMeasuredAndTellsOfAnyLoss) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  TimedCalls t;
  // A call is lost, retransmitted, and answered after two others.
  spinwire::softverbs::FaultPlan lossy;
  lossy.drop = 1;
  t.client.set(lossy);
  t.begin(0, kLater);
  t.client.set({});
  ASSERT_TRUE(t.both_until([&] { return t.later.size() == 1; }));
  ASSERT_EQ(t.again(), 1u);
  t.begin();
  t.begin();
  t.now += t.whole / 100;
  (void)t.server.core->poll();
  ASSERT_EQ(t.later[0].reply(std::span<const std::byte>()), Status::ok);
  const std::uint64_t smooth = t.ours().srtt;
  ASSERT_GT(smooth, 0u);
  t.now += t.whole / 100;
  const auto off = static_cast<std::int64_t>(t.whole / 100 * 2 - smooth);
  (void)t.client.core->poll();
  EXPECT_EQ(t.ended, 4);
  EXPECT_EQ(t.ours().srtt, smooth + static_cast<std::uint64_t>(off >> 3));  // by one of the two
  EXPECT_EQ(t.ours().rto, 2 * t.whole);
  // The same applies while every reply is measured because the window is small.
  ASSERT_LT(t.ours().congestion.cwnd, t.ours().congestion.max_cwnd);
  const std::uint64_t then = t.ours().srtt;
  t.begin();
  t.begin();
  t.now += t.whole / 10;
  (void)t.server.core->poll();
  (void)t.client.core->poll();
  EXPECT_EQ(t.ended, 6);
  EXPECT_EQ(t.ours().srtt,
            then + static_cast<std::uint64_t>(static_cast<std::int64_t>(t.whole / 10 - then) >> 3));
}

TEST(RpcRetransmissionTimeout, WhatIsDueLongBeforeTheNextLookIsSentThen) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  TimedCalls t;
  const std::uint64_t begun = t.now;
  t.begin();
  t.pass(t.whole / 2);
  t.begin();
  t.until(begun + t.whole + t.whole / 4);
  EXPECT_EQ(t.again(), 1u);  // the first, when the scan found both
  t.until(begun + t.whole + t.whole / 4 * 3);
  EXPECT_EQ(t.again(), 2u);
}

TEST(RpcRetransmissionTimeout, WhatIsDueShortlyBeforeTheNextLookWaitsForThat) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  TimedCalls t;
  const std::uint64_t begun = t.now;
  t.begin();
  t.pass(t.whole / 8 * 7);
  t.begin();
  t.until(begun + 2 * t.whole - t.whole / 32);
  EXPECT_EQ(t.again(), 1u);
  EXPECT_EQ((t.ours().slots[0].flags | t.ours().slots[1].flags) & spinwire::rpc::kOnSessionTimer,
            0);
  t.until(begun + 2 * t.whole + t.whole / 8);
  EXPECT_EQ(t.again(), 2u);
}

TEST(RpcRetransmissionTimeout, WhereTheWatchEndsCallsThoseThatWaitGoOn) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  TimedCalls t;
  const std::uint32_t window = t.ours().window;
  for (std::uint32_t i = 0; i < window; ++i) t.begin(t.whole / 2 * 3);
  t.begin();
  EXPECT_EQ(t.ours().backlog_count, 1u);
  t.now += 4 * t.whole;  // without a poll: the scan is late
  t.pass(t.whole / 4);
  EXPECT_EQ(t.ended, 1 + static_cast<int>(window));
  EXPECT_EQ(t.ours().backlog_count, 0u);
  EXPECT_EQ(t.ours().in_flight, 1u);
}

}  // namespace
}  // namespace rpc_retransmission_timeout_test
