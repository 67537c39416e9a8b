// An engine that sleeps until something is to be done: no wake-up is lost, none is needed that
// nobody announces, and an idle engine hardly wakes.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <thread>

#include "base/internals.h"
#include "base/random.h"
#include "control/loopback.h"
#include "engine/engine_core.h"
#include "engine/poll_schedule.h"
#include "engine/sleeping.h"
#include "engine/zero_cost.h"
#include "long_run.h"

namespace waiting_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::Nanoseconds;

/// Sleeps on the descriptor, if the engine may. Only an event ends the sleep, unless the engine
/// awaits what nobody announces. False: a wake-up was lost.
bool sleep_if_idle(Engine& engine, std::uint64_t& sleeps) {
  if (!engine.arm()) return true;
  if (engine.next_deadline() <= 2ms) {
    (void)is_readable(engine, 1);
    return true;
  }
  ++sleeps;
  return is_readable(engine, 60'000 * static_cast<int>(std::min(slowness(), 20u)));
}

/// A child that listens, and sleeps when it has nothing to do, until told to quit. Its code is 4 if
/// a connection has ended.
int sleeping_server(int in, int out, const Config& config) {
  Node node(config);
  node.listen();
  write_line(out, node.listener.address());
  while (command(in) != 'q') {
    if (node.engine.poll() == 0) (void)node.engine.wait(1h);
  }
  return node.closed.empty() ? 0 : 4;
}
/// Polls and sleeps for so long.
void sleep_in_turns(Node& node, Nanoseconds time) {
  const Clock clock = Clock::real();
  const std::uint64_t begin = clock.now();
  while (clock.duration(clock.now() - begin) < time) {
    if (node.engine.poll() == 0) {
      ASSERT_EQ(node.engine.wait(1h), Status::ok);
    }
  }
}

// ---- wake-ups ---------------------------------------------------------------------------------

TEST(Waiting, AMessageWakesAnEngineThatSleeps) {
  Pair p(lenient_config());
  p.settle();
  ASSERT_TRUE(armed(p.server));
  ASSERT_EQ(p.ends.client.send(p.client.filled(32, 1)), Status::ok);
  EXPECT_TRUE(until({&p.client}, [&] { return is_readable(p.server.engine); }));
  ASSERT_TRUE(until({&p.client, &p.server}, [&] { return p.server.messages == 1; }));
  // An engine that is awake again sleeps again.
  ASSERT_TRUE(p.until([&] { return p.server.engine.arm(); }));
  EXPECT_TRUE(until({&p.client}, [&] { return !is_readable(p.server.engine); }));
  p.finish();
}

TEST(Waiting, ANewPeerWakesAnEngineThatSleeps) {
  Node server(lenient_config());
  Node client(lenient_config());
  server.listen();
  ASSERT_TRUE(armed(server));
  const Connection c = client.begin(server);
  EXPECT_TRUE(until({&client}, [&] { return is_readable(server.engine); }));
  EXPECT_TRUE(until({&client, &server}, [&] { return c.ready(); }));
}

TEST(Waiting, ADeadProcessWakesAnEngineThatSleeps) {
  if (!device_name().starts_with("softverbs"))  // nor does the preloaded device tell
    GTEST_SKIP() << kSoftverbsOnly << "an adapter notices no dead process";
  Node client(watchful_config());
  Child child([](int in, int out) { return echo_server(in, out, watchful_config()); });
  const Connection c = client.begin(child.line());
  ASSERT_TRUE(until({&client}, [&] { return c.ready(); }));
  ASSERT_TRUE(armed(client));
  child.kill(SIGKILL);
  EXPECT_TRUE(is_readable(client.engine, 60'000));
  EXPECT_TRUE(until({&client}, [&] { return !client.closed.empty(); }));
}

/// Runs round trips in which each end sleeps as soon as it has nothing to do, so that each sleep
/// races against the other end's message. Returns the sleeps of this end; 0 if a wake-up was lost.
class Racer {
 public:
  explicit Racer(std::uint64_t seed) : node(lenient_config()), random_(seed) {
    node.on_message = [this](Connection c, Message& m) {
      connection_ = c;
      std::memcpy(&trip, m.bytes().data(), sizeof trip);
      due_ = true;
    };
  }
  bool send_next(Connection c) {
    const std::uint64_t next = trip + 1;
    return c.send_copy(std::as_bytes(std::span(&next, 1))) == Status::ok;
  }
  /// One turn: answers, or sleeps. False: a wake-up was lost.
  bool turn() {
    (void)node.engine.poll();
    if (due_) {
      for (std::uint64_t i = random_.below(600); i != 0; --i)
        std::atomic_signal_fence(std::memory_order_seq_cst);
      due_ = !send_next(connection_);
      return true;
    }
    if (!node.closed.empty()) return true;
    // The end of a connection has time-outs.
    if (connection_.state() == ConnectionState::draining)
      return node.engine.wait(1s) != Status::system;
    return sleep_if_idle(node.engine, sleeps);
  }
  Node node;
  std::uint64_t trip = 0;
  std::uint64_t sleeps = 0;

 private:
  spinwire::base::Random random_;
  Connection connection_;
  bool due_ = false;
};

void race(std::uint64_t races) {
  Child child([](int, int out) {
    Racer racer(1);
    racer.node.listen();
    write_line(out, racer.node.listener.address());
    while (racer.node.closed.empty()) {
      if (!racer.turn()) return 3;
    }
    return 0;
  });
  Racer racer(2);
  Connection c = racer.node.begin(child.line());
  ASSERT_TRUE(until({&racer.node}, [&] { return c.ready(); }));
  ASSERT_TRUE(until({&racer.node}, [&] { return racer.send_next(c); }));
  while (racer.sleeps < races) {
    ASSERT_TRUE(racer.turn()) << "a wake-up was lost after " << racer.sleeps << " sleeps";
    ASSERT_TRUE(racer.node.closed.empty()) << racer.node.closed.front().message();
  }
  EXPECT_EQ(c.close(), Status::ok);
  ASSERT_TRUE(until({&racer.node}, [&] { return !racer.node.closed.empty(); }));
  EXPECT_EQ(child.wait(), 0);
}

TEST(Waiting, NoWakeUpIsLostBetweenProcesses) {
  race(device_name().starts_with("softverbs") ? amount(20'000) : 10'000);
}
TEST(SlowWaiting, NoWakeUpIsLostInManyRaces) { race(rounds_of(1'000'000) / slowness()); }

TEST(ThreadsWaiting, NoWakeUpIsLostBetweenThreads) {
  constexpr std::uint64_t kRaces = 2'000;
  Racer racer(1);
  racer.node.listen();
  std::atomic<bool> is_good{true};
  std::thread peer([&, address = racer.node.listener.address()] {
    Racer other(2);
    Connection c = other.node.begin(address);
    bool good = until({&other.node}, [&] { return c.ready(); }) &&
                until({&other.node}, [&] { return other.send_next(c); });
    while (good && other.sleeps < kRaces / slowness()) good = other.turn();
    (void)c.close();
    is_good = good && until({&other.node}, [&] { return !other.node.closed.empty(); });
  });
  bool good = true;
  while (good && racer.node.closed.empty()) good = racer.turn();
  EXPECT_TRUE(good);
  peer.join();
  EXPECT_TRUE(is_good);
}

// ---- wake() -----------------------------------------------------------------------------------

TEST(Waiting, WakeIsNotSwallowed) {
  Node node(lenient_config());
  // Before the engine ever slept.
  EXPECT_EQ(node.engine.wake(), Status::ok);
  EXPECT_FALSE(node.engine.arm());
  ASSERT_TRUE(armed(node));
  // While it sleeps: the descriptor is readable, and the next arm() does not hide the call.
  EXPECT_EQ(node.engine.wake(), Status::ok);
  EXPECT_EQ(node.engine.wake(), Status::ok);
  EXPECT_TRUE(is_readable(node.engine));
  EXPECT_FALSE(node.engine.arm());
  ASSERT_TRUE(armed(node));
  // Before wait(), which then does not sleep.
  const std::uint64_t sleeps = node.engine.stats().sleeps;
  EXPECT_EQ(node.engine.wake(), Status::ok);
  EXPECT_EQ(node.engine.wait(1h), Status::ok);
  EXPECT_EQ(node.engine.stats().sleeps, sleeps);
}

TEST(ThreadsWaiting, WakeFromAnotherThreadIsNeverLost) {
  Node node(lenient_config());
  const std::uint32_t rounds = 20'000 / slowness();
  std::atomic<std::uint32_t> posted{0};
  std::atomic<std::uint32_t> seen{0};
  std::thread other([&] {
    for (std::uint32_t i = 1; i <= rounds; ++i) {
      posted = i;
      EXPECT_EQ(node.engine.wake(), Status::ok);
      while (seen != i) std::this_thread::yield();
    }
  });
  std::uint64_t sleeps = 0;
  bool good = true;
  while (good && seen != rounds) {
    seen = posted.load();
    if (seen == rounds) break;
    good = sleep_if_idle(node.engine, sleeps);
  }
  seen = rounds;
  EXPECT_TRUE(good);
  other.join();
}

// ---- what nobody announces --------------------------------------------------------------------

TEST(Waiting, AcknowledgementsAreNotWaitedForInASleepOfFullLength) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "adapters announce completions";
  Pair p(lenient_config(without_direct_messages()));
  ASSERT_TRUE(p.until([&] { return p.client.engine.arm(); }));
  const Nanoseconds idle = p.client.engine.next_deadline();
  EXPECT_GT(idle, 100ms);
  EXPECT_LE(idle, 250ms);
  bool done = false;
  ASSERT_EQ(p.ends.client.send(p.client.filled(32, 1), [&](const Completion&) { done = true; }),
            Status::ok);
  ASSERT_TRUE(until({}, [&] { return p.client.engine.arm(); }));
  EXPECT_LE(p.client.engine.next_deadline(), 2ms);
  EXPECT_FALSE(done);
  // The acknowledgement is found by the first poll after it, not by the 48th.
  ASSERT_TRUE(until({&p.server}, [&] { return p.server.messages == 1; }));
  EXPECT_FALSE(p.client.engine.arm());
  (void)p.client.engine.poll();
  EXPECT_TRUE(done);
  p.finish();
}

TEST(Waiting, CreditIsNotWaitedForInASleepOfFullLength) {
  Pair p(lenient_config());
  while (p.ends.client.send_copy(std::as_bytes(std::span("x", 1))) == Status::ok) {
  }
  EXPECT_EQ(p.ends.client.snapshot().blocked_by, spinwire::Blocker::credit);
  ASSERT_TRUE(until({}, [&] { return p.client.engine.arm(); }));
  EXPECT_LE(p.client.engine.next_deadline(), 2ms);
}

TEST(Waiting, ATimerEndsTheSleep) {
  Node node(lenient_config());
  int runs = 0;
  ASSERT_TRUE(node.engine.after(100ms, [&runs] { ++runs; }));
  ASSERT_TRUE(armed(node));
  EXPECT_GT(node.engine.next_deadline(), 0ns);
  EXPECT_LE(node.engine.next_deadline(), 101ms);
  std::uint64_t turns = 0;
  for (; runs == 0 && turns < 1'000'000; ++turns) {
    if (node.engine.poll() == 0) {
      EXPECT_EQ(node.engine.wait(1h), Status::ok);
    }
  }
  EXPECT_EQ(runs, 1);
  EXPECT_LT(turns, 20u) << "a due timer is not spun for";
}

TEST(Waiting, AnEngineWithoutWorkSleepsOutItsTime) {
  Node node(lenient_config());
  ASSERT_TRUE(armed(node));
  // Only the time-out of 1 ms ends these sleeps.
  std::uint32_t timed_out = 0;
  for (int i = 0; i < 20; ++i) timed_out += node.engine.wait(1ms) == Status::timed_out ? 1u : 0u;
  EXPECT_GE(timed_out, 18u);
  EXPECT_EQ(node.engine.wait(0ns), Status::timed_out);
  EXPECT_EQ(node.engine.wait(-1ns), Status::timed_out);
}

TEST(Waiting, PeersThatSleepAreNotLost) {
  Config c = small_config();
  c.connections.keepalive_interval = 20ms;
  c.connections.peer_timeout = 500ms * slowness();
  Child child([c](int in, int out) { return sleeping_server(in, out, c); });
  Node client(c);
  const Connection connection = client.begin(child.line());
  ASSERT_TRUE(until({&client}, [&] { return connection.ready(); }));
  // Both ends sleep for several times as long as either may be silent.
  ASSERT_NO_FATAL_FAILURE(sleep_in_turns(client, 4 * c.connections.peer_timeout));
  EXPECT_TRUE(connection.ready());
  EXPECT_GT(client.engine.stats().sleeps, 10u);
  child.tell('q');
  EXPECT_EQ(child.wait(), 0);
}

// ---- cost -------------------------------------------------------------------------------------

TEST(Waiting, SleepsAndTimersDoNotAllocate) {
  Pair p(lenient_config());
  int runs = 0;
  const auto turn = [&] {
    auto once = p.client.engine.after(0ns, [&runs] { ++runs; });
    auto never = p.client.engine.every(1h, [] {});
    const bool good = once && never && never->cancel() == Status::ok;
    (void)p.client.engine.wait(1us);
    (void)p.server.engine.wait(1us);
    (void)p.ends.client.send_copy(std::as_bytes(std::span("x", 1)));
    (void)p.client.engine.arm();
    (void)p.server.engine.arm();
    return good;
  };
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(turn());
  zero_cost_test::heap_calls = 0;
  zero_cost_test::armed = true;
  bool good = true;
  for (int i = 0; i < 2000; ++i) good = turn() && good;
  zero_cost_test::armed = false;
  EXPECT_TRUE(good);
  EXPECT_EQ(zero_cost_test::heap_calls, 0u);
  EXPECT_GT(runs, 100);
  EXPECT_GT(p.server.messages, 100u);
}

TEST(Waiting, NobodyKnowsHowLongAMessageHasWaitedThatEndedASleep) {
  spinwire::engine::PollSchedule schedule;
  schedule.control_interval = 100;
  schedule.next_control = 1000;
  EXPECT_EQ(schedule.last_poll_before(900), 900u);
  EXPECT_EQ(schedule.last_poll_before(50'000), 1000u) << "the process was descheduled";
  schedule.polls_after_sleep = 1;
  EXPECT_EQ(schedule.last_poll_before(50'000), spinwire::rpc::kUnknownArrival);
}

// ---- a manual clock ---------------------------------------------------------------------------

TEST(Waiting, WithAManualClockWaitLooksOnce) {
  std::uint64_t ticks = 1;
  Node node(small_config(), &ticks);
  EXPECT_EQ(node.engine.wait(1h), Status::timed_out);
  int runs = 0;
  ASSERT_TRUE(node.engine.after(1ms, [&runs] { ++runs; }));
  EXPECT_EQ(node.engine.wait(1h), Status::timed_out);
  EXPECT_EQ(node.engine.stats().sleeps, 0u);
  ticks += 2'000'000;
  EXPECT_EQ(node.engine.wait(1h), Status::ok);
  (void)node.poll();
  EXPECT_EQ(runs, 1);
}

// A virtual machine that is restored continues with an earlier time.
TEST(Waiting, ATimerIsNotEarlyAfterTheClockHasSteppedBack) {
  std::uint64_t ticks = 10'000'000'000;
  Node node(small_config(), &ticks);
  (void)node.poll();
  ticks -= 5'000'000'000;
  int runs = 0;
  ASSERT_TRUE(node.engine.after(1ms, [&runs] { ++runs; }));
  EXPECT_GT(node.engine.next_deadline(), 500us);
  ticks += 500'000;
  (void)node.poll();
  EXPECT_EQ(runs, 0);
  ticks += 600'000;
  (void)node.poll();
  EXPECT_EQ(runs, 1);
}

/// The longest time between two words that a server writes in its peer's credit cell, while each
/// poll is late by up to 100 us.
std::uint64_t longest_gap(Nanoseconds peer_timeout, std::uint64_t& words) {
  std::uint64_t ticks = 1'000'000'000;
  Config c = small_config();
  c.connections.keepalive_interval = 20ms;
  c.connections.peer_timeout = peer_timeout;
  Pair p(c, &ticks);
  p.settle();
  spinwire::base::Random random(1);
  auto& agents = spinwire::detail::core_of(p.server.engine)->context.agents;
  const auto last_write = [&] { return (*agents.begin()).peer_cell.last_write; };
  std::uint64_t longest = 0;
  std::uint64_t last = last_write();
  words = 0;
  for (const std::uint64_t end = ticks + 1'000'000'000; ticks < end;) {
    ticks += 150'000 + random.below(100'000);
    (void)(p.server.poll() + p.client.poll());
    const std::uint64_t next = last_write();
    if (next == last) continue;
    if (++words > 2) longest = std::max(longest, next - last);
    last = next;
  }
  EXPECT_TRUE(p.ends.client.ready());
  p.finish();
  return longest;
}

TEST(Waiting, KeepalivesOfConnectionsComeInTime) {
  std::uint64_t words = 0;
  EXPECT_LE(longest_gap(500ms, words), 20'500'000u);
  EXPECT_LE(words, 60u) << "and not more often than needed";
  EXPECT_LE(longest_gap(40ms, words), 10'500'000u);
  EXPECT_LE(words, 120u);
}

TEST(Waiting, AnEngineDoesNotSleepWhileItZeroesALease) {
  constexpr std::size_t kBytes = 4u << 20;  // 16 control steps
  Config c = small_config();
  c.memory.lease_bytes = 16u << 20;
  std::uint64_t ticks = 1'000'000'000;
  Pair p(c, &ticks);
  p.settle();
  bool granted = false;
  ASSERT_EQ(p.ends.client.request_memory(
                kBytes, {}, [&](spinwire::LeaseReply& r) { granted = r.status == Status::ok; }),
            Status::ok);
  (void)p.client.poll();
  std::uint32_t sleeps = 0;
  for (int i = 0; i < 1000 && !granted; ++i) {
    ticks += 1000;
    sleeps += p.server.engine.arm() ? 1u : 0u;
    (void)p.client.poll();
  }
  EXPECT_TRUE(granted);
  EXPECT_LE(sleeps, 5u);
}

// ---- misuse -----------------------------------------------------------------------------------

TEST(Waiting, MisuseIsRefused) {
  Engine empty;
  EXPECT_EQ(empty.wait(1ns), Status::not_connected);
  EXPECT_EQ(empty.wake(), Status::not_connected);
  EXPECT_FALSE(empty.arm());
  EXPECT_EQ(empty.fd().error().status, Status::not_connected);
  EXPECT_EQ(empty.next_deadline(), 0ns);
  EXPECT_EQ(empty.after(1ns, [] {}).error().status, Status::not_connected);
  Node node(lenient_config());
  Status inside = Status::ok;
  bool armed_inside = true;
  ASSERT_TRUE(node.engine.after(0ns, [&] {
    inside = node.engine.wait(1ns);
    armed_inside = node.engine.arm();
    EXPECT_EQ(node.engine.wake(), Status::ok);
  }));
  ASSERT_TRUE(until({&node}, [&] { return inside != Status::ok; }));
  EXPECT_EQ(inside, Status::reentrant);
  EXPECT_FALSE(armed_inside);
  EXPECT_FALSE(node.engine.arm()) << "the callback has woken the engine";
  std::thread other([&node] {
    EXPECT_EQ(node.engine.wait(1ns), Status::wrong_thread);
    EXPECT_FALSE(node.engine.arm());
    EXPECT_EQ(node.engine.fd().error().status, Status::wrong_thread);
    EXPECT_EQ(node.engine.after(1ns, [] {}).error().status, Status::wrong_thread);
  });
  other.join();
  ASSERT_TRUE(armed(node));
  Child child([&node](int, int) {
    return node.engine.wait(1ns) == Status::forked_child &&
                   node.engine.wake() == Status::forked_child && !node.engine.arm()
               ? 0
               : 5;
  });
  EXPECT_EQ(child.wait(), 0);
  EXPECT_FALSE(is_readable(node.engine)) << "the child has woken its parent";
}

// ---- an idle engine ---------------------------------------------------------------------------

std::int64_t own_cpu_ns() {
  timespec t{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<std::int64_t>(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

TEST(SlowWaiting, AThousandIdleConnectionsCostLessThanAHundredthOfAProcessor) {
  Config c = small_config();
  c.connections.maximum = c.connections.maximum_per_source = 1024;  // one client has all
  c.queues.receive_depth = 4096;
  c.memory.receive_bytes = 32u << 20;
  c.queues.completion_depth = 65536;
  c.queues.operations = 8192;
  c.memory.send_bytes = 32u << 20;
  Child child([c](int in, int out) { return sleeping_server(in, out, c); });
  Node client(c);
  const std::string address = child.line();
  std::vector<Connection> all;
  for (int i = 0; i < 1000; ++i) {
    all.push_back(client.begin(address));
    ASSERT_TRUE(until({&client}, [&] { return all.back().ready(); }));
  }
  double least = 1;
  double wakes = 1e9;
  for (int attempt = 0; attempt < 5; ++attempt) {
    const Clock clock = Clock::real();
    const std::uint64_t begin = clock.now();
    const std::int64_t cpu = own_cpu_ns();
    const std::uint64_t sleeps = client.engine.stats().sleeps;
    ASSERT_NO_FATAL_FAILURE(sleep_in_turns(client, 2s));
    const auto passed = static_cast<double>(clock.duration(clock.now() - begin).count());
    least = std::min(least, static_cast<double>(own_cpu_ns() - cpu) / passed);
    wakes =
        std::min(wakes, static_cast<double>(client.engine.stats().sleeps - sleeps) * 1e9 / passed);
  }
  std::printf("%.2f %% of a processor, %.1f wake-ups a second\n", 100 * least, wakes);
  EXPECT_LT(least, 0.01);
  EXPECT_LT(wakes, 30.0) << "the checks of connections wake the engine together";
  EXPECT_TRUE(client.closed.empty());
  child.tell('q');
  EXPECT_EQ(child.wait(), 0);
}

}  // namespace
}  // namespace waiting_test
