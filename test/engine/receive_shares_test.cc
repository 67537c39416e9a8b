// The receives that a host's connections may reserve.
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <string>

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
    return c.ready();
  }
  Simulation sim;
  Listener listener;
  std::string why;
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

}  // namespace
}  // namespace receive_shares_test
