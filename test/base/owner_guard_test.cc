#include "base/owner_guard.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/thread_id.h"

namespace owner_guard_test {
namespace {

using spinwire::Status;
using spinwire::base::OwnerGuard;
using spinwire::base::thread_id;

OwnerGuard make(OwnerGuard::ForkDetection detection = OwnerGuard::ForkDetection::automatic) {
  auto guard = OwnerGuard::create(detection);
  EXPECT_TRUE(guard) << guard.error().message();
  return std::move(guard).value();  // Throws if there is none.
}

/// Runs `body` in a forked child and returns its result, or -1.
template <typename Body>
int in_child(Body&& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = 0;
  if (child < 0 || ::waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

TEST(ThreadId, IsStableEvenAndNotZero) {
  const std::uintptr_t id = thread_id();
  EXPECT_NE(id, 0u);
  EXPECT_EQ(id & 1, 0u);
  EXPECT_EQ(thread_id(), id);
}

TEST(ThreadsThreadId, DiffersBetweenLivingThreads) {
  std::vector<std::uintptr_t> ids(8);
  std::vector<std::thread> threads;
  threads.reserve(ids.size());
  std::atomic<int> arrived{0};
  for (std::uintptr_t& id : ids) {
    threads.emplace_back([&id, &arrived] {
      id = thread_id();
      ++arrived;
      while (arrived.load() < 8) std::this_thread::yield();  // All live at once.
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::set<std::uintptr_t> distinct(ids.begin(), ids.end());
  EXPECT_EQ(distinct.size(), ids.size());
  EXPECT_EQ(distinct.count(thread_id()), 0u);
}

TEST(OwnerGuard, LetsTheOwnerPollAndCall) {
  OwnerGuard guard = make();
  EXPECT_TRUE(guard.owned());
  EXPECT_FALSE(guard.polling());
  EXPECT_EQ(guard.diagnose(), Status::ok);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(guard.enter());
    EXPECT_TRUE(guard.polling());
    guard.leave();
    EXPECT_FALSE(guard.polling());
  }
}

TEST(OwnerGuard, RefusesToPollInsidePollButAllowsCalls) {
  OwnerGuard guard = make();
  ASSERT_TRUE(guard.enter());
  EXPECT_FALSE(guard.enter());
  EXPECT_EQ(guard.diagnose(), Status::reentrant);
  EXPECT_TRUE(guard.owned());
  guard.leave();
  EXPECT_TRUE(guard.enter());
  guard.leave();
}

TEST(ThreadsOwnerGuard, RefusesOtherThreads) {
  OwnerGuard guard = make();
  const auto refused = [&guard] {
    EXPECT_FALSE(guard.owned());
    EXPECT_FALSE(guard.enter());
    EXPECT_EQ(guard.diagnose(), Status::wrong_thread);
  };
  std::thread(refused).join();
  ASSERT_TRUE(guard.enter());
  std::thread(refused).join();  // Also while the owner polls.
  guard.leave();
  EXPECT_TRUE(guard.owned());
}

TEST(OwnerGuard, BelongsToTheThreadThatMadeIt) {
  std::optional<OwnerGuard> guard;
  std::thread maker([&guard] { guard.emplace(make()); });
  const auto maker_id = maker.get_id();
  maker.join();
  ASSERT_NE(maker_id, std::this_thread::get_id());
  EXPECT_FALSE(guard->owned());
  EXPECT_EQ(guard->diagnose(), Status::wrong_thread);
}

class OwnerGuardFork : public testing::TestWithParam<OwnerGuard::ForkDetection> {};

TEST_P(OwnerGuardFork, RefusesForkedChildrenAndStaysWithTheParent) {
  OwnerGuard guard = make(GetParam());
  EXPECT_EQ(in_child([&] {
              const bool right =
                  !guard.owned() && !guard.enter() && guard.diagnose() == Status::forked_child;
              return right ? 7 : 1;
            }),
            7);
  EXPECT_TRUE(guard.owned());
  EXPECT_TRUE(guard.enter());
  guard.leave();
}

TEST_P(OwnerGuardFork, ForkInsidePollDoesNotMakeTheChildAnOwnerWhenItLeaves) {
  OwnerGuard guard = make(GetParam());
  ASSERT_TRUE(guard.enter());
  EXPECT_EQ(in_child([&] {
              guard.leave();
              return !guard.owned() && guard.diagnose() == Status::forked_child ? 7 : 1;
            }),
            7);
  guard.leave();
  EXPECT_EQ(guard.diagnose(), Status::ok);
}

TEST_P(OwnerGuardFork, ChildMayMakeAGuardOfItsOwnAndDropTheInherited) {
  OwnerGuard guard = make(GetParam());
  EXPECT_EQ(in_child([&] {
              { const OwnerGuard dropped = std::move(guard); }
              OwnerGuard own = make(GetParam());
              if (!own.owned() || !own.enter()) return 1;
              own.leave();
              return in_child([&] { return own.diagnose() == Status::forked_child ? 7 : 1; });
            }),
            7);
}

TEST_P(OwnerGuardFork, MovedGuardsAreStillEmptied) {
  OwnerGuard first = make(GetParam());
  OwnerGuard second = std::move(first);
  OwnerGuard third = make(GetParam());
  third = std::move(second);
  EXPECT_TRUE(third.owned());
  EXPECT_EQ(in_child([&] { return third.diagnose() == Status::forked_child ? 7 : 1; }), 7);
}

INSTANTIATE_TEST_SUITE_P(Detections, OwnerGuardFork,
                         testing::Values(OwnerGuard::ForkDetection::automatic,
                                         OwnerGuard::ForkDetection::handler),
                         [](const auto& instance) {
                           return instance.param == OwnerGuard::ForkDetection::automatic
                                      ? std::string("automatic")
                                      : std::string("handler");
                         });

}  // namespace
}  // namespace owner_guard_test
