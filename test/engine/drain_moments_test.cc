// A drain that begins at each moment of a connection's set-up: the simulation repeats it step by
// step.
#include "sim/serving_nodes.h"

namespace drain_moments_test {
namespace {

using namespace sim_test;  // NOLINT: a test's helpers

TEST(EngineDrainMoments, APeerIsRefusedWithATimeInEachStepOfItsSetUp) {
  int refused = 0;
  bool is_ready = false;
  for (int steps = 0; !is_ready; ++steps) {
    ASSERT_LT(steps, 2000);
    ServingNodes world(41);
    bool crossed = false;  ///< it was ready here when the refusal came
    ConnectOptions options;
    options.handlers.on_ready = [&crossed](Connection) { crossed = true; };
    options.handlers.on_closed = [&world](Connection, const Error& why) {
      world.closed.push_back(why);
    };
    ASSERT_TRUE(world.sim.engine(0).connect(Simulation::address(1), options));
    for (int i = 0; i < steps; ++i) ASSERT_EQ(world.sim.step(), Status::ok);
    if ((is_ready = crossed)) break;
    ASSERT_TRUE(world.sim.engine(1).drain(1s, {.retry_after = 50ms, .on_drained = {}}));
    ASSERT_TRUE(world.sim.run_until([&] { return !world.closed.empty(); }, 2s)) << steps;
    const Error& why = world.closed[0];
    refused += why.status == Status::refused ? 1 : 0;
    EXPECT_NE(why.status, Status::protocol) << steps << ": " << why.message();
    if (crossed) continue;
    EXPECT_EQ(why.goodbye, (Goodbye{GoodbyeReason::draining, 50ms}))
        << "after " << steps << " steps: " << why.message();
  }
  EXPECT_GT(refused, 10);
}

}  // namespace
}  // namespace drain_moments_test
