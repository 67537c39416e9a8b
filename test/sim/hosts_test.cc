// Simulated nodes that share a host: a listener is handed over, and its former owner drains.
#include "sim/serving_nodes.h"

namespace sim_hosts_test {
namespace {

using namespace sim_test;  // NOLINT: a test's helpers

TEST(SimHosts, AListenerIsHandedOverWithThePeersThatWait) {
  ServingNodes world(34, 3);
  const Session old = world.ready(0, 1);
  const auto successor = world.sim.add_beside(1, watchful());
  ASSERT_TRUE(successor) << successor.error().message();
  ASSERT_EQ(*successor, 3u);
  auto socket = world.homes[1].listener.release();
  ASSERT_TRUE(socket) << socket.error().message();
  EXPECT_FALSE(world.homes[1].listener);
  // Nobody accepts for as long.
  const Session next = world.open(2, 1);
  world.sim.run_for(20ms);
  EXPECT_EQ(next.state(), SessionState::opening);
  EXPECT_EQ(world.sim.engine(2).adopt_listener(*socket, {}).error().status,
            Status::invalid_argument)
      << "it is on another host";
  int served = 0;
  ASSERT_TRUE(world.sim.engine(*successor).serve(kEcho, [&served](Request& r) {
    ++served;
    (void)r.reply(r.bytes());
  }));
  auto adopted = world.sim.engine(*successor).adopt_listener(*socket, {});
  ASSERT_TRUE(adopted) << adopted.error().message();
  EXPECT_EQ(adopted->address(), Simulation::address(1));
  ASSERT_TRUE(world.sim.run_until([&] { return next.ready(); }, 100ms));
  EXPECT_EQ(ServingNodes::good(world.call(next, 3)), 3u);
  EXPECT_EQ(served, 3);
  EXPECT_EQ(ServingNodes::good(world.call(old, 2)), 2u);
  EXPECT_EQ(world.homes[1].served, 2);
  // A cut of the host cuts both.
  ASSERT_TRUE(world.sim.cut(0, *successor));
  EXPECT_EQ(world.call(old, 1, 10ms), std::vector{Status::timed_out});
  ASSERT_TRUE(world.sim.cut(1, 2));
  EXPECT_EQ(world.call(next, 1, 10ms), std::vector{Status::timed_out});
  ASSERT_TRUE(world.sim.heal());
  EXPECT_EQ(ServingNodes::good(world.call(old, 1)), 1u);
  EXPECT_EQ(ServingNodes::good(world.call(next, 1)), 1u);
  EXPECT_EQ(world.sim.cut(1, *successor).error().status, Status::invalid_argument);
  EXPECT_EQ(world.sim.add_beside(9, watchful()).error().status, Status::invalid_argument);
  world.expect_clean();
}

/// The client probes the address of a server from which it hears nothing, and finds another engine.
TEST(SimHosts, ACallInProgressOutlivesAPauseAfterTheHandOver) {
  ServingNodes world(35);
  Session s = world.ready(0, 1);
  std::vector<Status> ended;
  CallOptions options;
  options.timeout = 5s;
  const ReplyCallback done = [&ended](Reply& r) { ended.push_back(r.status()); };
  ASSERT_EQ(s.call(kNever, std::span<const std::byte>(), done, options), Status::ok);
  ASSERT_TRUE(world.sim.run_until([&] { return world.homes[1].pending.size() == 1; }, 1s));
  const auto successor = world.sim.add_beside(1, watchful());
  ASSERT_TRUE(successor) << successor.error().message();
  auto socket = world.homes[1].listener.release();
  ASSERT_TRUE(socket) << socket.error().message();
  auto adopted = world.sim.engine(*successor).adopt_listener(*socket, {});
  ASSERT_TRUE(adopted) << adopted.error().message();
  ASSERT_TRUE(world.sim.engine(1).drain(10s));
  ASSERT_TRUE(world.sim.run_until([&] { return s.state() == SessionState::closing; }, 1s));
  ASSERT_TRUE(world.sim.pause(1, 120ms));
  world.sim.run_for(150ms);
  EXPECT_TRUE(ended.empty());
  EXPECT_EQ(world.homes[1].pending[0].reply(std::span<const std::byte>()), Status::ok);
  ASSERT_TRUE(world.sim.run_until([&] { return !ended.empty(); }, 1s));
  EXPECT_EQ(ended, std::vector{Status::ok});
  ASSERT_TRUE(world.sim.run_until([&] { return world.sim.engine(1).drained(); }, 1s));
  world.expect_clean();
}

}  // namespace
}  // namespace sim_hosts_test
