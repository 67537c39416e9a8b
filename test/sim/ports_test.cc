// Ports of simulated devices: links that go down, and ports that fall silent.
#include "sim/serving_nodes.h"

namespace sim_ports_test {
namespace {

using namespace sim_test;  // NOLINT: a test's helpers

/// A client with two local paths.
struct World : ServingNodes {
  explicit World(std::uint64_t seed) : ServingNodes(seed) {
    ConnectOptions options;
    options.reconnect = {1000, 1ms, 5ms};
    options.timeout = 50ms;
    options.local_paths = {LocalPath{1}, LocalPath{2}};
    options.handlers.on_interrupted = [this](Connection, const Error& why) {
      interrupted.push_back(why);
    };
    auto made = sim.engine(0).connect(Simulation::address(1), options);
    EXPECT_TRUE(made) << made.error().message();
    link = *made;
    EXPECT_TRUE(sim.run_until([&] { return link.ready(); }, 1s));
  }
  /// The connection has been lost once more, and is ready through this port.
  void expect_moved(std::uint32_t port, Nanoseconds within) {
    const std::size_t before = interrupted.size();
    EXPECT_TRUE(
        sim.run_until([&] { return interrupted.size() == before + 1 && link.ready(); }, within));
    EXPECT_EQ(link.local_path().port, port);
    EXPECT_EQ(good(send(link, 3)), 3u);
  }
  std::vector<Error> interrupted;
  Connection link;
};

TEST(SimPorts, WhatIsDownIsReportedAndWhatIsSilentIsNot) {
  World world(31);
  EXPECT_EQ(world.link.local_path().port, 1u);
  ASSERT_TRUE(world.sim.set_port(0, 1, PortState::down));
  world.expect_moved(2, 20ms);
  EXPECT_EQ(world.interrupted.back().status, Status::local_error);
  ASSERT_TRUE(world.sim.set_port(0, 1, PortState::up));
  ASSERT_TRUE(world.sim.set_port(0, 2, PortState::silent));
  world.sim.run_for(10ms);
  EXPECT_EQ(world.interrupted.size(), 1u) << "nothing tells the engine";
  world.expect_moved(1, 1s);
  EXPECT_EQ(world.interrupted.back().status, Status::peer_lost);
  world.expect_clean();
}

TEST(SimPorts, AStateHoldsForLaterLives) {
  World world(32);
  ASSERT_TRUE(world.sim.set_port(1, 1, PortState::silent));
  ASSERT_TRUE(world.sim.kill(1));
  ASSERT_TRUE(world.sim.restart(1));
  world.open_house(1);
  const auto passes = [&] { return ServingNodes::good(world.send(world.link, 1)) == 1; };
  for (int i = 0; i < 10; ++i) {
    world.sim.run_for(50ms);
    EXPECT_FALSE(passes()) << "the server's engine uses its first port";
  }
  ASSERT_TRUE(world.sim.set_port(1, 1, PortState::up));
  EXPECT_TRUE(world.sim.run_until([&] { return world.link.ready() && passes(); }, 1s));
  world.expect_clean();
}

TEST(SimPorts, ADeviceHasTwo) {
  World world(33);
  for (const std::uint8_t port : {std::uint8_t{0}, std::uint8_t{3}}) {
    const auto refused = world.sim.set_port(0, port, PortState::down);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().status, Status::invalid_argument);
    EXPECT_NE(refused.error().message().find("port 1 or 2"), std::string::npos);
  }
  EXPECT_FALSE(world.sim.set_port(2, 1, PortState::down));
}

}  // namespace
}  // namespace sim_ports_test
