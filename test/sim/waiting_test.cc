// Waiting and timers in a simulation: time is virtual, so nothing sleeps.
#include <gtest/gtest.h>

#include "spinwire/sim.h"
#include "spinwire/spinwire.h"

namespace sim_waiting_test {
namespace {

using spinwire::Simulation;
using spinwire::Status;
using namespace std::chrono_literals;

TEST(SimWaiting, TimersRunInVirtualTimeAndNothingSleeps) {
  auto made = Simulation::create(7);
  ASSERT_TRUE(made) << made.error().message();
  Simulation& sim = *made;
  const auto node = sim.add(Simulation::config());
  ASSERT_TRUE(node);
  struct {
    int once = 0;
    int often = 0;
  } runs;
  ASSERT_TRUE(sim.engine(*node).after(1h, [&runs] { ++runs.once; }));
  ASSERT_TRUE(sim.engine(*node).every(10min, [&runs] { ++runs.often; }));
  EXPECT_EQ(sim.engine(*node).wait(1h), Status::timed_out);
  EXPECT_EQ(sim.engine(*node).stats().sleeps, 0u);
  sim.run_for(59min);
  EXPECT_EQ(runs.once, 0);
  EXPECT_EQ(runs.often, 5);
  sim.run_for(2min);
  EXPECT_EQ(runs.once, 1);
  // A node that dies forgets its timers.
  ASSERT_TRUE(sim.kill(*node));
  ASSERT_TRUE(sim.restart(*node));
  sim.run_for(1h);
  EXPECT_EQ(runs.often, 6);
  const auto audit = sim.audit();
  EXPECT_TRUE(audit) << audit.error().message();
}

}  // namespace
}  // namespace sim_waiting_test
