#include "base/membarrier.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "base/random.h"
#include "spinwire/clock.h"

namespace membarrier_test {
namespace {

using spinwire::base::membarrier;
using spinwire::base::membarrier_available;

TEST(Membarrier, AvailabilityDoesNotChange) {
  const bool available = membarrier_available();
  EXPECT_EQ(membarrier_available(), available);
  if (!available) GTEST_SKIP() << "this kernel has no expedited membarrier";
  EXPECT_TRUE(membarrier());
}

/// A word on its own cache line: a line that its writer holds would hide the effect.
struct alignas(64) Line {
  std::atomic<int> word{0};
};

/// Waits for another thread's word; yields if that thread needs this processor.
void await(const std::atomic<int>& word, int value) {
  for (int spins = 0; word.load(std::memory_order_acquire) < value; ++spins) {
    if (spins > 2000) std::this_thread::yield();
  }
}

/// The processors that this thread may use.
std::vector<int> processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof set, &set);
  std::vector<int> list;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &set)) list.push_back(i);
  }
  return list;
}

void run_on(const std::vector<int>& list) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int i : list) CPU_SET(i, &set);
  sched_setaffinity(0, sizeof set, &set);
}

void await_time(const spinwire::Clock& clock, std::uint64_t ticks) {
  while (clock.now() < ticks) {
  }
}

/// Both sides write their own word and read the other's. With a barrier on the slow side only, at
/// least one of them must see the other. Without it, in some rounds neither does.
TEST(Membarrier, OrdersAPlainStoreAndLoadOfAnotherThread) {
  if (!membarrier_available()) GTEST_SKIP() << "this kernel has no expedited membarrier";
  const std::vector<int> all = processors();
  if (all.size() < 2) GTEST_SKIP() << "it takes two processors";
  constexpr int kRounds = 20'000;
  Line fast;
  Line slow;
  Line fast_saw;
  Line round;
  Line done;
  // Both sides start a round at nearly the same tick, so that they meet in every order.
  const spinwire::Clock clock = spinwire::Clock::real();
  const std::uint64_t ahead = clock.ticks(std::chrono::nanoseconds(800));
  const std::uint64_t jitter = clock.ticks(std::chrono::nanoseconds(60));
  std::atomic<std::uint64_t> start{0};
  std::thread hot([&] {
    run_on({all[1]});
    spinwire::base::Random random(1);
    for (int i = 1; i <= kRounds; ++i) {
      const std::uint64_t late = random.below(jitter);
      await(round.word, i);
      await_time(clock, start.load(std::memory_order_relaxed) + late);
      fast.word.store(i, std::memory_order_relaxed);
      std::atomic_signal_fence(std::memory_order_seq_cst);
      fast_saw.word.store(slow.word.load(std::memory_order_relaxed), std::memory_order_relaxed);
      done.word.store(i, std::memory_order_release);
    }
  });
  run_on({all[0]});
  spinwire::base::Random random(2);
  int both_blind = 0;
  for (int i = 1; i <= kRounds; ++i) {
    const std::uint64_t at = clock.now() + ahead;
    const std::uint64_t late = random.below(jitter);
    start.store(at, std::memory_order_relaxed);
    round.word.store(i, std::memory_order_release);
    await_time(clock, at + late);
    slow.word.store(i, std::memory_order_relaxed);
    membarrier();
    const int slow_saw = fast.word.load(std::memory_order_relaxed);
    await(done.word, i);
    if (slow_saw < i && fast_saw.word.load(std::memory_order_relaxed) < i) ++both_blind;
  }
  hot.join();
  run_on(all);
  EXPECT_EQ(both_blind, 0);
}

}  // namespace
}  // namespace membarrier_test
