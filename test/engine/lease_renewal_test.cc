// Leases that the engine renews by itself.
#include <gtest/gtest.h>

#include "base/internals.h"
#include "engine/engine_core.h"
#include "engine/lease_ends.h"
#include "engine/zero_cost.h"

namespace lease_renewal_test {
namespace {

using namespace leases;  // NOLINT: a test's helpers

constexpr Nanoseconds kTime = 400ms;

LeaseOptions short_lease() {
  LeaseOptions options;
  options.duration = kTime;
  return options;
}

/// A lease that is renewed, and what its end reports.
struct Renewed : Timed {
  explicit Renewed(const Config& c = lease_config()) : Timed(c) {
    memory = request(64, short_lease());
    EXPECT_EQ(renew(kTime), Status::ok);
  }
  Status renew(Nanoseconds time) {
    return memory.auto_renew(time, [this](LeaseReply& r) { reports.push_back(r.status); });
  }
  /// As long as several leases take, in steps in which one renewal is due at most.
  void pass_leases(int leases) {
    for (int i = 0; i < 4 * leases; ++i) pass(kTime / 4);
  }
  [[nodiscard]] bool ended_by(Status status) const { return reports == std::vector{status}; }

  RemoteMemory memory;
  std::vector<Status> reports;
};

/// A lease that the server has given, and may recall.
struct Leased : Timed {
  Leased() : Timed(By::window), bytes(server.filled(64, 3)) {
    EXPECT_EQ(ends.server.lease(bytes, short_lease(), {}, &id), Status::ok);
    EXPECT_TRUE(until([&] { return leased.size() == 1; }));
    settle();
  }
  void finish() { Timed::finish(bytes); }
  /// Renews the lease from now on.
  Status renew() {
    return leased[0].auto_renew(kTime, [this](LeaseReply& r) { reports.push_back(r.status); });
  }
  Buffer bytes;
  LeaseId id;
  std::vector<Status> reports;
};

TEST(EngineLeaseRenewal, GoesOnUntilTheLeaseIsReleased) {
  Renewed t;
  for (std::uint32_t i = 0; i < 20; ++i) {
    t.pass_leases(1);
    EXPECT_GE(t.memory.time_left(), kTime / 4);
    EXPECT_EQ(t.write(t.memory.region(), i), Status::ok);
  }
  EXPECT_TRUE(t.returned.empty());
  t.memory.release();
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  EXPECT_EQ(t.returned[0].how, ReturnedBy::release);
  t.pass_leases(2);
  EXPECT_TRUE(t.reports.empty());
  t.finish();
}

TEST(EngineLeaseRenewal, IsMadeWhenHalfOfTheTimeIsOver) {
  Renewed t;
  const Nanoseconds guard = t.client.engine.config().leases.guard;
  t.pass(kTime / 4);
  EXPECT_EQ(t.memory.time_left(), 3 * kTime / 4 - guard);  // nothing was due yet
  t.pass(kTime / 4);
  EXPECT_EQ(t.memory.time_left(), kTime - guard);
  // One of the application's own counts, too.
  t.pass(kTime / 4);
  bool renewed = false;
  ASSERT_EQ(t.memory.renew(4 * kTime, [&](LeaseReply& r) { renewed = r.status == Status::ok; }),
            Status::ok);
  ASSERT_TRUE(t.until([&] { return renewed; }));
  t.pass(kTime);
  EXPECT_EQ(t.memory.time_left(), 3 * kTime - guard);
  t.pass(kTime);
  EXPECT_EQ(t.memory.time_left(), kTime - guard);
  t.memory.release();
  t.finish();
}

TEST(EngineLeaseRenewal, AnEngineThatDiesReportsNothing) {
  Renewed t;
  spinwire::detail::core_of(t.client.engine)->abort();
  t.client.engine = Engine();
  EXPECT_TRUE(t.reports.empty());
}

TEST(EngineLeaseRenewal, TheOwnerMayRefuse) {
  Config c = lease_config();
  c.leases.max_duration = 500ms;
  Renewed t(c);
  ASSERT_EQ(t.renew(600ms), Status::ok);
  t.pass(kTime / 2);
  ASSERT_TRUE(t.until([&] { return !t.reports.empty(); }));
  EXPECT_TRUE(t.ended_by(Status::limit));
  EXPECT_GT(t.memory.time_left(), Nanoseconds(0)) << "the lease ends in its time";
  t.pass(kTime);
  EXPECT_EQ(t.memory.time_left(), Nanoseconds(0));
  EXPECT_EQ(t.reports.size(), 1u);
  t.memory.release();
  t.finish();
}

TEST(EngineLeaseRenewal, ARecallEndsIt) {
  Leased t;
  bool empty = false;
  ASSERT_EQ(t.leased[0].auto_renew(kTime,
                                   [&](LeaseReply& r) {
                                     t.reports.push_back(r.status);
                                     empty = !t.leased[0];
                                   }),
            Status::ok);
  for (int i = 0; i < 12; ++i) t.pass(kTime / 4);
  EXPECT_TRUE(t.returned.empty());
  ASSERT_EQ(t.ends.server.recall(t.id), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1 && !t.reports.empty(); }));
  EXPECT_EQ(t.returned[0].how, ReturnedBy::recall);
  EXPECT_EQ(t.reports, std::vector{Status::lease_expired});
  EXPECT_TRUE(empty);
  t.finish();
}

TEST(EngineLeaseRenewal, ARecallEndsItWhileARequestIsUnderWay) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "the peer acts only when it is polled";
  Leased t;
  ASSERT_EQ(t.renew(), Status::ok);
  Timed::now += static_cast<std::uint64_t>(kTime.count()) / 2;
  for (int i = 0; i < 4; ++i) (void)t.client.poll();  // asks
  EXPECT_EQ(t.leased[0].give_back(), Status::would_block) << "no request is under way";
  ASSERT_EQ(t.ends.server.recall(t.id), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1 && !t.reports.empty(); }));
  t.settle();
  EXPECT_EQ(t.reports, std::vector{Status::lease_expired});
  EXPECT_TRUE(t.ends.client.ready());
  t.finish();
}

TEST(EngineLeaseRenewal, TheAnswerToAnEarlierCallsRequestDoesNotEndIt) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "the peer acts only when it is polled";
  Config c = lease_config();
  c.leases.max_duration = 500ms;
  Renewed t(c);
  ASSERT_EQ(t.renew(600ms), Status::ok);  // the owner will refuse that
  t.settle();
  Timed::now += static_cast<std::uint64_t>(kTime.count()) / 2;
  for (int i = 0; i < 4; ++i) (void)t.client.poll();  // asks
  EXPECT_EQ(t.memory.give_back(), Status::would_block) << "no request is under way";
  ASSERT_EQ(t.renew(kTime), Status::ok);
  t.settle();  // the refusal comes
  t.pass_leases(3);
  EXPECT_TRUE(t.reports.empty());
  EXPECT_GT(t.memory.time_left(), Nanoseconds(0));
  t.memory.release();
  t.finish();
}

TEST(EngineLeaseRenewal, ARecallEndsOneThatTheCallbackOfARenewalStarts) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "the peer acts only when it is polled";
  Leased t;
  Status started = Status::would_block;
  const auto renewed = [&](LeaseReply&) { started = t.renew(); };
  ASSERT_EQ(t.leased[0].renew(kTime, renewed), Status::ok);
  ASSERT_EQ(t.ends.server.recall(t.id), Status::ok);
  for (int i = 0; i < 4; ++i) (void)t.server.poll();  // the recall goes out before the answer
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  t.settle();
  ASSERT_EQ(started, Status::ok);
  EXPECT_EQ(t.reports, std::vector{Status::lease_expired});
  EXPECT_TRUE(t.ends.client.ready());
  t.finish();
}

TEST(EngineLeaseRenewal, TheConnectionsEndEndsIt) {
  Renewed t;
  t.pass_leases(2);
  ASSERT_EQ(t.ends.server.close(), Status::ok);
  ASSERT_TRUE(t.until([&] { return !t.reports.empty(); }));
  EXPECT_TRUE(t.ended_by(Status::flushed));
  EXPECT_FALSE(t.memory);
  EXPECT_EQ(t.renew(kTime), Status::not_connected);
  t.finish();
}

TEST(EngineLeaseRenewal, ALeaseThatExpiresMeanwhileEndsIt) {
  Renewed t;
  Timed::now += static_cast<std::uint64_t>(kTime.count());  // nobody polled for so long
  ASSERT_TRUE(t.until([&] { return !t.reports.empty(); }));
  EXPECT_TRUE(t.ended_by(Status::lease_expired));
  EXPECT_EQ(t.renew(kTime), Status::lease_expired);
  t.memory.release();
  t.finish();
}

TEST(EngineLeaseRenewal, TheApplicationEndsItWithoutACallback) {
  Renewed t;
  EXPECT_EQ(t.renew(Nanoseconds(1)), Status::invalid_argument);
  t.memory.stop_auto_renew();
  t.pass_leases(1);
  EXPECT_EQ(t.memory.time_left(), Nanoseconds(0));
  t.memory.release();
  t.memory = t.request(64, short_lease());
  ASSERT_EQ(t.renew(kTime), Status::ok);
  ASSERT_EQ(t.memory.give_back(), Status::ok);
  t.pass_leases(2);
  t.memory = t.request(64, short_lease());
  ASSERT_EQ(t.renew(kTime), Status::ok);
  EXPECT_TRUE(t.memory.detach());
  t.pass_leases(2);
  EXPECT_TRUE(t.reports.empty());
  EXPECT_EQ(RemoteMemory().auto_renew(kTime), Status::not_connected);
  RemoteMemory().stop_auto_renew();
  t.finish();
}

TEST(EngineLeaseRenewal, ALeaseThatIsBeingGivenBackReportsNoEnd) {
  Renewed t;
  std::vector<Status> given_back;
  ASSERT_EQ(t.memory.give_back([&](LeaseReply& r) { given_back.push_back(r.status); }), Status::ok);
  t.server.engine = Engine();  // does not poll any more
  ASSERT_TRUE(t.until([&] { return !t.client.closed.empty(); }));
  EXPECT_EQ(given_back, std::vector{Status::flushed});
  EXPECT_TRUE(t.reports.empty());
}

#if SPINWIRE_TEST_COUNTS_HEAP
TEST(EngineLeaseRenewal, TakesNoHeap) {
  Renewed t;
  t.pass_leases(10);
  zero_cost_test::heap_calls = 0;
  zero_cost_test::armed = true;
  t.pass_leases(200);
  zero_cost_test::armed = false;
  EXPECT_EQ(zero_cost_test::heap_calls, 0u);
  EXPECT_GE(t.memory.time_left(), kTime / 4);
  t.memory.release();
  t.finish();
}
#endif

}  // namespace
}  // namespace lease_renewal_test
