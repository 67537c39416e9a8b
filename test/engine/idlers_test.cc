// Idlers: what a loop does while its engines have nothing to do.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>
#include <thread>

#include "control/loopback.h"
#include "engine/sleeping.h"

namespace idlers_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::Idler;
using spinwire::IdlerOptions;
using spinwire::IdleStrategy;

TEST(Waiting, IdlersDoWhatTheirStrategySays) {
  Node node(lenient_config());
  ASSERT_TRUE(armed(node));
  for (const auto strategy : {IdleStrategy::spin, IdleStrategy::pause, IdleStrategy::yield}) {
    Idler idler(strategy);
    for (int i = 0; i < 5000; ++i) EXPECT_EQ(idler.idle(node.engine, 0), Status::ok);
  }
  EXPECT_EQ(node.engine.stats().sleeps, 0u);
  IdlerOptions options;
  options.pauses = 10;
  options.timeout = 1ms;
  Idler idler(options);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(idler.idle(node.engine, 0), Status::ok);
  EXPECT_EQ(node.engine.stats().sleeps, 0u);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(idler.idle(node.engine, 0), Status::ok);
  EXPECT_GE(node.engine.stats().sleeps, 1u);
  const std::uint64_t sleeps = node.engine.stats().sleeps;
  EXPECT_EQ(idler.idle(node.engine, 1), Status::ok);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(idler.idle(node.engine, 0), Status::ok);
  EXPECT_EQ(node.engine.stats().sleeps, sleeps) << "work begins the pauses anew";
  EXPECT_EQ(idler.idle(node.engine, -static_cast<int>(Status::reentrant)), Status::reentrant);
}

TEST(Waiting, IdlersPauseAgainAfterWorkThatASleepHasDone) {
  Pair p(lenient_config());
  p.settle();
  IdlerOptions options;
  options.pauses = 3;
  options.timeout = 1ms;
  Idler idler(options);
  const auto turn = [&] { EXPECT_EQ(idler.idle(p.server.engine, 0), Status::ok); };
  for (int i = 0; i < 3; ++i) turn();
  ASSERT_EQ(p.ends.client.send(p.client.filled(32, 1)), Status::ok);
  ASSERT_TRUE(until({&p.client}, [&] {
    turn();
    return p.server.messages == 1;
  }));
  const std::uint64_t sleeps = p.server.engine.stats().sleeps;
  for (int i = 0; i < 3; ++i) turn();
  EXPECT_EQ(p.server.engine.stats().sleeps, sleeps);
  p.finish();
}

/// Whether a thread of this process sleeps on descriptors.
bool is_asleep(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/syscall");
  long number = -1;  // "running" is no number
  return (file >> number) && number == SYS_ppoll;
}

TEST(ThreadsWaiting, OneIdlerSleepsForTwoEngines) {
  std::array<Node, 2> nodes{Node(lenient_config()), Node(lenient_config())};
  Engine* const engines[] = {&nodes[0].engine, &nodes[1].engine};
  for (Node& node : nodes) ASSERT_TRUE(armed(node));
  IdlerOptions options;
  options.pauses = 0;
  options.timeout = 1h;
  for (Node& node : nodes) {
    Idler idler(options);
    const pid_t sleeper = gettid();
    EXPECT_LT(shortest_of(10,
                          [&] {
                            std::atomic<bool> is_over{false};
                            std::thread waker([&] {
                              while (!is_asleep(sleeper) && !is_over) ::sched_yield();
                              if (!is_over) (void)node.engine.wake();
                            });
                            EXPECT_EQ(idler.turn(engines), Status::ok);
                            is_over = true;
                            waker.join();
                            EXPECT_TRUE(armed(node));  // a wake-up that came too late is over
                          }),
              100ms);
    EXPECT_LT(shortest_of(10,
                          [&] {
                            bool is_due = false;
                            ASSERT_TRUE(node.engine.after(1ms, [&] { is_due = true; }));
                            while (!is_due) ASSERT_EQ(idler.turn(engines), Status::ok);
                          }),
              100ms);
  }
}

TEST(Waiting, ATurnOfSeveralEnginesPollsAllAndPausesFirst) {
  Pair p(lenient_config());
  p.settle();
  Engine* const engines[] = {&p.client.engine, &p.server.engine};
  IdlerOptions options;
  options.pauses = 1'000'000'000;  // never sleeps
  Idler idler(options);
  ASSERT_EQ(p.ends.client.send(p.client.filled(32, 1)), Status::ok);
  ASSERT_TRUE(
      until({}, [&] { return idler.turn(engines) != Status::ok || p.server.messages == 1; }));
  EXPECT_EQ(p.server.messages, 1u);
  for (const auto strategy : {IdleStrategy::spin, IdleStrategy::pause, IdleStrategy::yield}) {
    Idler other(strategy);
    for (int i = 0; i < 5000; ++i) ASSERT_EQ(other.turn(engines), Status::ok);
  }
  Engine none;
  Engine* const with_none[] = {&p.client.engine, &none};
  EXPECT_EQ(idler.turn(with_none), Status::not_connected);
  std::array<Engine*, Idler::kMostEngines + 1> many{};
  many.fill(&p.client.engine);
  EXPECT_EQ(idler.turn(many), Status::invalid_argument);
  p.finish();
}

TEST(Waiting, WithAManualClockAnIdlerOfSeveralEnginesDoesNotSleep) {
  std::uint64_t ticks = 1;
  Node node(lenient_config(), &ticks);
  Engine* const engines[] = {&node.engine};
  IdlerOptions options;
  options.pauses = 0;
  options.timeout = 1h;
  Idler idler(options);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(idler.turn(engines), Status::ok);
}

TEST(Waiting, WithoutDescriptorsIdlersYieldAndOneMessageIsLogged) {
  Node node(lenient_config());
  int messages = 0;
  spinwire::set_log([&](spinwire::LogLevel, std::string_view) { ++messages; },
                    spinwire::LogLevel::error);
  IdlerOptions options;
  options.pauses = 0;
  Idler idler(options);
  {
    const loopback::NoDescriptors none;
    for (int i = 0; i < 5; ++i) {
      EXPECT_FALSE(node.engine.arm());
      EXPECT_EQ(node.engine.wait(1ms), Status::limit);
      EXPECT_EQ(idler.idle(node.engine, 0), Status::ok);
      Engine* const engines[] = {&node.engine};
      EXPECT_EQ(idler.turn(engines), Status::ok);
    }
  }
  spinwire::set_log({});
  EXPECT_EQ(messages, 1);
  EXPECT_TRUE(armed(node));
}

}  // namespace
}  // namespace idlers_test
