// Simulations: a seed repeats its run, and peers notice a death.
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "control/key_files.h"
#include "own_process.h"
#include "sim/serving_nodes.h"

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

std::uint64_t trace_of(std::uint64_t seed, const Config& config = watchful()) {
  ServingNodes world(seed, 4, config);
  EXPECT_TRUE(world.sim.set_faults(rough()));
  for (NodeId node = 0; node < 4; ++node)
    EXPECT_EQ(ServingNodes::good(world.call(world.ready(node, 3 - node), 8)), 8u);
  EXPECT_TRUE(world.sim.kill(2));
  world.sim.run_for(50ms);
  EXPECT_TRUE(world.sim.restart(2));
  world.open_house(2);
  EXPECT_EQ(ServingNodes::good(world.call(world.ready(1, 2), 8)), 8u);
  return world.sim.trace_hash();
}

TEST(Sim, TheSameSeedIsTheSameRun) {
  const std::uint64_t first = trace_of(11);
  EXPECT_EQ(trace_of(11), first);
  EXPECT_NE(trace_of(12), first);
}

TEST(Sim, NodesWithKeysRepeatTheirRun) {
  const key_files::KeyFile file(key_files::line("2026", 'a'));
  Config config = watchful();
  config.security.key_file = file.path();
  const std::uint64_t first = trace_of(11, config);
  EXPECT_EQ(trace_of(11, config), first);
  EXPECT_NE(trace_of(11), first) << "authentication takes steps of its own";
  ServingNodes world(11, 2, config);
  (void)world.ready(0, 1);
  EXPECT_EQ(world.sim.engine(1).stats().authentication.authenticated, 1u);
}

TEST(Sim, NodesWithOtherKeysDoNotMeet) {
  const key_files::KeyFile ours(key_files::line("2026", 'a')), theirs(key_files::line("2026", 'b'));
  ServingNodes world(5, 1, [&] {
    Config config = watchful();
    config.security.key_file = ours.path();
    return config;
  }());
  Config other = watchful();
  other.security.key_file = theirs.path();
  ASSERT_TRUE(world.sim.add(other));
  (void)world.open(1, 0);
  EXPECT_TRUE(world.sim.run_until([&] { return !world.closed.empty(); }, 1s));
  EXPECT_EQ(world.closed.at(0).status, Status::unauthenticated);
  EXPECT_EQ(world.sim.engine(0).stats().authentication.unknown_key, 1u);
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
  ServingNodes world(1);
  const Session s = world.ready(0, 1);
  int ended = 0;
  CallOptions options;
  options.timeout = 10s;
  ASSERT_EQ(s.state(), SessionState::ready);
  ASSERT_EQ(Session(s).call(
                kNever, std::span<const std::byte>(), [&ended](Reply&) { ++ended; }, options),
            Status::ok);
  const auto begun = world.sim.now();
  const std::uint64_t steps = world.sim.stats().steps;
  ASSERT_TRUE(world.sim.run_until([&] { return ended == 1; }, 20s));
  EXPECT_GE(world.sim.now() - begun, 10s);
  EXPECT_LE(world.sim.now() - begun, 10s + 1ms);
  // Only pings every 20 ms and retransmissions ran, not millions of polls.
  EXPECT_LT(world.sim.stats().steps - steps, 100'000u);
  EXPECT_GT(world.sim.stats().jumps, 500u);
}

TEST(Sim, WhoIsKilledIsMissedAndComesBack) {
  ServingNodes world(3, 3);
  Session to_victim = world.ready(0, 1);
  const Session to_other = world.ready(0, 2);
  int told = 0, ended = 0;
  Status status = Status::ok;
  // None of the victim's own callbacks runs.
  Session of_victim = world.ready(1, 2);
  ASSERT_EQ(of_victim.call(kNever, std::span<const std::byte>(), [&told](Reply&) { ++told; }),
            Status::ok);
  ASSERT_EQ(to_victim.call(kNever, std::span<const std::byte>(),
                           [&](Reply& r) {
                             ++ended;
                             status = r.status();
                           }),
            Status::ok);
  world.sim.run_for(1ms);
  ASSERT_EQ(world.homes[1].pending.size(), 1u);
  const Buffer kept = world.sim.engine(1).allocate(100);
  EXPECT_EQ(world.sim.incarnation(1), 1u);
  ASSERT_TRUE(world.sim.kill(1));
  EXPECT_FALSE(world.sim.alive(1));
  EXPECT_FALSE(world.sim.engine(1));
  EXPECT_FALSE(world.sim.kill(1));
  std::memset(kept.data(), 1, 100);  // outlives its engine
  const auto killed = world.sim.now();
  ASSERT_TRUE(world.sim.run_until([&] { return world.closed.size() == 1; }, 2s));
  EXPECT_GT(world.sim.now() - killed, 200ms);  // only silence showed the death
  EXPECT_EQ(world.closed[0].status, Status::peer_lost) << world.closed[0].message();
  EXPECT_EQ(ended, 1);
  EXPECT_EQ(status, Status::peer_lost);
  EXPECT_EQ(told, 0);
  EXPECT_EQ(ServingNodes::good(world.call(to_other, 3)), 3u);
  // While the node is dead its port refuses, like a host without the process.
  const Session refused = world.open(0, 1);
  ASSERT_TRUE(world.sim.run_until([&] { return world.closed.size() == 2; }, 1s));
  EXPECT_EQ(world.closed[1].status, Status::refused) << world.closed[1].message();
  EXPECT_EQ(refused.state(), SessionState::closed);

  ASSERT_TRUE(world.sim.restart(1));
  EXPECT_FALSE(world.sim.restart(1));
  EXPECT_EQ(world.sim.incarnation(1), 2u);
  world.open_house(1);
  EXPECT_EQ(ServingNodes::good(world.call(world.ready(0, 1), 3)), 3u);
  EXPECT_EQ(world.sim.stats().kills, 1u);
  EXPECT_EQ(world.sim.stats().restarts, 1u);
  world.expect_clean();
}

TEST(Sim, AConnectionToTheDeadEnds) {
  ServingNodes world(4);
  const Connection c = world.connect(0, 1);
  ASSERT_EQ(ServingNodes::good(world.send(c, 3)), 3u);
  EXPECT_EQ(world.homes[1].messages, 3);
  ASSERT_TRUE(world.sim.kill(1));
  ASSERT_TRUE(world.sim.run_until([&] { return world.closed.size() == 1; }, 2s));
  EXPECT_EQ(world.closed[0].status, Status::peer_lost) << world.closed[0].message();
  world.expect_clean();
}

TEST(Sim, ANodeCanDieInItsOwnHandler) {
  ServingNodes world(5);
  Session s = world.ready(0, 1);
  const MethodHandler dies = [&world](Request& r) {
    EXPECT_TRUE(world.sim.kill(1));
    EXPECT_FALSE(world.sim.alive(1));
    (void)r.reply(r.bytes());  // is dropped
  };
  ASSERT_TRUE(world.sim.engine(1).serve(9, dies));
  Status status = Status::ok;
  ASSERT_EQ(s.call(9, std::span<const std::byte>(), [&](Reply& r) { status = r.status(); }),
            Status::ok);
  ASSERT_TRUE(world.sim.run_until([&] { return !world.closed.empty(); }, 2s));
  EXPECT_EQ(status, Status::peer_lost);
  EXPECT_FALSE(world.sim.engine(1));
  world.expect_clean();
}

/// The number of engines' slabs mapped by this process.
std::size_t slabs() { return own_process::mappings("spinwire-slab"); }

TEST(Sim, WhoIsKilledInALongCallLeavesNoMemoryBehind) {
  ServingNodes world(19);
  std::size_t had = 0;
  for (int life = 0; life < 4; ++life) {
    {
      Session s = world.ready(0, 1);
      const Buffer request = world.sim.engine(0).allocate(20'000);
      CallOptions options;
      options.timeout = 10s;
      options.reply_into = world.sim.engine(0).allocate(20'000).slice();
      ASSERT_EQ(s.call(
                    kNever, request.slice(), [](Reply&) {}, options),
                Status::ok);
      const std::size_t before = world.homes[1].pending.size();
      ASSERT_TRUE(world.sim.run_until([&] { return world.homes[1].pending.size() > before; }, 1s));
    }
    ASSERT_TRUE(world.sim.kill(0));
    ASSERT_TRUE(world.sim.restart(0));
    if (life == 0) had = slabs();
  }
  EXPECT_EQ(slabs(), had);
}

TEST(Sim, APausedNodeDoesNothing) {
  ServingNodes world(15);
  const Session s = world.ready(0, 1);
  ASSERT_TRUE(world.sim.pause(1, 30ms));
  const auto begun = world.sim.now();
  EXPECT_EQ(ServingNodes::good(world.call(s, 1)), 1u);
  EXPECT_GE(world.sim.now() - begun, 30ms);
  EXPECT_LT(world.sim.now() - begun, 30ms + 15us);
  EXPECT_EQ(world.homes[1].served, 1);
}

TEST(Sim, ScheduledFunctionsRunInTime) {
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

TEST(Sim, AnExceptionOfAScheduledFunctionLeavesTheStep) {
  auto sim = Simulation::create(17).value();
  int ran = 0;
  sim.at(1ms, [] { throw std::runtime_error("a scheduled function"); });
  sim.at(1ms, [&] { ++ran; });
  sim.at(2ms, [&] { ++ran; });
  EXPECT_THROW(sim.run_for(10ms), std::runtime_error);
  EXPECT_EQ(ran, 0);
  EXPECT_LT(sim.now(), 2ms);
  EXPECT_EQ(sim.step(), Status::ok);
  EXPECT_EQ(ran, 1) << "the step goes on behind the function that has thrown";
  sim.run_for(10ms);
  EXPECT_EQ(ran, 2);
}

TEST(Sim, ScheduledFunctionsAreInTimeThoughOthersAreAsWell) {
  ServingNodes world(21, 3);  // whose polls go on meanwhile
  int late = 0, ran = 0;
  for (int i = 0; i < 300; ++i) {
    const Nanoseconds due = 1ms + i * 700ns;
    world.sim.at(due, [&, due] {
      ++ran;
      late += world.sim.now() - due > 5us ? 1 : 0;
    });
  }
  world.sim.run_for(5ms);
  EXPECT_EQ(ran, 300);
  EXPECT_EQ(late, 0);
}

// A simulation allocates the backlog only for calls in it.
TEST(Sim, WhoIsKilledMayHaveCallsThatWait) {
  ServingNodes world(22);
  SessionOptions options;
  options.window = 1;
  Session s = world.sim.engine(0).open_session(Simulation::address(1), options).value();
  ASSERT_TRUE(world.sim.run_until([&] { return s.ready(); }, 50ms));
  {
    std::vector<Buffer> all;
    for (int i = 0; i < 200; ++i) {
      Buffer b = world.sim.engine(0).allocate(20'000);
      if (!b) break;
      std::memset(b.data(), 0x41, b.size());
      all.push_back(std::move(b));
    }
    ASSERT_FALSE(all.empty());
  }
  for (int i = 0; i < 3; ++i)
    ASSERT_EQ(s.call(kNever, std::span<const std::byte>(), [](Reply&) { ADD_FAILURE(); }),
              Status::ok);
  world.sim.run_for(1ms);
  ASSERT_EQ(world.homes[1].pending.size(), 1u);  // the others wait
  ASSERT_TRUE(world.sim.kill(0));
  ASSERT_TRUE(world.sim.restart(0));
  EXPECT_EQ(ServingNodes::good(world.call(world.ready(0, 1), 2)), 2u);
}

TEST(Sim, WrongOptionsAreRefused) {
  const auto expect_bad = [](const Result<void>& result, const char* name) {
    ASSERT_FALSE(result) << name;
    EXPECT_EQ(result.error().status, Status::invalid_argument);
    EXPECT_NE(result.error().message().find(name), std::string::npos) << result.error().message();
  };
  SimulationOptions options;
  options.skip_probability = 1;
  EXPECT_EQ(Simulation::create(1, options).error().status, Status::invalid_argument);
  options = {};
  options.poll_time_max = 0ns;
  EXPECT_EQ(Simulation::create(1, options).error().status, Status::invalid_argument);

  ServingNodes world(17);
  EXPECT_EQ(Simulation::create(1).error().status, Status::in_use);
  Config config = Simulation::config();
  config.device.name = "auto";
  EXPECT_EQ(world.sim.add(config).error().status, Status::invalid_argument);
  config = Simulation::config();
  config.memory.hugepages = HugepagePolicy::require;
  EXPECT_EQ(world.sim.add(config).error().status, Status::invalid_argument);
  NetworkFaults faults;
  faults.drop = 1.5;
  expect_bad(world.sim.set_faults(faults), "drop");
  faults = {};
  faults.packet_loss = -0.1;
  expect_bad(world.sim.set_faults(faults), "packet_loss");
  faults = {};
  faults.reorder_distance = 0;
  expect_bad(world.sim.set_faults(faults), "reorder_distance");
  faults = {};
  faults.message_delay_min = 2ms;
  faults.message_delay_max = 1ms;
  expect_bad(world.sim.set_faults(0, 1, faults), "message_delay");
  expect_bad(world.sim.set_faults(0, 2, {}), "nodes 0 and 2 of 2");
  expect_bad(world.sim.cut(1, 1), "nodes 1 and 1");
  expect_bad(world.sim.isolate(5), "node");
  expect_bad(world.sim.kill(2), "node 2");
  expect_bad(world.sim.restart(1), "alive");
  expect_bad(world.sim.pause(0, 2h), "pause");
  expect_bad(world.sim.fail_request(0, 0), "number 0");
}

TEST(Sim, AddressesAreTheSimulationsOwn) {
  ServingNodes world(18);
  EXPECT_EQ(Simulation::address(0), "10.0.0.1:7000");
  EXPECT_EQ(Simulation::address(255, 80), "10.0.1.0:80");
  Engine& engine = world.sim.engine(0);
  EXPECT_EQ(engine.listen(Simulation::address(0), {}).error().status, Status::in_use);
  EXPECT_EQ(engine.listen(Simulation::address(1), {}).error().status, Status::invalid_argument);
  auto any = engine.listen("0.0.0.0:0", {});
  ASSERT_TRUE(any) << any.error().message();
  EXPECT_EQ(any->address().substr(0, 9), "10.0.0.1:");
  // No node has that address.
  ASSERT_TRUE(engine.open_session(
      "192.0.2.1:7000",
      {.on_ready = {}, .on_closed = [&](Session, const Error& e) { world.closed.push_back(e); }}));
  ASSERT_TRUE(world.sim.run_until([&] { return world.closed.size() == 1; }, 2s));
  EXPECT_EQ(world.closed[0].status, Status::timed_out) << world.closed[0].message();
}

/// Expects runs of the workload to pass. `runs`: options of spinwire-sim.
void expect_even(const std::string& runs, const char* passed) {
  const char* bin = std::getenv("SPINWIRE_BIN");
  const std::string command =
      std::string(bin != nullptr ? bin : "build/bin") + "/spinwire-sim " + runs + " 2>&1";
  FILE* const out = ::popen(command.c_str(), "r");
  ASSERT_NE(out, nullptr);
  std::string text;
  std::array<char, 256> line{};
  while (std::fgets(line.data(), line.size(), out) != nullptr) text += line.data();
  EXPECT_EQ(::pclose(out), 0) << text;
  EXPECT_NE(text.find(passed), std::string::npos) << text;
}

TEST(Sim, TheWorkloadComesOutEven) {
  expect_even("--seed 1 --runs 4 --jobs 2 --twice", "\n4 runs passed, 0 failed");
}

/// In these runs a node is killed after its drain has begun. A client that was paused becomes ready
/// later, and then takes the node's goodbye from its receive queue.
TEST(Sim, TheWorkloadAllowsForGoodbyesOfKilledNodes) {
  for (const char* seed : {"1021031", "1037610"})
    expect_even(std::string("--seed ") + seed, "1 runs passed, 0 failed");
}

}  // namespace
}  // namespace sim_life_test
