#include "spinwire/clock.h"

#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>

namespace clock_test {
namespace {

using spinwire::Clock;
using spinwire::Nanoseconds;
using namespace std::chrono_literals;

constexpr std::uint64_t kMostTicks = std::numeric_limits<std::uint64_t>::max();

std::int64_t system_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

TEST(Clock, ManualClockReadsWhatItWasGiven) {
  std::uint64_t ticks = 5;
  const Clock clock = Clock::manual(&ticks);
  EXPECT_EQ(clock.now(), 5u);
  ticks = 77;
  EXPECT_EQ(clock.now(), 77u);
  EXPECT_EQ(clock.ticks_per_ns(), 1.0);
  EXPECT_EQ(clock.ticks(123ns), 123u);
  EXPECT_EQ(clock.duration(123), 123ns);
}

TEST(Clock, GoesOnFromTheLastTickWhenItStepsBack) {
  std::uint64_t ticks = 1000;
  Clock clock = Clock::manual(&ticks);
  EXPECT_EQ(clock.now_from(0), 1000u);
  EXPECT_EQ(clock.now_from(1000), 1000u);
  ticks = 10;
  EXPECT_EQ(clock.now_from(1000), 1000u);
  ticks = 15;
  EXPECT_EQ(clock.now(), 1005u);
  EXPECT_EQ(clock.now_from(1000), 1005u);
  ticks = 0;
  EXPECT_EQ(clock.now_from(1005), 1005u);
  ticks = 3;
  EXPECT_EQ(clock.now_from(1005), 1008u);
}

TEST(Clock, ManualConversionsAreExactOverTheWholeRange) {
  std::uint64_t ticks = 0;
  const Clock clock = Clock::manual(&ticks);
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t n :
       {std::int64_t{0}, std::int64_t{1}, (std::int64_t{1} << 53) + 1, kMost - 1, kMost}) {
    EXPECT_EQ(clock.ticks(Nanoseconds(n)), static_cast<std::uint64_t>(n));
    EXPECT_EQ(clock.duration(static_cast<std::uint64_t>(n)), Nanoseconds(n));
  }
}

TEST(Clock, ConversionsSaturate) {
  std::uint64_t ticks = 0;
  const Clock manual = Clock::manual(&ticks);
  EXPECT_EQ(manual.ticks(-1ns), 0u);
  EXPECT_EQ(manual.ticks(Nanoseconds::min()), 0u);
  EXPECT_EQ(manual.duration(kMostTicks), Nanoseconds::max());

  const Clock real = Clock::real();
  const std::uint64_t most = real.ticks(Nanoseconds::max());
  if (real.ticks_per_ns() > 2.0) {
    EXPECT_EQ(most, kMostTicks);
  } else {
    EXPECT_NEAR(static_cast<double>(most), 9.2233720368547758e18 * real.ticks_per_ns(), 1e10);
  }
  EXPECT_GE(real.duration(kMostTicks), Nanoseconds(std::int64_t{1} << 57));
}

TEST(Clock, RealConversionsThereAndBackLoseLessThanATickAndANanosecond) {
  const Clock clock = Clock::real();
  for (const Nanoseconds d :
       {Nanoseconds(1us), Nanoseconds(100us), Nanoseconds(1h), Nanoseconds(24h * 365)}) {
    const Nanoseconds back = clock.duration(clock.ticks(d));
    EXPECT_LE(back, d);
    EXPECT_GE(back, d - Nanoseconds(1 + static_cast<std::int64_t>(1 / clock.ticks_per_ns())));
  }
}

TEST(Clock, LongDurationsDoNotDriftFromShortOnes) {
  // Converting a year at once or second by second differs by at most one tick's rounding per
  // second.
  const Clock clock = Clock::real();
  const std::uint64_t second = clock.ticks(1s);
  constexpr std::uint64_t kSeconds = 365 * 24 * 3600;
  const std::uint64_t year = clock.ticks(std::chrono::seconds(kSeconds));
  EXPECT_GE(year, second * kSeconds);
  EXPECT_LE(year, (second + 1) * kSeconds);
}

TEST(Clock, RealClockKeepsPaceWithTheSystems) {
  const Clock clock = Clock::real();
  // Reads the clock before and after, so that a reschedule in between cannot fail the test.
  const std::int64_t outer_start = system_ns();
  const std::uint64_t start = clock.now();
  const std::int64_t inner_start = system_ns();
  while (system_ns() - inner_start < 20'000'000) {
  }
  const std::int64_t inner_end = system_ns();
  const std::uint64_t end = clock.now();
  const std::int64_t outer_end = system_ns();

  const std::int64_t measured = clock.duration(end - start).count();
  // The system's clock may be slewed by up to 500 ppm, now or at calibration.
  constexpr double kTolerance = 1200e-6;
  EXPECT_GE(static_cast<double>(measured),
            static_cast<double>(inner_end - inner_start) * (1 - kTolerance));
  EXPECT_LE(static_cast<double>(measured),
            static_cast<double>(outer_end - outer_start) * (1 + kTolerance));
}

TEST(Clock, RealClockIsCalibratedOncePerProcess) {
  const Clock first = Clock::real();
  std::int64_t fastest = std::numeric_limits<std::int64_t>::max();
  for (int i = 0; i < 1000; ++i) {
    const std::int64_t before = system_ns();
    ASSERT_EQ(Clock::real().ticks_per_ns(), first.ticks_per_ns());
    fastest = std::min(fastest, system_ns() - before);
  }
  // A calibration takes milliseconds. A busy machine slows down some of the calls, but not all.
  EXPECT_LT(fastest, 500'000);
}

TEST(Clock, RealClockNeverRunsBackwards) {
  const Clock clock = Clock::real();
  std::uint64_t last = clock.now();
  for (int i = 0; i < 100'000; ++i) {
    const std::uint64_t now = clock.now();
    ASSERT_GE(now, last);
    last = now;
  }
}

}  // namespace
}  // namespace clock_test
