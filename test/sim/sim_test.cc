// Simulations: the same seed is the same run, what is asked to go wrong goes wrong, and who dies is
// missed by its peers.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "spinwire/spinwire.h"

namespace sim_test {
namespace {

using namespace spinwire;              // NOLINT: public API under test
using namespace std::chrono_literals;  // NOLINT

constexpr Method kEcho = 1;
constexpr Method kNever = 2;

Config watchful() {
  Config c = Simulation::config();
  c.connections.keepalive = 20ms;
  c.connections.peer_timeout = 200ms;
  c.connections.connect_timeout = 300ms;
  c.queue_pair.ack_timeout = 8;
  return c;
}

/// Nodes that serve an echo, and what was told of calls between them.
struct Town {
  explicit Town(std::uint64_t seed, std::uint32_t nodes = 2)
      : sim(Simulation::create(seed).value()), homes(nodes) {
    for (NodeId node = 0; node < nodes; ++node) {
      const auto added = sim.add(watchful());
      EXPECT_TRUE(added) << added.error().message();
      open_house(node);
    }
  }
  void open_house(NodeId node) {
    Home& home = homes[node];
    ASSERT_TRUE(sim.engine(node).serve(kEcho, [&home](Request& r) {
      ++home.served;
      (void)r.reply(r.bytes());
    }));
    ASSERT_TRUE(
        sim.engine(node).serve(kNever, [&home](Request& r) { home.pending.push_back(r.later()); }));
    ListenOptions options;
    options.handlers.on_message = [&home](Connection, Message&) { ++home.messages; };
    auto listener = sim.engine(node).listen(Simulation::address(node), options);
    ASSERT_TRUE(listener) << listener.error().message();
    home.listener = std::move(*listener);
  }
  Session open(NodeId from, NodeId to) {
    SessionOptions options;
    options.on_closed = [this](Session, const Error& why) { closed.push_back(why); };
    const auto made = sim.engine(from).open_session(Simulation::address(to), options);
    EXPECT_TRUE(made) << made.error().message();
    return *made;
  }
  Session ready(NodeId from, NodeId to) {
    const Session s = open(from, to);
    EXPECT_TRUE(sim.run_until([&] { return s.ready(); }, 1s));
    return s;
  }
  Connection connect(NodeId from, NodeId to) {
    ConnectOptions options;
    options.handlers.on_closed = [this](Connection, const Error& why) { closed.push_back(why); };
    const auto made = sim.engine(from).connect(Simulation::address(to), options);
    EXPECT_TRUE(made) << made.error().message();
    EXPECT_TRUE(sim.run_until([&] { return made->ready(); }, 1s));
    return *made;
  }
  /// So many calls one after the other; answers how they ended.
  std::vector<Status> call(Session s, int count, Nanoseconds deadline = 2s) {
    std::vector<Status> ended;
    for (int i = 0; i < count; ++i) {
      CallOptions options;
      options.deadline = deadline;
      const ReplyCallback done = [this, &ended](Reply& r) {
        ended.push_back(r.status());
        sim.note(static_cast<std::uint64_t>(r.status()));
      };
      const std::uint64_t payload = sim.random(1000);
      EXPECT_EQ(s.call(kEcho, std::as_bytes(std::span(&payload, 1)), done, options), Status::ok);
      const auto here = static_cast<std::size_t>(i);
      EXPECT_TRUE(sim.run_until([&] { return ended.size() > here; }, 5s));
    }
    return ended;
  }
  /// Sends so many messages, each when the last has completed; answers how they completed.
  std::vector<Status> send(Connection c, int count) {
    std::vector<Status> ended;
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
      const std::array<std::byte, 100> bytes{};
      const Status sent =
          c.send_copy(bytes, [&ended](const Completion& done) { ended.push_back(done.status); });
      if (sent != Status::ok) break;
      if (!sim.run_until([&] { return ended.size() > i; }, 5s)) break;
    }
    return ended;
  }
  static std::size_t good(const std::vector<Status>& ended) {
    return static_cast<std::size_t>(std::count(ended.begin(), ended.end(), Status::ok));
  }
  void expect_clean() {
    const auto clean = sim.audit();
    EXPECT_TRUE(clean) << clean.error().message();
  }

  struct Home {
    int served = 0;
    int messages = 0;
    std::vector<PendingCall> pending;
    Listener listener;
  };
  Simulation sim;
  std::deque<Home> homes;
  std::vector<Error> closed;
};

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
  options.deadline = 10s;
  ASSERT_EQ(s.state(), SessionState::ready);
  Session(s).call(
      kNever, std::span<const std::byte>(), [&ended](Reply&) { ++ended; }, options);
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
      options.deadline = 10s;
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

TEST(Sim, ACutHeals) {
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
  // A handshake waits for as long as its patience lasts.
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

TEST(Sim, ACutHoldsForLaterLives) {
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

TEST(Sim, EachFaultOfDatagramsDoesWhatItSays) {
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

TEST(Sim, EachFaultOfConnectionsDoesWhatItSays) {
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

TEST(Sim, AWayHasFaultsOfItsOwn) {
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

TEST(Sim, ADatagramTakesTheTimeThatItIsGiven) {
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

TEST(Sim, HandshakesTakeTheirTime) {
  Town town(14);
  NetworkFaults faults;
  faults.control_delay_min = faults.control_delay_max = 5ms;
  ASSERT_TRUE(town.sim.set_faults(faults));
  const auto begun = town.sim.now();
  (void)town.ready(0, 1);
  EXPECT_GE(town.sim.now() - begun, 10ms);
  EXPECT_LT(town.sim.now() - begun, 40ms);
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
  const auto errand = [&](int which) {
    return [&, which] {
      order.push_back(which);
      times.push_back(sim.now());
    };
  };
  sim.at(2ms, errand(2));
  sim.at(1ms, [&] {
    errand(1)();
    sim.at(2ms, errand(4));
    EXPECT_EQ(sim.step(), Status::reentrant);
  });
  sim.at(2ms, errand(3));
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
}  // namespace sim_test
