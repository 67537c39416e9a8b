// Simulated nodes that sleep while they are idle.
#include "base/internals.h"
#include "engine/engine_core.h"
#include "sim/serving_nodes.h"

namespace sim_sleeping_test {
namespace {

using namespace sim_test;  // NOLINT: a test's helpers

TEST(SimSleep, WhatComesWakesANode) {
  ServingNodes world(31, 3);
  const Session s = world.ready(0, 1);
  ASSERT_EQ(ServingNodes::good(world.call(s, 1)), 1u);
  ASSERT_TRUE(world.sim.sleep_when_idle(1, 1));
  world.sim.run_for(50ms);
  const SimulationStats before = world.sim.stats();
  EXPECT_GT(before.sleeps, 0u);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(ServingNodes::good(world.call(s, 1)), 1u);
    world.sim.run_for(5ms);
  }
  EXPECT_GE(world.sim.stats().wakeups, before.wakeups + 5);
  (void)world.ready(2, 1);  // the control port wakes it, too
  EXPECT_EQ(world.sim.stats().missed_wakeups, 0u);
  // Also in its next life.
  ASSERT_TRUE(world.sim.kill(1));
  ASSERT_TRUE(world.sim.restart(1));
  world.open_house(1);
  const std::uint64_t sleeps = world.sim.stats().sleeps;
  world.sim.run_for(20ms);
  EXPECT_GT(world.sim.stats().sleeps, sleeps);
  ASSERT_TRUE(world.sim.sleep_when_idle(1, 0));
  world.sim.run_for(20ms);
  const std::uint64_t last = world.sim.stats().sleeps;
  world.sim.run_for(20ms);
  EXPECT_EQ(world.sim.stats().sleeps, last);
  EXPECT_EQ(world.sim.sleep_when_idle(3, 1).error().status, Status::invalid_argument);
}

TEST(SimSleep, ALostWakeUpIsCounted) {
  ServingNodes world(32);
  const Session s = world.ready(0, 1);
  ASSERT_EQ(ServingNodes::good(world.call(s, 1)), 1u);
  ASSERT_TRUE(world.sim.sleep_when_idle(1, 4));
  // The node is awake for its peers, but the simulation lets it sleep.
  const auto disarm = [&] {
    const auto& context = spinwire::detail::core_of(world.sim.engine(1))->context;
    auto* const there = context.device->provider().disarm;
    there(spinwire::detail::core_of(world.sim.engine(1))->cq);
  };
  ASSERT_TRUE(world.sim.run_until(
      [&] {
        disarm();
        return world.sim.stats().sleeps > 10;
      },
      1s));
  int ended = 0;
  Session caller = s;
  ASSERT_EQ(caller.call(kEcho, std::span<const std::byte>(), [&ended](Reply&) { ++ended; }),
            Status::ok);
  ASSERT_TRUE(world.sim.run_until(
      [&] {
        disarm();
        return ended == 1;
      },
      5s));
  EXPECT_GT(world.sim.stats().missed_wakeups, 0u);
}

TEST(SimSleep, AnotherThreadWakesANodeForItsTimers) {
  ServingNodes world(33);
  ASSERT_TRUE(world.sim.sleep_when_idle(0, 4));
  int runs = 0;
  Nanoseconds latest{0};
  for (int i = 1; i <= 20; ++i) {
    world.sim.at(i * 10ms, [&world, &runs, &latest] {
      const Nanoseconds due = world.sim.now() + 2ms;
      ASSERT_TRUE(world.sim.engine(0).after(2ms, [&world, &runs, &latest, due] {
        ++runs;
        latest = std::max(latest, world.sim.now() - due);
      }));
      EXPECT_EQ(world.sim.engine(0).wake(), Status::ok);
    });
  }
  world.sim.run_for(300ms);
  EXPECT_EQ(runs, 20);
  EXPECT_LE(latest, 2ms);
  EXPECT_GT(world.sim.stats().wakeups, 0u);
  EXPECT_EQ(world.sim.stats().missed_wakeups, 0u);
}

}  // namespace
}  // namespace sim_sleeping_test
