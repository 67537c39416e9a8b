// The receives that a host's connections may reserve.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "engine/harness.h"
#include "sim/serving_nodes.h"

namespace receive_shares_test {
namespace {

using namespace engine_test;  // names of a test namespace of its own
using spinwire::NodeId;
using spinwire::Simulation;

/// A server whose receives end before its connections, and two hosts.
struct World {
  explicit World(SharedReceiveQueue shared) : sim(Simulation::create(7).value()) {
    for (NodeId node = 0; node < 3; ++node) {
      Config c = Simulation::config();
      c.connections.maximum = 64;
      if (node == 1) {
        c.queues.shared_receive_queue = shared;
        c.queues.receive_depth = 64;
      }
      const auto added = sim.add(c);
      EXPECT_TRUE(added) << added.error().message();
    }
    auto made = sim.engine(1).listen(Simulation::address(1), {});
    EXPECT_TRUE(made) << made.error().message();
    if (made) listener = std::move(*made);
  }
  /// Whether one more connection of a node becomes ready.
  bool connect(NodeId from) {
    ConnectOptions options;
    std::optional<Error> closed;
    options.handlers.on_closed = [&](Connection, const Error& e) { closed = e; };
    const Connection c = *sim.engine(from).connect(Simulation::address(1), options);
    EXPECT_TRUE(sim.run_until([&] { return c.ready() || closed.has_value(); }, 5s));
    if (closed) why = closed->message();
    (void)Connection(c).set_handlers({});
    connections.push_back(c);
    return c.ready();
  }
  Simulation sim;
  Listener listener;
  std::string why;
  std::vector<Connection> connections;
};

TEST(EngineReceiveShares, AHostThatConnectsOftenLeavesReceivesForOthers) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "a simulation";
  for (const auto shared : {SharedReceiveQueue::automatic, SharedReceiveQueue::off}) {
    World world(shared);
    std::uint32_t count = 0;
    while (count < 64 && world.connect(0)) ++count;
    EXPECT_GE(count, shared == SharedReceiveQueue::off ? 5u : 25u);
    EXPECT_TRUE(world.connect(2)) << world.why;
    EXPECT_FALSE(world.connect(0));
    EXPECT_NE(world.why.find("which is its share"), std::string::npos) << world.why;
    const auto audit = world.sim.engine(1).audit();
    EXPECT_TRUE(audit) << audit.error().message();
  }
}

// Credit grows to a host's share. Its connections yield it as they send, and it is no reason to
// refuse another connection meanwhile.
TEST(EngineReceiveShares, AHostWithBusyConnectionsCanMakeMore) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "a simulation";
  World world(SharedReceiveQueue::automatic);
  std::uint32_t count = 0;
  for (; count < 3; ++count) ASSERT_TRUE(world.connect(0)) << world.why;
  for (std::uint32_t round = 0; round < 200; ++round) {
    for (const Connection& each : world.connections) {
      const std::array<std::byte, 8> bytes{};
      for (int i = 0; i < 20; ++i) (void)Connection(each).send_copy(bytes);
    }
    (void)world.sim.run_until([] { return false; }, 100us);
  }
  EXPECT_GE(world.sim.engine(1).stats().reserved_receives, 30u) << "its share of 40";
  for (; count < 10; ++count) ASSERT_TRUE(world.connect(0)) << count << ": " << world.why;
  EXPECT_TRUE(world.connect(2)) << world.why;
}

}  // namespace
}  // namespace receive_shares_test
