// A simulation whose nodes serve each other, and a record of the calls between them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <utility>
#include <vector>

#include "spinwire/spinwire.h"

namespace sim_test {

using namespace spinwire;              // NOLINT: public API under test
using namespace std::chrono_literals;  // NOLINT

inline constexpr Method kEcho = 1;
inline constexpr Method kNever = 2;

inline Config watchful() {
  Config c = Simulation::config();
  c.connections.keepalive_interval = 20ms;
  c.connections.peer_timeout = 200ms;
  c.connections.connect_timeout = 300ms;
  c.queue_pair.ack_timeout = 8;
  return c;
}

/// Nodes that serve an echo, and a record of the calls between them.
struct ServingNodes {
  explicit ServingNodes(std::uint64_t seed, std::uint32_t nodes = 2,
                        const Config& config = watchful())
      : sim(Simulation::create(seed).value()), homes(nodes) {
    for (NodeId node = 0; node < nodes; ++node) {
      const auto added = sim.add(config);
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
        sim.engine(node).serve(kNever, [&home](Request& r) { home.pending.push_back(r.defer()); }));
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
  /// Makes `count` calls one after another. Returns their results.
  std::vector<Status> call(Session s, int count, Nanoseconds deadline = 2s) {
    std::vector<Status> ended;
    for (int i = 0; i < count; ++i) {
      CallOptions options;
      options.timeout = deadline;
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
  /// Sends `count` messages, each after the last has completed. Returns their results.
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

}  // namespace sim_test
