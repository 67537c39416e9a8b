// Simulated networks: what is asked to go wrong goes wrong, and nothing else does.
#include "sim/town.h"

namespace sim_network_test {
namespace {

using namespace sim_test;  // NOLINT: a test's helpers

TEST(SimNetwork, ACutHeals) {
  Town town(6, 3);
  Session s = town.ready(0, 1);
  const Session other = town.ready(2, 1);
  ASSERT_TRUE(town.sim.cut(1, 0));
  EXPECT_EQ(town.call(s, 1, 20ms), std::vector{Status::timed_out});
  EXPECT_EQ(Town::good(town.call(other, 2)), 2u);
  EXPECT_GT(town.sim.stats().cut, 0u);
  const int served = town.homes[1].served;
  ASSERT_TRUE(town.sim.heal(0, 1));
  EXPECT_EQ(Town::good(town.call(s, 3)), 3u);
  EXPECT_EQ(town.homes[1].served, served + 3);
  // A handshake waits for as long as its time-out lasts.
  ASSERT_TRUE(town.sim.isolate(2));
  const Session late = town.open(0, 2);
  town.sim.run_for(100ms);
  EXPECT_EQ(late.state(), SessionState::opening);
  ASSERT_TRUE(town.sim.heal());
  EXPECT_TRUE(town.sim.run_until([&] { return late.ready(); }, 10ms));
  ASSERT_TRUE(town.sim.isolate(2));
  const Session lost = town.open(0, 2);
  ASSERT_TRUE(town.sim.run_until([&] { return lost.state() == SessionState::closed; }, 1s));
  EXPECT_EQ(town.closed.back().status, Status::timed_out) << town.closed.back().message();
  town.expect_clean();
}

TEST(SimNetwork, ACutHoldsForLaterLives) {
  Town town(7);
  ASSERT_TRUE(town.sim.cut(0, 1));
  ASSERT_TRUE(town.sim.kill(1));
  ASSERT_TRUE(town.sim.restart(1));
  town.open_house(1);
  const Session s = town.open(0, 1);
  town.sim.run_for(200ms);
  EXPECT_EQ(s.state(), SessionState::opening);
  ASSERT_TRUE(town.sim.heal());
  EXPECT_TRUE(town.sim.run_until([&] { return s.ready(); }, 50ms));
  EXPECT_EQ(Town::good(town.call(s, 2)), 2u);
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
    Town town(8);
    const Session s = town.ready(0, 1);
    ASSERT_TRUE(town.sim.set_faults(each.faults));
    const auto begun = town.sim.now();
    EXPECT_EQ(Town::good(town.call(s, 20)), 20u);
    const SimulationStats stats = town.sim.stats();
    EXPECT_GE(stats.*each.counter, 5u);
    EXPECT_EQ(stats.dropped != 0, each.faults.drop != 0);
    EXPECT_EQ(stats.duplicated != 0, each.faults.duplicate != 0);
    EXPECT_EQ(town.homes[1].served, 20);
    if (each.faults.datagram_delay_min == 1ms) {
      EXPECT_GE(town.sim.now() - begun, 40ms);
    }
    town.expect_clean();
  }
  // To be overtaken takes several at a time.
  Town town(9);
  Session s = town.ready(0, 1);
  ASSERT_TRUE(town.sim.set_faults(reorder));
  ASSERT_EQ(Town::good(town.call(s, 1)), 1u);  // it is granted its window
  int ended = 0;
  for (int i = 0; i < 16; ++i)
    ASSERT_EQ(s.call(kEcho, std::span<const std::byte>(), [&ended](Reply&) { ++ended; }),
              Status::ok);
  ASSERT_TRUE(town.sim.run_until([&] { return ended == 16; }, 5s));
  EXPECT_GT(town.sim.stats().reordered, 0u);
}

TEST(SimNetwork, EachFaultOfConnectionsDoesWhatItSays) {
  Town town(10);
  Connection c = town.connect(0, 1);
  NetworkFaults faults;
  faults.not_ready = 0.3;
  ASSERT_TRUE(town.sim.set_faults(faults));
  EXPECT_EQ(Town::good(town.send(c, 20)), 20u);
  EXPECT_GE(town.sim.stats().not_ready, 2u);
  EXPECT_EQ(town.sim.stats().late, 0u);
  faults = {};
  faults.message_delay_min = faults.message_delay_max = 1ms;
  ASSERT_TRUE(town.sim.set_faults(faults));
  const auto begun = town.sim.now();
  EXPECT_EQ(Town::good(town.send(c, 20)), 20u);
  EXPECT_GE(town.sim.now() - begun, 20ms);
  EXPECT_GE(town.sim.stats().late, 20u);
  EXPECT_EQ(town.homes[1].messages, 40);
  EXPECT_EQ(town.sim.stats().packets_lost, 0u);
  faults = {};
  faults.packet_loss = 0.2;
  ASSERT_TRUE(town.sim.set_faults(faults));
  EXPECT_EQ(Town::good(town.send(c, 20)), 20u);
  EXPECT_GT(town.sim.stats().packets_lost, 2u);
  EXPECT_GT(town.sim.stats().packets_resent, 2u);
  EXPECT_EQ(town.homes[1].messages, 60);
  // A link that is cut is tried again, and then given up.
  ASSERT_TRUE(town.sim.set_faults({}));
  ASSERT_TRUE(town.sim.cut(0, 1));
  const auto lost = town.send(c, 1);
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_NE(lost[0], Status::ok);
  EXPECT_GT(town.sim.stats().unanswered, 0u);
  ASSERT_TRUE(town.sim.heal());
  // So is one whose work request fails at the device.
  c = town.connect(0, 1);
  ASSERT_TRUE(town.sim.fail_request(0, 3));
  const auto ended = town.send(c, 10);
  EXPECT_LT(Town::good(ended), 10u);
  EXPECT_EQ(town.sim.stats().failed, 1u);
  town.sim.run_for(1s);
  EXPECT_EQ(town.closed.size(), 2u);
  town.expect_clean();
}

TEST(SimNetwork, AWayHasFaultsOfItsOwn) {
  Town town(13, 3);
  const Session slow = town.ready(0, 1), fast = town.ready(0, 2);
  NetworkFaults faults;
  faults.datagram_delay_min = faults.datagram_delay_max = 500us;
  ASSERT_TRUE(town.sim.set_faults(0, 1, faults));
  const auto time_of = [&](const Session& s) {
    const auto begun = town.sim.now();
    EXPECT_EQ(Town::good(town.call(s, 4)), 4u);
    return town.sim.now() - begun;
  };
  EXPECT_GE(time_of(slow), 2ms);
  EXPECT_LT(time_of(slow), 4ms);  // there, not back
  EXPECT_LT(time_of(fast), 1ms);
  // And so in later lives.
  ASSERT_TRUE(town.sim.kill(1));
  ASSERT_TRUE(town.sim.restart(1));
  town.open_house(1);
  EXPECT_GE(time_of(town.ready(0, 1)), 2ms);
}

TEST(SimNetwork, ADatagramTakesTheTimeThatItIsGiven) {
  for (const Nanoseconds way : {0us, 1us, 20us, 60us, 100us, 1000us}) {
    Town town(20, 3);
    const Session s = town.ready(0, 1);
    ASSERT_EQ(Town::good(town.call(s, 1)), 1u);
    NetworkFaults faults;
    faults.datagram_delay_min = faults.datagram_delay_max = way;
    ASSERT_TRUE(town.sim.set_faults(faults));
    Nanoseconds shortest = 1s, longest = 0s;
    for (int i = 0; i < 200; ++i) {
      const auto begun = town.sim.now();
      ASSERT_EQ(Town::good(town.call(s, 1)), 1u);
      shortest = std::min(shortest, town.sim.now() - begun);
      longest = std::max(longest, town.sim.now() - begun);
    }
    EXPECT_GE(shortest, 2 * way);
    EXPECT_LT(longest, 2 * way + 15us);  // some steps of three polls, which may be passed over
    town.expect_clean();
  }
}

TEST(SimNetwork, HandshakesTakeTheirTime) {
  Town town(14);
  NetworkFaults faults;
  faults.control_delay_min = faults.control_delay_max = 5ms;
  ASSERT_TRUE(town.sim.set_faults(faults));
  const auto begun = town.sim.now();
  (void)town.ready(0, 1);
  EXPECT_GE(town.sim.now() - begun, 10ms);
  EXPECT_LT(town.sim.now() - begun, 40ms);
}

}  // namespace
}  // namespace sim_network_test
