// Simulations: the same seed is the same run, and who dies is missed by its peers.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "sim/town.h"

namespace sim_life_test {
namespace {

using namespace sim_test;  // NOLINT: a test's helpers

NetworkFaults rough() {
  NetworkFaults f;
  f.drop = f.duplicate = f.reorder = 0.1;
  f.datagram_delay_max = 50us;
  f.control_delay_max = 200us;
  return f;
}

std::uint64_t trace_of(std::uint64_t seed) {
  Town town(seed, 4);
  EXPECT_TRUE(town.sim.set_faults(rough()));
  for (NodeId node = 0; node < 4; ++node)
    EXPECT_EQ(Town::good(town.call(town.ready(node, 3 - node), 8)), 8u);
  EXPECT_TRUE(town.sim.kill(2));
  town.sim.run_for(50ms);
  EXPECT_TRUE(town.sim.restart(2));
  town.open_house(2);
  EXPECT_EQ(Town::good(town.call(town.ready(1, 2), 8)), 8u);
  return town.sim.trace_hash();
}

TEST(Sim, TheSameSeedIsTheSameRun) {
  const std::uint64_t first = trace_of(11);
  EXPECT_EQ(trace_of(11), first);
  EXPECT_NE(trace_of(12), first);
}

TEST(Sim, WhatIsNotedIsInTheTrace) {
  const auto trace = [](std::string_view text) {
    auto sim = Simulation::create(1).value();
    sim.note(text);
    return sim.trace_hash();
  };
  EXPECT_EQ(trace("a"), trace("a"));
  EXPECT_NE(trace("a"), trace("b"));
}

TEST(Sim, TimeOutsCostNothing) {
  Town town(1);
  const Session s = town.ready(0, 1);
  int ended = 0;
  CallOptions options;
  options.timeout = 10s;
  ASSERT_EQ(s.state(), SessionState::ready);
  ASSERT_EQ(Session(s).call(
                kNever, std::span<const std::byte>(), [&ended](Reply&) { ++ended; }, options),
            Status::ok);
  const auto begun = town.sim.now();
  const std::uint64_t steps = town.sim.stats().steps;
  ASSERT_TRUE(town.sim.run_until([&] { return ended == 1; }, 20s));
  EXPECT_GE(town.sim.now() - begun, 10s);
  EXPECT_LE(town.sim.now() - begun, 10s + 1ms);
  // Pings every 20 ms, and retransmissions, are all that there was: millions of polls otherwise.
  EXPECT_LT(town.sim.stats().steps - steps, 100'000u);
  EXPECT_GT(town.sim.stats().jumps, 500u);
}

TEST(Sim, WhoIsKilledIsMissedAndComesBack) {
  Town town(3, 3);
  Session to_victim = town.ready(0, 1);
  const Session to_other = town.ready(0, 2);
  int told = 0, ended = 0;
  Status status = Status::ok;
  // Of the victim's own callbacks none runs.
  Session of_victim = town.ready(1, 2);
  ASSERT_EQ(of_victim.call(kNever, std::span<const std::byte>(), [&told](Reply&) { ++told; }),
            Status::ok);
  ASSERT_EQ(to_victim.call(kNever, std::span<const std::byte>(),
                           [&](Reply& r) {
                             ++ended;
                             status = r.status();
                           }),
            Status::ok);
  town.sim.run_for(1ms);
  ASSERT_EQ(town.homes[1].pending.size(), 1u);
  const Buffer kept = town.sim.engine(1).allocate(100);
  EXPECT_EQ(town.sim.life(1), 1u);
  ASSERT_TRUE(town.sim.kill(1));
  EXPECT_FALSE(town.sim.alive(1));
  EXPECT_FALSE(town.sim.engine(1));
  EXPECT_FALSE(town.sim.kill(1));
  std::memset(kept.data(), 1, 100);  // outlives its engine
  const auto killed = town.sim.now();
  ASSERT_TRUE(town.sim.run_until([&] { return town.closed.size() == 1; }, 2s));
  EXPECT_GT(town.sim.now() - killed, 200ms);  // nothing told it, but silence
  EXPECT_EQ(town.closed[0].status, Status::peer_lost) << town.closed[0].message();
  EXPECT_EQ(ended, 1);
  EXPECT_EQ(status, Status::peer_lost);
  EXPECT_EQ(told, 0);
  EXPECT_EQ(Town::good(town.call(to_other, 3)), 3u);
  // While it is dead its port refuses, as that of a host without the process does.
  const Session refused = town.open(0, 1);
  ASSERT_TRUE(town.sim.run_until([&] { return town.closed.size() == 2; }, 1s));
  EXPECT_EQ(town.closed[1].status, Status::refused) << town.closed[1].message();
  EXPECT_EQ(refused.state(), SessionState::closed);

  ASSERT_TRUE(town.sim.restart(1));
  EXPECT_FALSE(town.sim.restart(1));
  EXPECT_EQ(town.sim.life(1), 2u);
  town.open_house(1);
  EXPECT_EQ(Town::good(town.call(town.ready(0, 1), 3)), 3u);
  EXPECT_EQ(town.sim.stats().kills, 1u);
  EXPECT_EQ(town.sim.stats().restarts, 1u);
  town.expect_clean();
}

TEST(Sim, AConnectionToTheDeadEnds) {
  Town town(4);
  const Connection c = town.connect(0, 1);
  ASSERT_EQ(Town::good(town.send(c, 3)), 3u);
  EXPECT_EQ(town.homes[1].messages, 3);
  ASSERT_TRUE(town.sim.kill(1));
  ASSERT_TRUE(town.sim.run_until([&] { return town.closed.size() == 1; }, 2s));
  EXPECT_EQ(town.closed[0].status, Status::peer_lost) << town.closed[0].message();
  town.expect_clean();
}

TEST(Sim, ANodeCanDieInItsOwnHandler) {
  Town town(5);
  Session s = town.ready(0, 1);
  const MethodHandler dies = [&town](Request& r) {
    EXPECT_TRUE(town.sim.kill(1));
    EXPECT_FALSE(town.sim.alive(1));
    (void)r.reply(r.bytes());  // goes nowhere
  };
  ASSERT_TRUE(town.sim.engine(1).serve(9, dies));
  Status status = Status::ok;
  ASSERT_EQ(s.call(9, std::span<const std::byte>(), [&](Reply& r) { status = r.status(); }),
            Status::ok);
  ASSERT_TRUE(town.sim.run_until([&] { return !town.closed.empty(); }, 2s));
  EXPECT_EQ(status, Status::peer_lost);
  EXPECT_FALSE(town.sim.engine(1));
  town.expect_clean();
}

/// Slabs of engines that this process has mapped.
int slabs() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);)
    count += line.find("spinwire-slab") != std::string::npos ? 1 : 0;
  return count;
}

TEST(Sim, WhoIsKilledInALongCallLeavesNoMemoryBehind) {
  Town town(19);
  int had = 0;
  for (int life = 0; life < 4; ++life) {
    {
      Session s = town.ready(0, 1);
      const Buffer request = town.sim.engine(0).allocate(20'000);
      CallOptions options;
      options.timeout = 10s;
      options.reply_into = town.sim.engine(0).allocate(20'000).slice();
      ASSERT_EQ(s.call(
                    kNever, request.slice(), [](Reply&) {}, options),
                Status::ok);
      const std::size_t before = town.homes[1].pending.size();
      ASSERT_TRUE(town.sim.run_until([&] { return town.homes[1].pending.size() > before; }, 1s));
    }
    ASSERT_TRUE(town.sim.kill(0));
    ASSERT_TRUE(town.sim.restart(0));
    if (life == 0) had = slabs();
  }
  EXPECT_EQ(slabs(), had);
}

TEST(Sim, APausedNodeDoesNothing) {
  Town town(15);
  const Session s = town.ready(0, 1);
  ASSERT_TRUE(town.sim.pause(1, 30ms));
  const auto begun = town.sim.now();
  EXPECT_EQ(Town::good(town.call(s, 1)), 1u);
  EXPECT_GE(town.sim.now() - begun, 30ms);
  EXPECT_LT(town.sim.now() - begun, 30ms + 15us);
  EXPECT_EQ(town.homes[1].served, 1);
}

TEST(Sim, ErrandsRunInTime) {
  auto sim = Simulation::create(16).value();
  std::vector<int> order;
  std::vector<Nanoseconds> times;
  const auto action = [&](int which) {
    return [&, which] {
      order.push_back(which);
      times.push_back(sim.now());
    };
  };
  sim.at(2ms, action(2));
  sim.at(1ms, [&] {
    action(1)();
    sim.at(2ms, action(4));
    EXPECT_EQ(sim.step(), Status::reentrant);
  });
  sim.at(2ms, action(3));
  sim.run_for(10ms);
  EXPECT_EQ(order, (std::vector{1, 2, 3, 4}));
  EXPECT_EQ(times, (std::vector<Nanoseconds>{1ms, 2ms, 2ms, 2ms}));
}

TEST(Sim, ErrandsAreInTimeThoughOthersAreAsWell) {
  Town town(21, 3);  // whose polls go on meanwhile
  int late = 0, ran = 0;
  for (int i = 0; i < 300; ++i) {
    const Nanoseconds due = 1ms + i * 700ns;
    town.sim.at(due, [&, due] {
      ++ran;
      late += town.sim.now() - due > 5us ? 1 : 0;
    });
  }
  town.sim.run_for(5ms);
  EXPECT_EQ(ran, 300);
  EXPECT_EQ(late, 0);
}

// Of the room for calls that wait only as much is made as there are such calls.
TEST(Sim, WhoIsKilledMayHaveCallsThatWait) {
  Town town(22);
  SessionOptions options;
  options.window = 1;
  Session s = town.sim.engine(0).open_session(Simulation::address(1), options).value();
  ASSERT_TRUE(town.sim.run_until([&] { return s.ready(); }, 50ms));
  {
    std::vector<Buffer> all;
    for (int i = 0; i < 200; ++i) {
      Buffer b = town.sim.engine(0).allocate(20'000);
      if (!b) break;
      std::memset(b.data(), 0x41, b.size());
      all.push_back(std::move(b));
    }
    ASSERT_FALSE(all.empty());
  }
  for (int i = 0; i < 3; ++i)
    ASSERT_EQ(s.call(kNever, std::span<const std::byte>(), [](Reply&) { ADD_FAILURE(); }),
              Status::ok);
  town.sim.run_for(1ms);
  ASSERT_EQ(town.homes[1].pending.size(), 1u);  // the others wait
  ASSERT_TRUE(town.sim.kill(0));
  ASSERT_TRUE(town.sim.restart(0));
  EXPECT_EQ(Town::good(town.call(town.ready(0, 1), 2)), 2u);
}

TEST(Sim, WrongOptionsAreRefused) {
  const auto expect_bad = [](const Result<void>& result, const char* name) {
    ASSERT_FALSE(result) << name;
    EXPECT_EQ(result.error().status, Status::invalid_argument);
    EXPECT_NE(result.error().message().find(name), std::string::npos) << result.error().message();
  };
  SimulationOptions options;
  options.left_out = 1;
  EXPECT_EQ(Simulation::create(1, options).error().status, Status::invalid_argument);
  options = {};
  options.poll_time_max = 0ns;
  EXPECT_EQ(Simulation::create(1, options).error().status, Status::invalid_argument);

  Town town(17);
  EXPECT_EQ(Simulation::create(1).error().status, Status::in_use);
  Config config = Simulation::config();
  config.device.name = "auto";
  EXPECT_EQ(town.sim.add(config).error().status, Status::invalid_argument);
  config = Simulation::config();
  config.memory.hugepages = HugepagePolicy::require;
  EXPECT_EQ(town.sim.add(config).error().status, Status::invalid_argument);
  NetworkFaults faults;
  faults.drop = 1.5;
  expect_bad(town.sim.set_faults(faults), "drop");
  faults = {};
  faults.packet_loss = -0.1;
  expect_bad(town.sim.set_faults(faults), "packet_loss");
  faults = {};
  faults.reorder_distance = 0;
  expect_bad(town.sim.set_faults(faults), "reorder_distance");
  faults = {};
  faults.message_delay_min = 2ms;
  faults.message_delay_max = 1ms;
  expect_bad(town.sim.set_faults(0, 1, faults), "message_delay");
  expect_bad(town.sim.set_faults(0, 2, {}), "nodes 0 and 2 of 2");
  expect_bad(town.sim.cut(1, 1), "nodes 1 and 1");
  expect_bad(town.sim.isolate(5), "node");
  expect_bad(town.sim.kill(2), "node 2");
  expect_bad(town.sim.restart(1), "alive");
  expect_bad(town.sim.pause(0, 2h), "pause");
  expect_bad(town.sim.fail_request(0, 0), "number 0");
}

TEST(Sim, AddressesAreTheSimulationsOwn) {
  Town town(18);
  EXPECT_EQ(Simulation::address(0), "10.0.0.1:7000");
  EXPECT_EQ(Simulation::address(255, 80), "10.0.1.0:80");
  Engine& engine = town.sim.engine(0);
  EXPECT_EQ(engine.listen(Simulation::address(0), {}).error().status, Status::in_use);
  EXPECT_EQ(engine.listen(Simulation::address(1), {}).error().status, Status::invalid_argument);
  auto any = engine.listen("0.0.0.0:0", {});
  ASSERT_TRUE(any) << any.error().message();
  EXPECT_EQ(any->address().substr(0, 9), "10.0.0.1:");
  // Nobody has that address: nobody answers.
  ASSERT_TRUE(engine.open_session(
      "192.0.2.1:7000",
      {.on_ready = {}, .on_closed = [&](Session, const Error& e) { town.closed.push_back(e); }}));
  ASSERT_TRUE(town.sim.run_until([&] { return town.closed.size() == 1; }, 2s));
  EXPECT_EQ(town.closed[0].status, Status::timed_out) << town.closed[0].message();
}

TEST(Sim, TheWorkloadComesOutEven) {
  const char* bin = std::getenv("SPINWIRE_BIN");
  const std::string command = std::string(bin != nullptr ? bin : "build/bin") +
                              "/spinwire-sim --seed 1 --runs 4 --jobs 2 --twice 2>&1";
  FILE* const out = ::popen(command.c_str(), "r");
  ASSERT_NE(out, nullptr);
  std::string text;
  std::array<char, 256> line{};
  while (std::fgets(line.data(), line.size(), out) != nullptr) text += line.data();
  EXPECT_EQ(::pclose(out), 0) << text;
  EXPECT_NE(text.find("\n4 runs passed, 0 failed"), std::string::npos) << text;
}

}  // namespace
}  // namespace sim_life_test
