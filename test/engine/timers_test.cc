// Timers of the application.
#include <gtest/gtest.h>

#include <vector>

#include "engine/harness.h"

namespace timers_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::Timer;

/// An engine whose time the test moves.
struct World {
  World() : node(small_config(), &ticks) {}
  void pass(std::uint64_t ns) {
    ticks += ns;
    for (int i = 0; i < 4; ++i) (void)node.poll();
  }
  std::uint64_t ticks = 1'000'000'000;
  Node node;
};

TEST(ApplicationTimers, RunOnceAtTheirTime) {
  World w;
  int runs = 0;
  auto timer = w.node.engine.after(10ms, [&runs] { ++runs; });
  ASSERT_TRUE(timer);
  EXPECT_TRUE(timer->scheduled());
  w.pass(9'900'000);
  EXPECT_EQ(runs, 0);
  w.pass(300'000);
  EXPECT_EQ(runs, 1);
  EXPECT_FALSE(timer->scheduled());
  EXPECT_EQ(timer->cancel(), Status::not_connected);
  w.pass(1'000'000'000);
  EXPECT_EQ(runs, 1);
}

TEST(ApplicationTimers, RepeatAndLeaveOutWhatWasMissed) {
  World w;
  int runs = 0;
  auto timer = w.node.engine.every(10ms, [&runs] { ++runs; });
  ASSERT_TRUE(timer);
  for (int i = 1; i <= 5; ++i) {
    w.pass(10'200'000);
    EXPECT_EQ(runs, i);
  }
  w.pass(95'000'000);  // nine times at once
  EXPECT_EQ(runs, 6);
  w.pass(10'200'000);
  EXPECT_EQ(runs, 7);
  EXPECT_EQ(timer->cancel(), Status::ok);
  EXPECT_EQ(timer->cancel(), Status::not_connected);
  w.pass(100'000'000);
  EXPECT_EQ(runs, 7);
}

TEST(ApplicationTimers, WithManualControlRunInThePollControlOfTheApplication) {
  Config config = small_config();
  config.engine.control = ControlMode::manual;
  std::uint64_t ticks = 1'000'000'000;
  Node node(config, &ticks);
  int once = 0, repeated = 0;
  ASSERT_TRUE(node.engine.after(10ms, [&once] { ++once; }));
  ASSERT_TRUE(node.engine.every(10ms, [&repeated] { ++repeated; }));
  for (int i = 1; i <= 3; ++i) {
    ticks += 10'200'000;
    for (int polls = 0; polls < 100; ++polls) (void)node.engine.poll();
    EXPECT_EQ(node.engine.wait(1h), Status::ok) << "poll_control() is due";
    EXPECT_EQ(repeated, i - 1);
    EXPECT_GT(node.engine.poll_control(), 0);
    EXPECT_EQ(repeated, i);
    EXPECT_EQ(once, 1);
  }
}

TEST(ApplicationTimers, ACallbackKeepsItsOwnState) {
  World w;
  int last = 0;
  ASSERT_TRUE(w.node.engine.every(1ms, [&last, n = 0]() mutable { last = ++n; }));
  for (int i = 0; i < 4; ++i) w.pass(1'200'000);
  EXPECT_EQ(last, 4);
}

TEST(ApplicationTimers, CancelThemselvesAndStartOthers) {
  World w;
  struct {
    World* w;
    Timer timer;
    int runs = 0;
    int others = 0;
  } s{&w, {}};
  s.timer = *w.node.engine.every(1ms, [&s] {
    EXPECT_TRUE(s.timer.scheduled());
    if (++s.runs < 3) return;
    EXPECT_EQ(s.timer.cancel(), Status::ok);
    EXPECT_TRUE(s.w->node.engine.after(1ms, [&s] { ++s.others; }));
    EXPECT_FALSE(s.timer.scheduled()) << "a stale handle names no later timer";
  });
  for (int i = 0; i < 6; ++i) w.pass(1'200'000);
  EXPECT_EQ(s.runs, 3);
  EXPECT_EQ(s.others, 1);
}

TEST(ApplicationTimers, EndWithTheirEngine) {
  std::uint64_t ticks = 1;
  Timer timer;
  int runs = 0;
  {
    Node node(small_config(), &ticks);
    timer = *node.engine.after(1ms, [&runs] { ++runs; });
    ticks += 10'000'000;
  }
  EXPECT_EQ(runs, 0);
  EXPECT_FALSE(timer.scheduled());
  EXPECT_EQ(timer.cancel(), Status::not_connected);
  EXPECT_EQ(Timer().cancel(), Status::not_connected);
}

TEST(ApplicationTimers, ManyAtOnceKeepTheirOrderAndTheirRecords) {
  World w;
  struct {
    std::vector<int> order;
    int next = 0;
  } s;
  std::vector<Timer> timers;
  for (int i = 0; i < 1000; ++i) {
    timers.push_back(*w.node.engine.after(std::chrono::milliseconds(1000 - i),
                                          [&s, i] { s.order.push_back(i); }));
  }
  for (int i = 0; i < 1000; i += 2)
    EXPECT_EQ(timers[static_cast<std::size_t>(i)].cancel(), Status::ok);
  for (int i = 0; i < 1100; ++i) w.pass(1'000'000);
  ASSERT_EQ(s.order.size(), 500u);
  for (std::size_t i = 1; i < s.order.size(); ++i) EXPECT_LT(s.order[i], s.order[i - 1]);
}

TEST(ApplicationTimers, BadArgumentsAreRefused) {
  World w;
  Engine& e = w.node.engine;
  EXPECT_EQ(e.after(-1ns, [] {}).error().status, Status::invalid_argument);
  EXPECT_EQ(e.every(0ns, [] {}).error().status, Status::invalid_argument);
  EXPECT_EQ(e.every(0ns, [] {}).error().found, "a time of 0 ns");
  EXPECT_EQ(e.every(-1ns, [] {}).error().status, Status::invalid_argument);
  EXPECT_EQ(e.after(1ns, nullptr).error().status, Status::invalid_argument);
  auto far = e.after(std::chrono::nanoseconds::max(), [] {});
  ASSERT_TRUE(far);
  w.pass(1'000'000'000'000);
  EXPECT_TRUE(far->scheduled());
}

}  // namespace
}  // namespace timers_test
