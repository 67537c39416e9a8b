// Addresses that threads resolve. A function of the test's own stands in for the verb that waits.
#include "control/threaded_resolver.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>

#include "control/control_port_fixture.h"

namespace control_port_test {
namespace {

using control::Gid;
using control::ThreadedResolver;

/// Stands in for the verb: waits until it may answer.
class Neighbours {
 public:
  int wait(const verbs::Place& from, const Gid& gid) {
    std::unique_lock lock(mutex_);
    ++begun_;
    seen_.insert({from.port, gid[15]});
    changed_.notify_all();
    changed_.wait(lock, [&] { return may_answer_; });
    return error_;
  }
  /// All verbs end so from now on.
  void answer(int error) {
    const std::lock_guard lock(mutex_);
    may_answer_ = true;
    error_ = error;
    changed_.notify_all();
  }
  void wait_for(int begun) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return begun_ >= begun; });
  }
  [[nodiscard]] int begun() {
    const std::lock_guard lock(mutex_);
    return begun_;
  }
  /// Whether this address was looked for from this port.
  [[nodiscard]] bool has_seen(int port, int last) {
    const std::lock_guard lock(mutex_);
    return seen_.contains({port, last});
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool may_answer_ = false;
  int error_ = 0;
  int begun_ = 0;
  std::set<std::pair<int, int>> seen_;
};

class ThreadedResolution : public ControlPortTest {
 protected:
  ThreadedResolution() {
    place_.port = 2;
    listener_->place = place_;
    auto made = std::make_unique<ThreadedResolver>(
        server_.port,
        [this](const verbs::Place& from, const Gid& gid) { return neighbours_.wait(from, gid); });
    resolver_ = made.get();
    server_.port.set_resolver(std::move(made));
  }
  ~ThreadedResolution() override { neighbours_.answer(0); }

  bool begin(std::uint64_t subject) { return begin(subject, subject); }
  bool begin(std::uint64_t subject, std::uint64_t address) {
    Gid gid{};
    gid[15] = static_cast<std::uint8_t>(address);
    const auto known = resolver_->begin({{}, subject}, gid, GidType::roce_v2, &place_);
    EXPECT_TRUE(known) << known.error().message();
    return known && !*known;
  }

  Neighbours neighbours_;
  verbs::Place place_;
  ThreadedResolver* resolver_ = nullptr;
};

TEST_F(ThreadedResolution, APollGoesOnWhileAThreadWaits) {
  hello();
  ASSERT_TRUE(until([&] { return resolver_->running() == 1; }));
  neighbours_.wait_for(1);
  for (int i = 0; i < 20; ++i) server_.step();
  EXPECT_FALSE(listener_->handshake);
  EXPECT_TRUE(neighbours_.has_seen(2, endpoint(101, 1).gid[15]));
  neighbours_.answer(0);
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  EXPECT_EQ(resolver_->running(), 0u) << "no thread stays";
  EXPECT_EQ(neighbours_.begun(), 1);
}

TEST_F(ThreadedResolution, WhereNobodyAnswersItAsksTwice) {
  neighbours_.answer(ETIMEDOUT);
  hello();
  ASSERT_TRUE(until([&] { return client_owner_.saw("refused 11"); }));
  EXPECT_NE(client_owner_.error.found.find("nobody answers there"), std::string::npos)
      << client_owner_.error.found;
  EXPECT_EQ(neighbours_.begun(), 2);
  EXPECT_FALSE(listener_->handshake);
}

TEST_F(ThreadedResolution, WhatHasNoRouteIsAskedForOnce) {
  neighbours_.answer(ENETUNREACH);
  hello();
  ASSERT_TRUE(until([&] { return client_owner_.saw("refused 11"); }));
  EXPECT_NE(client_owner_.error.found.find("ENETUNREACH"), std::string::npos)
      << client_owner_.error.found;
  EXPECT_EQ(neighbours_.begun(), 1);
}

TEST_F(ThreadedResolution, APeerThatLeavesEndsNoThreadAndIsForgotten) {
  const HandshakeId id = hello();
  ASSERT_TRUE(until([&] { return resolver_->running() == 1; }));
  client_.port.drop(id);
  ASSERT_TRUE(until([&] { return server_.port.handshakes() == 0; }));
  EXPECT_EQ(resolver_->running(), 1u);
  neighbours_.answer(0);
  ASSERT_TRUE(until([&] { return resolver_->running() == 0; }));
  EXPECT_FALSE(listener_->handshake);
}

/// Receives outcomes of resolutions without a handshake.
struct Outcomes : control::CmOwner {
  std::vector<std::uint64_t> known;
  void on_cm_event(std::uint64_t, const control::CmEvent&) override {}
  void on_address_resolved(std::uint64_t subject, const Result<void>& outcome) override {
    EXPECT_TRUE(outcome);
    known.push_back(subject);
  }
};

TEST_F(ThreadedResolution, ThoseBeyondTheMostThreadsWaitTheirTurn) {
  constexpr int kMost = ThreadedResolver::kMost;
  Outcomes outcomes;
  server_.port.set_cm_owner(outcomes);
  for (std::uint64_t i = 1; i <= kMost + 3; ++i) ASSERT_TRUE(begin(i));
  EXPECT_EQ(resolver_->running(), ThreadedResolver::kMost);
  neighbours_.wait_for(kMost);
  resolver_->cancel({{}, kMost + 1});
  EXPECT_EQ(neighbours_.begun(), kMost);
  neighbours_.answer(0);
  ASSERT_TRUE(until([&] { return outcomes.known.size() == kMost + 2; }));
  EXPECT_EQ(neighbours_.begun(), kMost + 2) << "the one that was cancelled has no thread";
  EXPECT_FALSE(neighbours_.has_seen(2, (kMost + 1) % 256));
  EXPECT_EQ(resolver_->running(), 0u);
}

TEST_F(ThreadedResolution, APollTakesFewOfMany) {
  Outcomes outcomes;
  server_.port.set_cm_owner(outcomes);
  for (std::uint64_t i = 1; i <= 100; ++i) ASSERT_TRUE(begin(i));
  neighbours_.wait_for(100);
  neighbours_.answer(0);
  std::size_t before = 0;
  ASSERT_TRUE(loopback::eventually([&] {
    server_.port.poll();
    EXPECT_LE(outcomes.known.size() - before, 16u);
    before = outcomes.known.size();
    return before == 100;
  }));
}

TEST_F(ThreadedResolution, ThePortWaitsForThreadsThatUseItsDevice) {
  ASSERT_TRUE(begin(1));
  neighbours_.wait_for(1);
  std::atomic<bool> is_gone{false};
  std::thread closer([&] {
    server_.port.set_resolver(nullptr);
    is_gone = true;
  });
  for (int i = 0; i < 100; ++i) std::this_thread::yield();
  EXPECT_FALSE(is_gone);
  neighbours_.answer(ETIMEDOUT);
  closer.join();
  EXPECT_EQ(neighbours_.begun(), 1) << "it asks no second time";
}

TEST_F(ThreadedResolution, OneThreadResolvesAnAddressThatManyName) {
  Outcomes outcomes;
  server_.port.set_cm_owner(outcomes);
  for (std::uint64_t i = 1; i <= 40; ++i) ASSERT_TRUE(begin(i, 9));
  place_.port = 3;
  ASSERT_TRUE(begin(41, 9));
  EXPECT_EQ(resolver_->running(), 2u) << "one for each port that they are to be seen from";
  resolver_->cancel({{}, 7});
  neighbours_.answer(0);
  std::size_t before = 0;
  ASSERT_TRUE(loopback::eventually([&] {
    server_.port.poll();
    EXPECT_LE(outcomes.known.size() - before, 16u);
    before = outcomes.known.size();
    return before == 40;
  }));
  EXPECT_EQ(std::count(outcomes.known.begin(), outcomes.known.end(), 7u), 0);
  EXPECT_EQ(neighbours_.begun(), 2);
  EXPECT_EQ(resolver_->running(), 0u);
}

// The threads are its parent's.
TEST_F(ThreadedResolution, AForkedChildWaitsForNone) {
  ASSERT_TRUE(begin(1));
  neighbours_.wait_for(1);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(30);
    server_.port.set_resolver(nullptr);
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(HelperThread, TakesNoSignals) {
  sigset_t blocked;
  sigemptyset(&blocked);
  const auto thread = control::start_helper_thread(
      "wait",
      [](void* out) -> void* {
        ::pthread_sigmask(SIG_BLOCK, nullptr, static_cast<sigset_t*>(out));
        return nullptr;
      },
      &blocked);
  ASSERT_TRUE(thread);
  ::pthread_join(*thread, nullptr);
  for (const int each : {SIGINT, SIGTERM, SIGUSR1, SIGALRM, SIGCHLD})
    EXPECT_EQ(sigismember(&blocked, each), 1) << each;
}

TEST(HelperThread, WithoutRoomForItsStackIsAnError) {
  const auto thread = control::start_helper_thread(
      "wait", [](void*) -> void* { return nullptr; }, nullptr, std::size_t{1} << 46);
  ASSERT_FALSE(thread);
  EXPECT_EQ(thread.error().status, Status::limit) << thread.error().message();
}

}  // namespace
}  // namespace control_port_test
