#include "base/timer_wheel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

namespace timer_wheel_test {
namespace {

using spinwire::base::Timer;
using spinwire::base::TimerWheel;

constexpr std::size_t kAll = 1'000'000;

std::vector<std::uint32_t> advance(TimerWheel& wheel, std::uint64_t now, std::size_t most = kAll) {
  std::vector<std::uint32_t> fired;
  const std::size_t count =
      wheel.advance(now, most, [&](Timer& timer) { fired.push_back(timer.index); });
  EXPECT_EQ(count, fired.size());
  return fired;
}

using List = std::vector<std::uint32_t>;

TEST(TimerWheel, FiresAtTheDeadlineAndNotBefore) {
  TimerWheel wheel(1, 1000);
  Timer timer;
  timer.index = 3;
  wheel.schedule(timer, 1010);
  EXPECT_TRUE(timer.scheduled());
  EXPECT_EQ(wheel.size(), 1u);
  EXPECT_EQ(advance(wheel, 1009), List{});
  EXPECT_EQ(advance(wheel, 1010), List{3});
  EXPECT_FALSE(timer.scheduled());
  EXPECT_EQ(wheel.size(), 0u);
  EXPECT_EQ(advance(wheel, 2000), List{});
}

TEST(TimerWheel, ResolutionRoundsDeadlinesUpOnly) {
  TimerWheel wheel(100, 0);
  EXPECT_EQ(wheel.resolution(), 64u);
  Timer timer;
  wheel.schedule(timer, 65);
  EXPECT_EQ(advance(wheel, 127), List{});
  EXPECT_EQ(advance(wheel, 128), List{0});
  wheel.schedule(timer, 192);
  EXPECT_EQ(advance(wheel, 191), List{});
  EXPECT_EQ(advance(wheel, 192), List{0});
  EXPECT_EQ(TimerWheel(0, 0).resolution(), 1u);
}

TEST(TimerWheel, PassedDeadlinesFireAtTheNextAdvance) {
  TimerWheel wheel(1, 500);
  Timer timer;
  wheel.schedule(timer, 3);
  EXPECT_EQ(wheel.next_deadline(), 500u);
  EXPECT_EQ(advance(wheel, 500), List{0});
}

TEST(TimerWheel, NothingFiresWhenTimeStepsBack) {
  TimerWheel wheel(1, 500);
  Timer timer;
  wheel.schedule(timer, 499);
  EXPECT_EQ(advance(wheel, 400), List{});
  EXPECT_EQ(advance(wheel, 500), List{0});
}

TEST(TimerWheel, CancelDisarmsInEveryPlace) {
  TimerWheel wheel(1, 0);
  Timer timers[4];
  for (Timer& timer : timers) wheel.schedule(timer, 100);  // one list: head, inner, tail
  wheel.cancel(timers[1]);
  wheel.cancel(timers[0]);
  wheel.cancel(timers[3]);
  EXPECT_FALSE(timers[1].scheduled());
  wheel.cancel(timers[1]);  // again: no effect
  EXPECT_EQ(wheel.size(), 1u);
  timers[2].index = 2;
  EXPECT_EQ(advance(wheel, 100), List{2});
  wheel.schedule(timers[0], 1'000'000);
  wheel.cancel(timers[0]);
  EXPECT_EQ(wheel.next_deadline(), TimerWheel::kNever);
  EXPECT_EQ(advance(wheel, 2'000'000), List{});
}

TEST(TimerWheel, RescheduleMovesEitherWay) {
  TimerWheel wheel(1, 0);
  Timer timer;
  wheel.schedule(timer, 100);
  wheel.reschedule(timer, 10'000);
  EXPECT_EQ(wheel.size(), 1u);
  EXPECT_EQ(advance(wheel, 9'999), List{});
  wheel.reschedule(timer, 9'999);
  EXPECT_EQ(advance(wheel, 9'999), List{0});
  wheel.reschedule(timer, 10'001);
  EXPECT_EQ(advance(wheel, 10'001), List{0});
}

TEST(TimerWheel, DistantDeadlinesKeepTheirExactTime) {
  for (int bit = 0; bit < 64; ++bit) {
    for (const std::uint64_t start : {std::uint64_t{0}, std::uint64_t{0x123456789}}) {
      const std::uint64_t deadline = start + (std::uint64_t{1} << bit);
      TimerWheel wheel(1, start);
      Timer timer;
      wheel.schedule(timer, deadline);
      EXPECT_EQ(advance(wheel, deadline - 1), List{}) << bit;
      EXPECT_EQ(advance(wheel, deadline), List{0}) << bit;
    }
  }
}

TEST(TimerWheel, TheEndOfTimeIsNeverReached) {
  TimerWheel wheel(16, 0);
  Timer timer;
  wheel.schedule(timer, TimerWheel::kNever);
  EXPECT_EQ(wheel.next_deadline(), TimerWheel::kNever);
  EXPECT_EQ(advance(wheel, TimerWheel::kNever), List{});
  EXPECT_TRUE(timer.scheduled());
}

TEST(TimerWheel, FiresInOrderOfDeadlines) {
  TimerWheel wheel(1, 0);
  std::vector<std::unique_ptr<Timer>> timers;
  std::mt19937_64 random(5);
  for (std::uint32_t i = 0; i < 200; ++i) {
    timers.push_back(std::make_unique<Timer>());
    timers.back()->index = i;
    wheel.schedule(*timers.back(), 1 + random() % 1'000'000);
  }
  const List fired = advance(wheel, 2'000'000);
  const List rest = advance(wheel, 2'000'000);
  List all = fired;
  all.insert(all.end(), rest.begin(), rest.end());
  for (List more; all.size() < timers.size(); all.insert(all.end(), more.begin(), more.end())) {
    more = advance(wheel, 2'000'000);
    ASSERT_FALSE(more.empty());
  }
  EXPECT_TRUE(std::is_sorted(all.begin(), all.end(), [&](std::uint32_t a, std::uint32_t b) {
    return timers[a]->deadline < timers[b]->deadline;
  }));
}

TEST(TimerWheel, EqualDeadlinesFireInTheOrderOfScheduling) {
  TimerWheel wheel(1, 0);
  Timer timers[5];
  for (std::uint32_t i = 0; i < 5; ++i) {
    timers[i].index = i;
    wheel.schedule(timers[i], 5000);
  }
  EXPECT_EQ(advance(wheel, 5000), (List{0, 1, 2, 3, 4}));
  for (Timer& timer : timers) wheel.schedule(timer, 5001);
  wheel.cancel(timers[2]);
  EXPECT_EQ(advance(wheel, 5001), (List{0, 1, 3, 4}));
}

TEST(TimerWheel, FiresNoMoreThanAskedAndTheRestLater) {
  TimerWheel wheel(1, 0);
  Timer timers[5];
  for (std::uint32_t i = 0; i < 5; ++i) {
    timers[i].index = i;
    wheel.schedule(timers[i], 10 + i / 2);
  }
  EXPECT_EQ(advance(wheel, 100, 0), List{});
  EXPECT_EQ(advance(wheel, 100, 3), (List{0, 1, 2}));
  EXPECT_LE(wheel.next_deadline(), 11u);
  EXPECT_EQ(advance(wheel, 100, 3), (List{3, 4}));
}

TEST(TimerWheel, ALargeBacklogIsTakenDownInBoundedSteps) {
  // All in one list of a high level: one call must not move them all.
  constexpr std::size_t kTimers = 5000;
  TimerWheel wheel(1, 0);
  std::vector<std::unique_ptr<Timer>> timers;
  for (std::size_t i = 0; i < kTimers; ++i) {
    timers.push_back(std::make_unique<Timer>());
    wheel.schedule(*timers.back(), (1u << 18) + i);
  }
  std::size_t fired = 0;
  std::size_t calls = 0;
  const std::uint64_t end = (1u << 18) + kTimers;
  while (wheel.size() > 0) {
    ASSERT_LT(++calls, kTimers);
    if (fired == 0) {
      // It accepts changes between calls.
      wheel.reschedule(*timers[kTimers - 1 - calls], end);
      EXPECT_LT(wheel.next_deadline(), end);
    }
    fired += wheel.advance(end, kAll, [&](Timer& timer) { EXPECT_LE(timer.deadline, end); });
  }
  EXPECT_EQ(fired, kTimers);
  EXPECT_GT(calls, kTimers / 300);
}

TEST(TimerWheel, TheHintCountsTimersThatAreStillComingDown) {
  // The latest timers move down first, and the call's budget ends before the earliest.
  constexpr std::uint64_t kStart = 1u << 18;
  std::vector<std::unique_ptr<Timer>> timers;
  TimerWheel wheel(1, 0);
  for (std::uint64_t i = 0; i < 300; ++i) {
    timers.push_back(std::make_unique<Timer>());
    wheel.schedule(*timers.back(), kStart + 299 - i);
  }
  EXPECT_EQ(wheel.next_deadline(), kStart);
  EXPECT_EQ(advance(wheel, kStart), List{});
  EXPECT_EQ(wheel.next_deadline(), kStart);
  EXPECT_EQ(advance(wheel, kStart).size(), 1u);
}

TEST(TimerWheel, ALongPauseCostsNoMoreThanTheTimersInIt) {
  // Centuries of units lie between, so only lists in use may be visited.
  TimerWheel wheel(1, 0);
  Timer near;
  Timer far;
  far.index = 1;
  wheel.schedule(near, 7);
  wheel.schedule(far, std::uint64_t{1} << 62);
  EXPECT_EQ(advance(wheel, std::uint64_t{1} << 63), (List{0, 1}));
  EXPECT_EQ(wheel.next_deadline(), TimerWheel::kNever);
}

TEST(TimerWheel, CallbacksMayScheduleCancelAndDestroy) {
  TimerWheel wheel(1, 0);
  auto ending = std::make_unique<Timer>();
  Timer victim;
  Timer again;
  ending->kind = 1;
  again.kind = 2;
  victim.kind = 3;
  wheel.schedule(*ending, 10);
  wheel.schedule(again, 10);
  wheel.schedule(victim, 10);
  std::vector<int> kinds;
  const auto fire = [&](Timer& timer) {
    kinds.push_back(timer.kind);
    if (timer.kind == 1) {
      ending.reset();
      wheel.cancel(victim);
    } else if (timer.kind == 2 && kinds.size() < 4) {
      wheel.schedule(timer, timer.deadline + 5);
    }
  };
  EXPECT_EQ(wheel.advance(30, kAll, fire), 4u);
  EXPECT_EQ(kinds, (std::vector<int>{1, 2, 2, 2}));
  EXPECT_EQ(again.deadline, 20u);
  EXPECT_EQ(wheel.size(), 0u);
}

TEST(TimerWheel, ATimerThatRearmsItselfInThePastStarvesNobody) {
  TimerWheel wheel(1, 100);
  Timer selfish;
  Timer other;
  other.kind = 1;
  wheel.schedule(selfish, 0);
  wheel.schedule(other, 0);
  bool other_fired = false;
  const auto fire = [&](Timer& timer) {
    if (timer.kind == 1) other_fired = true;
    if (timer.kind == 0) wheel.schedule(timer, 0);
  };
  EXPECT_EQ(wheel.advance(100, 4, fire), 4u);
  EXPECT_TRUE(other_fired);
}

/// Compares random operations on the wheel and on a plain list of deadlines at every step.
void compare_with_model(std::uint64_t resolution, std::uint64_t start, std::uint64_t range,
                        std::uint64_t seed) {
  constexpr std::size_t kTimers = 120;
  constexpr std::uint64_t kIdle = TimerWheel::kNever;
  std::mt19937_64 random(seed);
  TimerWheel wheel(resolution, start);
  const std::uint64_t unit = wheel.resolution();
  std::vector<std::unique_ptr<Timer>> timers;
  std::vector<std::uint64_t> model(kTimers, kIdle);
  for (std::uint32_t i = 0; i < kTimers; ++i) {
    timers.push_back(std::make_unique<Timer>());
    timers.back()->index = i;
  }
  std::uint64_t now = start;
  for (int op = 0; op < 20'000; ++op) {
    const std::size_t i = random() % kTimers;
    const std::uint64_t distance = random() % (std::uint64_t{1} << (random() % 40)) % range;
    switch (random() % 4) {
      case 0:
      case 1:
        model[i] = now + distance > 50 ? now + distance - 50 : 0;
        wheel.reschedule(*timers[i], model[i]);
        break;
      case 2:
        model[i] = kIdle;
        wheel.cancel(*timers[i]);
        break;
      default: {
        now += distance / 4;
        const std::size_t most = random() % 8 == 0 ? random() % 4 : kAll;
        const std::size_t fired = wheel.advance(now, most, [&](Timer& timer) {
          ASSERT_LE(model[timer.index], now) << "early, or not scheduled";
          ASSERT_EQ(model[timer.index], timer.deadline);
          model[timer.index] = kIdle;
        });
        ASSERT_LE(fired, most);
        if (fired < most) {
          // No timer is more than a unit late: 120 timers cannot use up the moves of a call.
          for (const std::uint64_t deadline : model) {
            ASSERT_TRUE(deadline == kIdle || deadline + unit > now) << deadline << " at " << now;
          }
        }
      }
    }
    std::size_t scheduled = 0;
    std::uint64_t earliest = kIdle;
    for (std::size_t t = 0; t < kTimers; ++t) {
      ASSERT_EQ(timers[t]->scheduled(), model[t] != kIdle);
      if (model[t] == kIdle) continue;
      ++scheduled;
      earliest = std::min(earliest, model[t]);
    }
    ASSERT_EQ(wheel.size(), scheduled);
    // The hint is not later than the first time at which a timer may fire.
    const std::uint64_t first = (std::max(earliest, now / unit * unit) + unit - 1) / unit * unit;
    if (scheduled != 0) {
      ASSERT_LE(wheel.next_deadline(), first);
    } else {
      ASSERT_EQ(wheel.next_deadline(), kIdle);
    }
  }
}

TEST(TimerWheel, AgreesWithANaiveModelAtFullResolution) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) compare_with_model(1, 0, 1u << 20, seed);
}

TEST(TimerWheel, AgreesWithANaiveModelAtCoarseResolution) {
  compare_with_model(1000, 123'456'789, 1u << 24, 1);
  compare_with_model(1u << 16, 1ull << 45, 1ull << 36, 2);
}

TEST(TimerWheel, AgreesWithANaiveModelFarFromZero) {
  compare_with_model(1, (1ull << 60) - 5000, 1u << 30, 1);
  compare_with_model(64, (1ull << 63) - 5000, 1u << 20, 2);
}

TEST(TimerWheel, FollowingTheHintFiresEverythingOnTime) {
  TimerWheel wheel(1, 0);
  std::mt19937_64 random(9);
  std::vector<std::unique_ptr<Timer>> timers;
  for (int i = 0; i < 100; ++i) {
    timers.push_back(std::make_unique<Timer>());
    wheel.schedule(*timers.back(), random() % 10'000'000);
  }
  std::size_t calls = 0;
  while (wheel.size() > 0) {
    const std::uint64_t now = wheel.next_deadline();
    wheel.advance(now, kAll, [&](Timer& timer) { EXPECT_EQ(timer.deadline, now); });
    ASSERT_LT(++calls, 1000u);  // A hint is early at most once a level.
  }
}

TEST(TimerWheel, SleepersKnowWhenTheFirstTimerFires) {
  TimerWheel wheel(64, 0);
  EXPECT_EQ(wheel.next_fire(64), TimerWheel::kNever);
  std::vector<std::unique_ptr<Timer>> timers;
  const auto add = [&](std::uint64_t deadline) {
    timers.push_back(std::make_unique<Timer>());
    wheel.schedule(*timers.back(), deadline);
  };
  add(1'000'001);
  EXPECT_EQ(wheel.next_fire(64), 1'000'064u) << "rounded up to the resolution";
  EXPECT_LT(wheel.next_deadline(), 1'000'000u);
  add(1'000'500);
  add(999'999);
  EXPECT_EQ(wheel.next_fire(64), 1'000'000u - 1'000'000u % 64 + 64 * (1'000'000 % 64 != 0 ? 1 : 0));
  // Early, never late, if there are too many to compare.
  EXPECT_EQ(wheel.next_fire(1), wheel.next_deadline());
  EXPECT_EQ(advance(wheel, wheel.next_fire(64) - 1), List{});
  EXPECT_EQ(advance(wheel, wheel.next_fire(64)).size(), 1u);
  EXPECT_EQ(wheel.next_fire(64), 1'000'064u);
  EXPECT_EQ(advance(wheel, 2'000'000).size(), 2u);
}

TEST(TimerWheel, DeadlinesOnAGridAreNeverLater) {
  using spinwire::base::align_down;
  EXPECT_EQ(align_down(1000, 0), 1000u);
  EXPECT_EQ(align_down(1000, 250), 1000u);
  EXPECT_EQ(align_down(1249, 250), 1000u);
}

}  // namespace
}  // namespace timer_wheel_test
