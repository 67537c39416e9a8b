// A drain that begins at each moment of a connection's set-up: the simulation repeats it step by
// step.
#include "sim/serving_nodes.h"

namespace drain_moments_test {
namespace {

using namespace sim_test;  // NOLINT: a test's helpers

TEST(EngineDrainMoments, APeerIsToldATimeInEachStepOfItsSetUp) {
  int refused = 0;
  int ready_at_one_end = 0;
  bool is_ready = false;
  for (int steps = 0; !is_ready; ++steps) {
    ASSERT_LT(steps, 4000);
    ServingNodes world(41);
    bool is_ready_here = false;
    ConnectOptions options;
    options.handlers.on_ready = [&](Connection) { is_ready_here = true; };
    options.handlers.on_closed = [&world](Connection, const Error& why) {
      world.closed.push_back(why);
    };
    ASSERT_TRUE(world.sim.engine(0).connect(Simulation::address(1), options));
    for (int i = 0; i < steps; ++i) ASSERT_EQ(world.sim.step(), Status::ok);
    is_ready = world.sim.engine(1).stats().accepted != 0;
    ready_at_one_end += is_ready_here && !is_ready ? 1 : 0;
    ASSERT_TRUE(world.sim.engine(1).drain(1s, {.retry_after = 50ms, .on_drained = {}}));
    ASSERT_TRUE(world.sim.run_until([&] { return !world.closed.empty(); }, 2s)) << steps;
    const Error& why = world.closed[0];
    refused += why.status == Status::refused ? 1 : 0;
    EXPECT_EQ(why.status, is_ready_here ? Status::ok : Status::refused)
        << "after " << steps << " steps: " << why.message();
    EXPECT_EQ(why.goodbye, (Goodbye{GoodbyeReason::draining, 50ms}))
        << "after " << steps << " steps: " << why.message();
    ASSERT_TRUE(world.sim.run_until([&] { return world.sim.engine(1).drained(); }, 2s)) << steps;
  }
  EXPECT_GT(refused, 5);
  EXPECT_GT(ready_at_one_end, 0);
}

}  // namespace
}  // namespace drain_moments_test
