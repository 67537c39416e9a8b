// Simulated networks: requested faults occur, and no others.
#include "sim/serving_nodes.h"

namespace sim_network_test {
namespace {

using namespace sim_test;  // NOLINT: a test's helpers

TEST(SimNetwork, ACutHeals) {
  ServingNodes world(6, 3);
  Session s = world.ready(0, 1);
  const Session other = world.ready(2, 1);
  ASSERT_TRUE(world.sim.cut(1, 0));
  EXPECT_EQ(world.call(s, 1, 20ms), std::vector{Status::timed_out});
  EXPECT_EQ(ServingNodes::good(world.call(other, 2)), 2u);
  EXPECT_GT(world.sim.stats().cut, 0u);
  const int served = world.homes[1].served;
  ASSERT_TRUE(world.sim.heal(0, 1));
  EXPECT_EQ(ServingNodes::good(world.call(s, 3)), 3u);
  EXPECT_EQ(world.homes[1].served, served + 3);
  // A handshake waits for its full timeout.
  ASSERT_TRUE(world.sim.isolate(2));
  const Session late = world.open(0, 2);
  world.sim.run_for(100ms);
  EXPECT_EQ(late.state(), SessionState::opening);
  ASSERT_TRUE(world.sim.heal());
  EXPECT_TRUE(world.sim.run_until([&] { return late.ready(); }, 10ms));
  ASSERT_TRUE(world.sim.isolate(2));
  const Session lost = world.open(0, 2);
  ASSERT_TRUE(world.sim.run_until([&] { return lost.state() == SessionState::closed; }, 1s));
  EXPECT_EQ(world.closed.back().status, Status::timed_out) << world.closed.back().message();
  world.expect_clean();
}

TEST(SimNetwork, ACutHoldsForLaterLives) {
  ServingNodes world(7);
  ASSERT_TRUE(world.sim.cut(0, 1));
  ASSERT_TRUE(world.sim.kill(1));
  ASSERT_TRUE(world.sim.restart(1));
  world.open_house(1);
  const Session s = world.open(0, 1);
  world.sim.run_for(200ms);
  EXPECT_EQ(s.state(), SessionState::opening);
  ASSERT_TRUE(world.sim.heal());
  EXPECT_TRUE(world.sim.run_until([&] { return s.ready(); }, 50ms));
  EXPECT_EQ(ServingNodes::good(world.call(s, 2)), 2u);
}

TEST(SimNetwork, EachFaultOfDatagramsDoesWhatItSays) {
  struct Case {
    NetworkFaults faults;
    std::uint64_t SimulationStats::*counter;
  };
  NetworkFaults drop, duplicate, reorder, delay;
  drop.drop = 0.3;
  duplicate.duplicate = 0.3;
  reorder.reorder = 0.5;
  delay.datagram_delay_min = delay.datagram_delay_max = 1ms;
  for (const Case& each :
       {Case{drop, &SimulationStats::dropped}, Case{duplicate, &SimulationStats::duplicated},
        Case{delay, &SimulationStats::delayed}}) {
    ServingNodes world(8);
    const Session s = world.ready(0, 1);
    ASSERT_TRUE(world.sim.set_faults(each.faults));
    const auto begun = world.sim.now();
    EXPECT_EQ(ServingNodes::good(world.call(s, 20)), 20u);
    const SimulationStats stats = world.sim.stats();
    EXPECT_GE(stats.*each.counter, 5u);
    EXPECT_EQ(stats.dropped != 0, each.faults.drop != 0);
    EXPECT_EQ(stats.duplicated != 0, each.faults.duplicate != 0);
    EXPECT_EQ(world.homes[1].served, 20);
    if (each.faults.datagram_delay_min == 1ms) {
      EXPECT_GE(world.sim.now() - begun, 40ms);
    }
    world.expect_clean();
  }
  // Reordering needs several in flight.
  ServingNodes world(9);
  Session s = world.ready(0, 1);
  ASSERT_TRUE(world.sim.set_faults(reorder));
  ASSERT_EQ(ServingNodes::good(world.call(s, 1)), 1u);  // gets the whole window
  int ended = 0;
  for (int i = 0; i < 16; ++i)
    ASSERT_EQ(s.call(kEcho, std::span<const std::byte>(), [&ended](Reply&) { ++ended; }),
              Status::ok);
  ASSERT_TRUE(world.sim.run_until([&] { return ended == 16; }, 5s));
  EXPECT_GT(world.sim.stats().reordered, 0u);
}

TEST(SimNetwork, EachFaultOfConnectionsDoesWhatItSays) {
  ServingNodes world(10);
  Connection c = world.connect(0, 1);
  NetworkFaults faults;
  faults.not_ready = 0.3;
  ASSERT_TRUE(world.sim.set_faults(faults));
  EXPECT_EQ(ServingNodes::good(world.send(c, 20)), 20u);
  EXPECT_GE(world.sim.stats().not_ready, 2u);
  EXPECT_EQ(world.sim.stats().delayed_requests, 0u);
  faults = {};
  faults.message_delay_min = faults.message_delay_max = 1ms;
  ASSERT_TRUE(world.sim.set_faults(faults));
  const auto begun = world.sim.now();
  EXPECT_EQ(ServingNodes::good(world.send(c, 20)), 20u);
  EXPECT_GE(world.sim.now() - begun, 20ms);
  EXPECT_GE(world.sim.stats().delayed_requests, 20u);
  EXPECT_EQ(world.homes[1].messages, 40);
  EXPECT_EQ(world.sim.stats().packets_lost, 0u);
  faults = {};
  faults.packet_loss = 0.2;
  ASSERT_TRUE(world.sim.set_faults(faults));
  EXPECT_EQ(ServingNodes::good(world.send(c, 20)), 20u);
  EXPECT_GT(world.sim.stats().packets_lost, 2u);
  EXPECT_GT(world.sim.stats().packets_retransmitted, 2u);
  EXPECT_EQ(world.homes[1].messages, 60);
  // A message on a cut link is retransmitted, and finally given up.
  ASSERT_TRUE(world.sim.set_faults({}));
  ASSERT_TRUE(world.sim.cut(0, 1));
  const auto lost = world.send(c, 1);
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_NE(lost[0], Status::ok);
  EXPECT_GT(world.sim.stats().unanswered, 0u);
  ASSERT_TRUE(world.sim.heal());
  // So is a message whose work request fails at the device.
  c = world.connect(0, 1);
  ASSERT_TRUE(world.sim.fail_request(0, 3));
  const auto ended = world.send(c, 10);
  EXPECT_LT(ServingNodes::good(ended), 10u);
  EXPECT_EQ(world.sim.stats().failed, 1u);
  world.sim.run_for(1s);
  EXPECT_EQ(world.closed.size(), 2u);
  world.expect_clean();
}

TEST(SimNetwork, AWayHasFaultsOfItsOwn) {
  ServingNodes world(13, 3);
  const Session slow = world.ready(0, 1), fast = world.ready(0, 2);
  NetworkFaults faults;
  faults.datagram_delay_min = faults.datagram_delay_max = 500us;
  ASSERT_TRUE(world.sim.set_faults(0, 1, faults));
  const auto time_of = [&](const Session& s) {
    const auto begun = world.sim.now();
    EXPECT_EQ(ServingNodes::good(world.call(s, 4)), 4u);
    return world.sim.now() - begun;
  };
  EXPECT_GE(time_of(slow), 2ms);
  EXPECT_LT(time_of(slow), 4ms);  // one way only
  EXPECT_LT(time_of(fast), 1ms);
  // Also after restarts.
  ASSERT_TRUE(world.sim.kill(1));
  ASSERT_TRUE(world.sim.restart(1));
  world.open_house(1);
  EXPECT_GE(time_of(world.ready(0, 1)), 2ms);
}

TEST(SimNetwork, ADatagramTakesTheTimeThatItIsGiven) {
  for (const Nanoseconds way : {0us, 1us, 20us, 60us, 100us, 1000us}) {
    ServingNodes world(20, 3);
    const Session s = world.ready(0, 1);
    ASSERT_EQ(ServingNodes::good(world.call(s, 1)), 1u);
    NetworkFaults faults;
    faults.datagram_delay_min = faults.datagram_delay_max = way;
    ASSERT_TRUE(world.sim.set_faults(faults));
    Nanoseconds shortest = 1s, longest = 0s;
    for (int i = 0; i < 200; ++i) {
      const auto begun = world.sim.now();
      ASSERT_EQ(ServingNodes::good(world.call(s, 1)), 1u);
      shortest = std::min(shortest, world.sim.now() - begun);
      longest = std::max(longest, world.sim.now() - begun);
    }
    EXPECT_GE(shortest, 2 * way);
    EXPECT_LT(longest, 2 * way + 15us);  // polling steps may be skipped
    world.expect_clean();
  }
}

TEST(SimNetwork, HandshakesTakeTheirTime) {
  ServingNodes world(14);
  NetworkFaults faults;
  faults.control_delay_min = faults.control_delay_max = 5ms;
  ASSERT_TRUE(world.sim.set_faults(faults));
  const auto begun = world.sim.now();
  (void)world.ready(0, 1);
  EXPECT_GE(world.sim.now() - begun, 10ms);
  EXPECT_LT(world.sim.now() - begun, 40ms);
}

}  // namespace
}  // namespace sim_network_test
