// The order and the pauses of attempts to reconnect.
#include "agent/reconnect_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace reconnect_plan_test {
namespace {

using namespace std::chrono_literals;
using spinwire::Clock;
using spinwire::LocalPath;
using spinwire::Reconnect;
using spinwire::Status;
using spinwire::agent::AttemptEnd;
using spinwire::agent::ReconnectPlan;

constexpr std::uint64_t kMillisecond = 1'000'000;
constexpr AttemptEnd kFailed{};
constexpr AttemptEnd kRefused{false, true, 0};

class ReconnectPlans : public testing::Test {
 protected:
  [[nodiscard]] ReconnectPlan plan(const Reconnect& options, int addresses,
                                   const std::vector<LocalPath>& paths = {}) const {
    std::vector<std::string> more;
    for (int i = 1; i < addresses; ++i) more.push_back("10.0.0." + std::to_string(i + 1) + ":1");
    return ReconnectPlan::make("test", options, "10.0.0.1:1", more, Clock::manual(&now_), paths)
        .value();
  }
  /// The last number of the present address.
  static int place(const ReconnectPlan& plan) { return plan.address().str()[7] - '0'; }
  /// Goes on after this end. Returns the pause.
  std::uint64_t next(ReconnectPlan& plan, const AttemptEnd& end = kFailed) const {
    EXPECT_TRUE(plan.has_next(end, now_));
    return plan.next(end, now_);
  }

  std::uint64_t now_ = 1'000'000'000;
};

TEST_F(ReconnectPlans, ARoundHasAPauseBeforeItAndNoneWithin) {
  ReconnectPlan p = plan({3, 10ms, 20ms}, 3);
  std::vector<int> places{place(p)};
  for (int i = 1; i < 12; ++i) {
    const std::uint64_t pause = next(p);
    if (i % 3 == 0) {
      const std::uint64_t longest = (i == 3 ? 10 : 20) * kMillisecond;
      EXPECT_LE(pause, longest);
      EXPECT_GE(pause, longest / 2);
    } else {
      EXPECT_EQ(pause, 0u) << i;
    }
    places.push_back(place(p));
  }
  EXPECT_EQ(places, (std::vector<int>{1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3}));
  EXPECT_FALSE(p.has_next(kFailed, now_));
}

TEST_F(ReconnectPlans, ALossBeginsARoundWithTheNextAddress) {
  ReconnectPlan p = plan({2, 10ms, 20ms}, 2);
  (void)next(p);
  EXPECT_EQ(place(p), 2);
  const std::uint64_t ready_at = now_;
  now_ += kMillisecond;  // it has not lasted
  EXPECT_GE(next(p, {true, false, ready_at}), 5 * kMillisecond);
  EXPECT_EQ(place(p), 1);
  EXPECT_EQ(next(p), 0u);
  EXPECT_EQ(place(p), 2);
  EXPECT_GE(next(p), 10 * kMillisecond);
  EXPECT_FALSE(p.has_next({true, false, now_}, now_));
  const std::uint64_t again = now_;
  now_ += 20 * kMillisecond;  // lasting: the rounds are counted from 0
  EXPECT_LE(next(p, {true, false, again}), 10 * kMillisecond);
  EXPECT_EQ(p.rounds(), 1u);
}

TEST_F(ReconnectPlans, ARefusalEndsItIfAllOfARoundRefuse) {
  ReconnectPlan one = plan({9, 10ms, 20ms}, 1);
  EXPECT_FALSE(one.has_next(kRefused, now_));
  EXPECT_FALSE(one.has_next({true, true, now_}, now_));
  ReconnectPlan p = plan({9, 10ms, 20ms}, 2);
  (void)next(p, kRefused);
  EXPECT_TRUE(p.has_next(kFailed, now_));
  EXPECT_FALSE(p.has_next(kRefused, now_));
  (void)next(p, kFailed);
  (void)next(p, kFailed);
  EXPECT_TRUE(p.has_next(kRefused, now_)) << "the other one may listen again";
}

TEST_F(ReconnectPlans, WithoutAttemptsTheFirstRoundIsAll) {
  ReconnectPlan p = plan({}, 2);
  EXPECT_EQ(next(p), 0u);
  EXPECT_TRUE(p.is_round_over());
  EXPECT_FALSE(p.has_next(kFailed, now_));
  EXPECT_FALSE(p.has_next({true, false, 0}, now_));
}

TEST_F(ReconnectPlans, AnAddressThatAsksForTimeHasIt) {
  ReconnectPlan one = plan({9, 10ms, 20ms}, 1);
  one.hold_off(now_, 500ms);
  const std::uint64_t pause = next(one);
  EXPECT_GE(pause, 500 * kMillisecond);
  EXPECT_LE(pause, 625 * kMillisecond);
  now_ += pause;
  EXPECT_LE(next(one), 20 * kMillisecond);
  // Others are tried meanwhile.
  ReconnectPlan p = plan({99, 10ms, 10ms}, 3);
  p.hold_off(now_, 500ms);
  for (const int expected : {2, 3, 2, 3, 2, 3}) {
    now_ += next(p);
    EXPECT_EQ(place(p), expected);
  }
  p.hold_off(now_, 100ms);
  now_ += next(p);
  p.hold_off(now_, 100ms);
  now_ += next(p);
  EXPECT_EQ(place(p), 3) << "the one whose time ends first";
}

TEST_F(ReconnectPlans, ARoundTriesEachAddressThroughEachPathAndStepsBothAtOnce) {
  ReconnectPlan p = plan({9, 10ms, 20ms}, 2, {{1}, {2}});
  std::vector<std::pair<int, int>> tried;
  for (int i = 0; i < 8; ++i) {
    tried.emplace_back(place(p), p.local_path()->port);
    if (i == 3) {
      EXPECT_TRUE(p.is_round_over());
    }
    (void)next(p);
  }
  const std::vector<std::pair<int, int>> round{{1, 1}, {2, 2}, {1, 2}, {2, 1}};
  EXPECT_TRUE(std::equal(round.begin(), round.end(), tried.begin()));
  EXPECT_TRUE(std::equal(round.begin(), round.end(), tried.begin() + 4));
  // Three addresses and two paths: each pair once.
  ReconnectPlan q = plan({9, 10ms, 20ms}, 3, {{1}, {2}});
  std::set<std::pair<int, int>> pairs;
  for (int i = 0; i < 6; ++i) {
    pairs.emplace(place(q), q.local_path()->port);
    (void)next(q);
  }
  EXPECT_EQ(pairs.size(), 6u);
}

TEST_F(ReconnectPlans, APathIsAChoiceOfItsOwn) {
  ReconnectPlan p = plan({}, 1, {{1}, {2}});
  EXPECT_TRUE(p.has_choice());
  EXPECT_TRUE(p.can_leave(1));
  EXPECT_FALSE(p.can_leave(2)) << "not in use";
  (void)next(p);
  EXPECT_EQ(p.local_path()->port, 2u);
  EXPECT_TRUE(p.can_leave(2));
  EXPECT_FALSE(p.has_next(kFailed, now_)) << "the only round is over";
  EXPECT_FALSE(plan({9, 10ms, 20ms}, 1, {{1}}).can_leave(1)) << "there is no other";
  EXPECT_FALSE(plan({9, 10ms, 20ms}, 1, {{1, 0}, {1, 1}}).can_leave(1)) << "no other port";
  EXPECT_EQ(plan({}, 1).local_path(), nullptr);
}

TEST_F(ReconnectPlans, AnAddressThatAsksForTimeHasItOnAllPaths) {
  ReconnectPlan p = plan({99, 10ms, 10ms}, 2, {{1}, {2}});
  p.hold_off(now_, 1s);
  for (int i = 0; i < 2; ++i) {
    (void)next(p);
    EXPECT_EQ(place(p), 2) << i;
  }
}

TEST_F(ReconnectPlans, ClientsWithTheSameTimeComeBackApart) {
  constexpr std::uint64_t kTime = 10'000 * kMillisecond;
  constexpr int kClients = 1000, kParts = 10;
  std::vector<int> came(kParts);
  for (int i = 0; i < kClients; ++i) {
    ReconnectPlan p = plan({9, 10ms, 20ms}, 1);
    p.hold_off(now_, 10s);
    const std::uint64_t late = next(p) - kTime;
    ASSERT_LE(late, kTime / 4);
    ++came[std::min<std::uint64_t>(late / (kTime / 4 / kParts), kParts - 1)];
  }
  // 100 are expected in each part of a quarter second: nine standard deviations below.
  for (const int each : came) EXPECT_GE(each, 15);
  for (const int each : came) EXPECT_LE(each, 200);
}

TEST_F(ReconnectPlans, AShortTimeDoesNotReplaceThePause) {
  ReconnectPlan p = plan({9, 10ms, 20ms}, 1);
  p.hold_off(now_, 1ms);
  EXPECT_GE(next(p), 5 * kMillisecond);
}

}  // namespace
}  // namespace reconnect_plan_test
