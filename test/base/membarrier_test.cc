#include "base/membarrier.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

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

/// Both sides write their own word and read the other's. With a barrier on the slow side only, at
/// least one of them has to see the other; without it both may read 0.
TEST(Membarrier, OrdersAPlainStoreAndLoadOfAnotherThread) {
  if (!membarrier_available()) GTEST_SKIP() << "this kernel has no expedited membarrier";
  constexpr int kRounds = 2000;
  alignas(64) std::atomic<int> fast{0};
  alignas(64) std::atomic<int> slow{0};
  alignas(64) std::atomic<int> fast_saw{0};
  std::atomic<int> round{0};
  std::atomic<int> done{0};
  std::thread hot([&] {
    for (int i = 1; i <= kRounds; ++i) {
      while (round.load(std::memory_order_acquire) < i) std::this_thread::yield();
      fast.store(i, std::memory_order_relaxed);
      std::atomic_signal_fence(std::memory_order_seq_cst);
      fast_saw.store(slow.load(std::memory_order_relaxed), std::memory_order_relaxed);
      done.store(i, std::memory_order_release);
    }
  });
  int both_blind = 0;
  for (int i = 1; i <= kRounds; ++i) {
    round.store(i, std::memory_order_release);
    slow.store(i, std::memory_order_relaxed);
    membarrier();
    const int slow_saw = fast.load(std::memory_order_relaxed);
    while (done.load(std::memory_order_acquire) < i) std::this_thread::yield();
    if (slow_saw < i && fast_saw.load(std::memory_order_relaxed) < i) ++both_blind;
  }
  hot.join();
  EXPECT_EQ(both_blind, 0);
}

}  // namespace
}  // namespace membarrier_test
