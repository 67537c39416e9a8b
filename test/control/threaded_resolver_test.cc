// Addresses that threads resolve. A function of the test's own stands in for the verb that waits.
#include "control/threaded_resolver.h"

#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <fstream>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "control/control_port_fixture.h"

namespace control_port_test {
namespace {

using control::Gid;
using control::Source;
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

class ThreadsThatResolve : public ControlPortTest {
 protected:
  ThreadsThatResolve() {
    place_.port = 2;
    listener_->place = place_;
    auto made = std::make_unique<ThreadedResolver>(
        server_.port,
        [this](const verbs::Place& from, const Gid& gid) { return neighbours_.wait(from, gid); },
        [this](const char* asked, void* (*run)(void*), void* argument,
               std::size_t stack) -> Result<pthread_t> {
          if (threads_ == 0) return tl::unexpected(Error{Status::limit, asked, "no thread", ""});
          --threads_;
          return control::start_helper_thread(asked, run, argument, stack);
        });
    resolver_ = made.get();
    server_.port.set_resolver(std::move(made));
  }
  ~ThreadsThatResolve() override {
    neighbours_.answer(0);
    server_.port.set_resolver(nullptr);  // waits for the threads
  }

  bool begin(std::uint64_t subject) { return begin(subject, subject); }
  bool begin(std::uint64_t subject, std::uint64_t address,
             const std::optional<Source>& source = {}) {
    Gid gid{};
    gid[15] = static_cast<std::uint8_t>(address);
    const auto known = resolver_->begin({{}, subject, source}, gid, GidType::roce_v2, &place_);
    EXPECT_TRUE(known) << known.error().message();
    return known && !*known;
  }

  /// The client is told so when the verb ends with this error.
  void expect_refusal(int error, const char* text) {
    neighbours_.answer(error);
    hello();
    ASSERT_TRUE(until([&] { return client_owner_.saw("refused 11"); }));
    EXPECT_NE(client_owner_.error.found.find(text), std::string::npos) << client_owner_.error.found;
    EXPECT_FALSE(listener_->handshake);
  }

  Neighbours neighbours_;
  std::size_t threads_ = 1000;  ///< that can still be started
  verbs::Place place_;
  ThreadedResolver* resolver_ = nullptr;
};

TEST_F(ThreadsThatResolve, APollGoesOnWhileAThreadWaits) {
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

TEST_F(ThreadsThatResolve, WhereNobodyAnswersItAsksTwice) {
  expect_refusal(ETIMEDOUT, "nobody answers there");
  EXPECT_EQ(neighbours_.begun(), 2);
}

TEST_F(ThreadsThatResolve, WhatHasNoRouteIsAskedForOnce) {
  expect_refusal(ENETUNREACH, "ENETUNREACH");
  EXPECT_EQ(neighbours_.begun(), 1);
}

TEST_F(ThreadsThatResolve, APeerThatLeavesEndsNoThreadAndIsForgotten) {
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
  std::vector<std::uint64_t> known, failed;
  Status expected = Status::ok;  ///< of those that fail; ok: none does
  void on_cm_event(std::uint64_t, const control::CmEvent&) override {}
  void on_address_resolved(std::uint64_t subject, const Result<void>& outcome) override {
    EXPECT_EQ(outcome ? Status::ok : outcome.error().status, expected);
    (outcome ? known : failed).push_back(subject);
  }
};

TEST_F(ThreadsThatResolve, WithoutAThreadThePeerHearsSoAndItsSourceKeepsItsShare) {
  Outcomes outcomes;
  server_.port.set_cm_owner(outcomes);
  outcomes.expected = Status::limit;
  threads_ = 0;
  constexpr std::uint64_t kShare = ThreadedResolver::kMostOfSource;
  for (std::uint64_t i = 1; i <= kShare; ++i) {
    ASSERT_TRUE(begin(i, i, Source{1}));
    ASSERT_TRUE(until([&] { return outcomes.failed.size() == i; }));
  }
  EXPECT_EQ(resolver_->running(), 0u);
  EXPECT_EQ(neighbours_.begun(), 0);
  outcomes.expected = Status::ok;
  threads_ = 1;
  ASSERT_TRUE(begin(100, 100, Source{1}));
  EXPECT_EQ(resolver_->running(), 1u);
  neighbours_.answer(0);
  ASSERT_TRUE(until([&] { return outcomes.known.size() == 1; }));
}

TEST_F(ThreadsThatResolve, WithoutAnotherThreadAPeerWaitsForOneThatEnds) {
  Outcomes outcomes;
  server_.port.set_cm_owner(outcomes);
  threads_ = 1;
  ASSERT_TRUE(begin(1));
  ASSERT_TRUE(begin(2));
  ASSERT_TRUE(begin(3));
  EXPECT_EQ(resolver_->running(), 1u);
  for (int i = 0; i < 20; ++i) server_.step();
  EXPECT_TRUE(outcomes.known.empty());
  threads_ = 2;
  neighbours_.answer(0);
  ASSERT_TRUE(until([&] { return outcomes.known.size() == 3; }));
  EXPECT_EQ(neighbours_.begun(), 3);
  EXPECT_EQ(resolver_->running(), 0u);
}

TEST_F(ThreadsThatResolve, ThoseBeyondTheMostThreadsWaitTheirTurn) {
  constexpr int kMost = ThreadedResolver::kMost;
  Outcomes outcomes;
  server_.port.set_cm_owner(outcomes);
  for (std::uint64_t i = 1; i <= kMost + 3; ++i) ASSERT_TRUE(begin(i));
  ASSERT_EQ(resolver_->running(), ThreadedResolver::kMost);
  neighbours_.wait_for(kMost);
  resolver_->cancel({{}, kMost + 1});
  EXPECT_EQ(neighbours_.begun(), kMost);
  neighbours_.answer(0);
  ASSERT_TRUE(until([&] { return outcomes.known.size() == kMost + 2; }));
  EXPECT_EQ(neighbours_.begun(), kMost + 2) << "the one that was cancelled has no thread";
  EXPECT_FALSE(neighbours_.has_seen(2, (kMost + 1) % 256));
  EXPECT_EQ(resolver_->running(), 0u);
}

TEST_F(ThreadsThatResolve, APollTakesFewOfMany) {
  Outcomes outcomes;
  server_.port.set_cm_owner(outcomes);
  for (std::uint64_t i = 1; i <= 100; ++i) ASSERT_TRUE(begin(i));
  ASSERT_EQ(resolver_->running(), 100u);
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

/// Whether the thread sleeps.
bool sleeps(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string text;
  std::getline(file, text);
  return text.find(") S ") != std::string::npos;
}

TEST_F(ThreadsThatResolve, ThePortWaitsForThreadsThatUseItsDevice) {
  ASSERT_TRUE(begin(1));
  neighbours_.wait_for(1);
  std::atomic<pid_t> closer_id{0};
  std::atomic<bool> is_gone{false};
  std::thread closer([&] {
    closer_id = static_cast<pid_t>(::gettid());
    server_.port.set_resolver(nullptr);
    is_gone = true;
  });
  ASSERT_TRUE(
      loopback::eventually([&] { return is_gone || (closer_id != 0 && sleeps(closer_id)); }));
  EXPECT_FALSE(is_gone);
  neighbours_.answer(ETIMEDOUT);
  closer.join();
  EXPECT_EQ(neighbours_.begun(), 1) << "it asks no second time";
}

TEST_F(ThreadsThatResolve, ASourceHasItsShareOfThem) {
  Outcomes outcomes;
  server_.port.set_cm_owner(outcomes);
  constexpr std::uint64_t kShare = ThreadedResolver::kMostOfSource;
  for (std::uint64_t i = 1; i <= kShare + 3; ++i) ASSERT_TRUE(begin(i, i, Source{1}));
  ASSERT_EQ(resolver_->running(), kShare);
  ASSERT_TRUE(begin(100, 100, Source{2}));
  EXPECT_EQ(resolver_->running(), kShare + 1) << "another source is not concerned";
  // Neither is one that names what a stranger has named before.
  ASSERT_TRUE(begin(101, kShare + 3, Source{2}));
  EXPECT_EQ(resolver_->running(), kShare + 2);
  // Those whose peers have left count until their threads end.
  for (std::uint64_t i = 1; i <= kShare; ++i) resolver_->cancel({{}, i});
  ASSERT_TRUE(begin(102, 102, Source{1}));
  EXPECT_EQ(resolver_->running(), kShare + 2);
  neighbours_.answer(0);
  ASSERT_TRUE(until([&] { return resolver_->running() == 0 && outcomes.known.size() == 6; }));
}

TEST_F(ThreadsThatResolve, InboundPeersLeaveSomeForOutboundOnes) {
  Outcomes outcomes;
  server_.port.set_cm_owner(outcomes);
  for (std::uint64_t i = 1; i <= 128; ++i)
    ASSERT_TRUE(begin(i, i, Source{static_cast<std::uint8_t>(1 + i % 16)}));
  EXPECT_EQ(resolver_->running(), ThreadedResolver::kMostInbound);
  ASSERT_TRUE(begin(200));
  EXPECT_EQ(resolver_->running(), ThreadedResolver::kMostInbound + 1);
  neighbours_.answer(0);
  ASSERT_TRUE(until([&] { return outcomes.known.size() == 129; }));
  EXPECT_EQ(neighbours_.begun(), 129);
}

TEST_F(ThreadsThatResolve, AnErrorThatIsNotThePeersIsLeftToTheVerb) {
  neighbours_.answer(EINVAL);
  hello();
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  EXPECT_EQ(neighbours_.begun(), 1);
  EXPECT_TRUE(begin(1)) << "others are resolved";
}

TEST_F(ThreadsThatResolve, AnErrorThatIsNotThePeersIsNoAnswer) {
  constexpr int kBurst = control::ResolutionLimits::kOfSource.burst;
  neighbours_.answer(EINVAL);
  for (int i = 1; i <= kBurst; ++i) {
    const HandshakeId id = hello();
    ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
    ASSERT_EQ(neighbours_.begun(), i);
    client_.port.drop(id);
    ASSERT_TRUE(until([&] { return server_.port.handshakes() == 0; }));
    listener_->handshake = {};
  }
  hello();
  const std::size_t left = threads_;
  ASSERT_TRUE(until([&] { return server_.port.handshakes() == 1; }));
  for (int i = 0; i < 200; ++i) {
    client_.step();
    server_.step();
  }
  EXPECT_EQ(threads_, left) << "nobody has answered its source yet";
}

// The address of the loopback interface is a source like any other.
TEST_F(ThreadsThatResolve, APeerOfThisHostIsInbound) {
  for (std::uint64_t i = 1; i <= ThreadedResolver::kMostOfSource + 1; ++i)
    ASSERT_TRUE(begin(i, i, Source{}));
  EXPECT_EQ(resolver_->running(), ThreadedResolver::kMostOfSource);
}

TEST_F(ThreadsThatResolve, ADeviceWithoutAddressHandlesIsNotAskedAgain) {
  neighbours_.answer(EOPNOTSUPP);
  hello();
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  const auto known = resolver_->begin({{}, 1}, Gid{}, GidType::roce_v2, &place_);
  EXPECT_TRUE(known && *known);
  EXPECT_EQ(neighbours_.begun(), 1);
}

TEST_F(ThreadsThatResolve, OneThreadResolvesAnAddressThatManyName) {
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

TEST(ThreadsThatHelp, TakesNoSignals) {
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

// A loop with a real-time priority that is bound to a processor may never leave it.
TEST(ThreadsThatHelp, LeaveTheProcessorAndThePriorityOfAnUrgentCaller) {
  struct Seen {
    int policy = -1;
    cpu_set_t processors;
  };
  Seen urgent, usual;
  bool may = true, started = true;
  int ours = -1;
  const auto ask = [&](Seen& seen) {
    CPU_ZERO(&seen.processors);
    const auto thread = control::start_helper_thread(
        "wait",
        [](void* out) -> void* {
          auto& found = *static_cast<Seen*>(out);
          found.policy = ::sched_getscheduler(0);
          ::sched_getaffinity(0, sizeof found.processors, &found.processors);
          return nullptr;
        },
        &seen);
    started = started && thread;
    if (thread) ::pthread_join(*thread, nullptr);
  };
  std::thread loop([&] {
    ours = ::sched_getcpu();
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<std::size_t>(ours), &one);
    may = ::sched_setaffinity(0, sizeof one, &one) == 0;
    ask(usual);
    sched_param first{};
    first.sched_priority = 1;
    may = may && ::pthread_setschedparam(::pthread_self(), SCHED_FIFO, &first) == 0;
    if (may) ask(urgent);
  });
  loop.join();
  ASSERT_TRUE(started);
  EXPECT_EQ(CPU_COUNT(&usual.processors), 1) << "one without priority shares its processor";
  if (!may) GTEST_SKIP() << "this process may have no real-time priority";
  EXPECT_EQ(urgent.policy, SCHED_OTHER);
  cpu_set_t all;
  ASSERT_EQ(::sched_getaffinity(0, sizeof all, &all), 0);
  if (CPU_COUNT(&all) > 1) {
    EXPECT_FALSE(CPU_ISSET(static_cast<std::size_t>(ours), &urgent.processors));
  }
}

TEST(ThreadsThatHelp, HaveTheUsualStackIfTheirOwnIsNotAllowed) {
  const auto thread = control::start_helper_thread(
      "wait", [](void*) -> void* { return nullptr; }, nullptr, 1);
  ASSERT_TRUE(thread) << thread.error().message();
  ::pthread_join(*thread, nullptr);
}

TEST(ThreadsThatHelp, WithoutRoomForItsStackIsAnError) {
  const auto thread = control::start_helper_thread(
      "wait", [](void*) -> void* { return nullptr; }, nullptr, std::size_t{1} << 62);
  ASSERT_FALSE(thread);
  EXPECT_EQ(thread.error().status, Status::limit) << thread.error().message();
}

}  // namespace
}  // namespace control_port_test
