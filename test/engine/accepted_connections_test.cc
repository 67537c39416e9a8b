// What one host, and what half-open connections, may have of an engine's connections.
#include "engine/accepted_connections.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "agent/connecting.h"
#include "base/owner_guard.h"
#include "engine/engine_core.h"
#include "engine/harness.h"
#include "sim/serving_nodes.h"
#include "spinwire/log.h"

namespace accepted_connections_test {
namespace {

using namespace engine_test;  // names of a test namespace of its own
using spinwire::control::Address;
using spinwire::engine::AcceptedConnections;

Address address(const char* text) { return *Address::parse(text); }

class EngineAcceptedConnections : public testing::Test {
 protected:
  static AcceptedConnections make(std::uint32_t maximum, std::uint32_t per_source = 0) {
    Config::Connections limits;
    limits.maximum = maximum;
    limits.maximum_per_source = per_source;
    return AcceptedConnections(limits);
  }
  /// What a listener asks while `used` of 8 records are in use.
  static auto admit(const AcceptedConnections& all, const char* peer, std::uint32_t used,
                    bool is_full = false) {
    return all.admit(address(peer), 8 - used, is_full);
  }
};

TEST_F(EngineAcceptedConnections, AHostHasThreeQuartersAndOthersTheRest) {
  AcceptedConnections all = make(8);
  for (std::uint32_t i = 0; i < 6; ++i) {
    ASSERT_TRUE(admit(all, "10.0.0.1:5", i)) << i;
    all.add(i, address("10.0.0.1:5"));
    all.on_ready(i);
  }
  const auto refused = admit(all, "10.0.0.1:6", 6);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().status, Status::limit);
  const std::string why = refused.error().message();
  EXPECT_NE(why.find("6 of connections.maximum = 8 are of 10.0.0.1:6"), std::string::npos) << why;
  EXPECT_NE(why.find("connections.maximum_per_source"), std::string::npos) << why;
  EXPECT_TRUE(admit(all, "10.0.0.2:5", 6));
  all.remove(3);
  EXPECT_TRUE(admit(all, "10.0.0.1:6", 5));
}

TEST_F(EngineAcceptedConnections, UnreadyOnesAreCountedForEachSource) {
  AcceptedConnections all = make(16);
  const auto unready = [&all](const char* peer) {
    const auto found = all.unready_of(address(peer));
    return std::pair(found.half_open, found.ending);
  };
  using Counts = std::pair<std::uint32_t, std::uint32_t>;
  for (std::uint32_t i = 0; i < 4; ++i) all.add(i, address("10.0.0.1:5"));
  all.add(4, address("10.0.0.2:5"));
  all.add(5, address("127.0.0.1:5"));  // this host has no share
  EXPECT_EQ(unready("10.0.0.1:9"), Counts(4, 0));
  EXPECT_EQ(unready("10.0.0.2:9"), Counts(1, 0));
  EXPECT_EQ(unready("127.0.0.1:9"), Counts(0, 0));
  EXPECT_EQ(unready("10.0.0.3:9"), Counts(0, 0));
  all.on_ready(0);
  all.on_ending(1);
  all.on_ending(0);  // is ready
  EXPECT_EQ(unready("10.0.0.1:9"), Counts(2, 1));
  all.on_giving_way(0);
  all.on_giving_way(2);  // is half-open
  EXPECT_EQ(unready("10.0.0.1:9"), Counts(2, 2));
  EXPECT_EQ(all.half_open(), 4u);
  EXPECT_EQ(all.ending(), 2u);
  for (std::uint32_t i = 0; i < 6; ++i) {
    all.remove(i);
    all.remove(i);  // does nothing more
  }
  EXPECT_EQ(unready("10.0.0.1:9"), Counts(0, 0));
  EXPECT_EQ(all.half_open() + all.ending(), 0u);
  all.add(1, address("10.0.0.1:5"));
  EXPECT_EQ(unready("10.0.0.1:9"), Counts(1, 0));
}

// With a fixed share, the second host would take all that the first one leaves.
TEST_F(EngineAcceptedConnections, TwoHostsLeaveRoomForAThird) {
  constexpr std::uint32_t kMaximum = 64;
  AcceptedConnections all = make(kMaximum);
  std::uint32_t used = 0;
  for (const char* host : {"10.0.0.1:5", "10.0.0.2:5"}) {
    while (used < kMaximum && all.admit(address(host), kMaximum - used, false)) {
      all.add(used, address(host));
      all.on_ready(used++);
    }
  }
  EXPECT_LT(used, kMaximum);
  EXPECT_TRUE(all.admit(address("10.0.0.3:5"), kMaximum - used, false));
}

TEST_F(EngineAcceptedConnections, TheShareIsASettingAndThisHostHasNone) {
  AcceptedConnections all = make(8, 1);
  all.add(0, address("[2001:db8::1]:5"));
  EXPECT_FALSE(admit(all, "[2001:db8::2]:5", 1)) << "one host may have all of a /64";
  for (std::uint32_t i = 1; i < 8; ++i) {
    all.add(i, address("127.0.0.1:5"));
    all.on_ready(i);
    EXPECT_TRUE(admit(all, "[::1]:5", i + 1));
  }
}

TEST_F(EngineAcceptedConnections, HalfOpenOnesHaveAQuarter) {
  AcceptedConnections all = make(8);
  all.add(0, address("127.0.0.1:5"));
  EXPECT_TRUE(admit(all, "127.0.0.1:5", 2)->now);
  all.add(1, address("127.0.0.1:5"));
  EXPECT_FALSE(admit(all, "127.0.0.1:5", 2)->now);
  EXPECT_EQ(admit(all, "127.0.0.1:5", 2)->ending, 0u);
  all.on_ending(0);
  all.on_ending(0);
  EXPECT_EQ(admit(all, "127.0.0.1:5", 2)->ending, 1u);
  EXPECT_FALSE(admit(all, "127.0.0.1:5", 2)->now);
  all.remove(0);
  EXPECT_TRUE(admit(all, "127.0.0.1:5", 2)->now);
  all.on_ready(1);
  all.on_ending(1);  // too late: it is no half-open one
  EXPECT_EQ(all.half_open() + all.ending(), 0u);
}

TEST_F(EngineAcceptedConnections, ASourceWaitsForItsOwnThatAreNotReady) {
  AcceptedConnections all = make(8, 1);
  const auto is = [&](const char* source, std::uint32_t half_open, std::uint32_t ending) {
    const auto found = all.unready_of(address(source));
    return found.half_open == half_open && found.ending == ending;
  };
  all.add(0, address("10.0.0.1:5"));
  all.add(1, address("10.0.0.2:5"));
  EXPECT_TRUE(is("10.0.0.1:6", 1, 0));
  EXPECT_TRUE(is("10.0.0.3:6", 0, 0));
  all.on_ending(0);
  EXPECT_TRUE(is("10.0.0.1:6", 0, 1));
  all.remove(0);
  EXPECT_TRUE(is("10.0.0.1:6", 0, 0));
  all.on_ready(1);
  EXPECT_TRUE(is("10.0.0.2:6", 0, 0));
}

TEST_F(EngineAcceptedConnections, AFullEngineWaitsForHalfOpenOnesOnly) {
  AcceptedConnections all = make(8);
  all.add(0, address("127.0.0.1:5"));
  EXPECT_FALSE(admit(all, "127.0.0.1:5", 8, true)->now);
  all.on_ready(0);
  EXPECT_TRUE(admit(all, "127.0.0.1:5", 8, true)->now) << "to be refused at once";
}

TEST_F(EngineAcceptedConnections, AHostThatConnectsTooOftenIsRefusedAndAnotherIsNot) {
  using namespace sim_test;  // NOLINT: a test's helpers
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "a simulation";
  ServingNodes world(11, 3);
  const std::uint32_t maximum = spinwire::Simulation::config().connections.maximum;
  std::vector<spinwire::Connection> open;
  for (std::uint32_t i = 0; i < maximum - maximum / 4; ++i) open.push_back(world.connect(0, 1));
  ConnectOptions options;
  std::optional<Error> why;
  options.handlers.on_closed = [&](Connection, const Error& e) { why = e; };
  ASSERT_TRUE(world.sim.engine(0).connect(spinwire::Simulation::address(1), options));
  ASSERT_TRUE(world.sim.run_until([&] { return why.has_value(); }, 1s));
  EXPECT_EQ(why->status, Status::limit);
  EXPECT_NE(why->message().find("connections.maximum_per_source"), std::string::npos)
      << why->message();
  EXPECT_TRUE(world.connect(2, 1).ready());
  // What ends makes room for its host.
  EXPECT_EQ(open[0].close(), Status::ok);
  ASSERT_TRUE(world.sim.run_until(
      [&] { return world.sim.engine(1).stats().connections == maximum - maximum / 4; }, 1s));
  EXPECT_TRUE(world.connect(0, 1).ready());
}

TEST_F(EngineAcceptedConnections, AHostWithItsShareLearnsThatTheEngineDrains) {
  using namespace sim_test;  // NOLINT: a test's helpers
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "a simulation";
  Config config = watchful();
  config.connections.maximum_per_source = 1;
  ServingNodes world(12, 2, config);
  ASSERT_TRUE(world.connect(0, 1).ready());
  std::optional<Error> why;
  ConnectOptions options;
  options.handlers.on_closed = [&](Connection, const Error& e) { why = e; };
  const auto ask = [&] {
    why.reset();
    ASSERT_TRUE(world.sim.engine(0).connect(spinwire::Simulation::address(1), options));
    ASSERT_TRUE(world.sim.run_until([&] { return why.has_value(); }, 1s));
  };
  ASSERT_NO_FATAL_FAILURE(ask());
  EXPECT_EQ(why->status, Status::limit) << why->message();
  // A call in progress keeps the connection until the drain is over.
  Session session = world.ready(0, 1);
  ASSERT_EQ(session.call(kNever, std::span<const std::byte>(), [](Reply&) {}), Status::ok);
  ASSERT_TRUE(world.sim.run_until([&] { return !world.homes[1].pending.empty(); }, 1s));
  spinwire::DrainOptions drain;
  drain.retry_after = 70ms;
  ASSERT_TRUE(world.sim.engine(1).drain(1h, drain));
  ASSERT_NO_FATAL_FAILURE(ask());
  EXPECT_EQ(why->status, Status::refused) << why->message();
  EXPECT_EQ(why->goodbye, (spinwire::Goodbye{spinwire::GoodbyeReason::draining, 70ms}));
}

// As for a peer that joins a session, and fails while it does.
TEST_F(EngineAcceptedConnections, OneThatFailedWhileItWasAcceptedCountsUntilItsRecordIsFree) {
  Config config = small_config();
  config.connections.maximum_per_source = 1;
  spinwire::detail::EngineCore core(config, Clock::real(),
                                    std::move(*spinwire::base::OwnerGuard::create()));
  ASSERT_TRUE(core.open());
  const Address peer = address("10.0.0.1:7");
  ASSERT_TRUE(core.connector.admit(peer, nullptr));
  spinwire::agent::Agent* const failed = *spinwire::agent::make(
      core.context, {.peer = "10.0.0.1:7", .attributes = core.context.attributes}, "test");
  core.connector.count(spinwire::agent::subject_of(*failed), peer, true);
  const auto second = core.connector.admit(peer, nullptr);
  ASSERT_TRUE(second) << second.error().message();
  EXPECT_FALSE(second->now);
  EXPECT_TRUE(second->needs_own_source);
  const auto other = core.connector.admit(address("10.0.0.2:7"), nullptr);
  ASSERT_TRUE(other && !other->needs_own_source);
  spinwire::agent::fail(core.context, *failed, {Status::protocol, "test", "a bad endpoint", ""});
  ASSERT_TRUE(until({}, [&] {
    (void)core.poll();
    return core.context.agents.size() == 0;
  }));
  const auto third = core.connector.admit(peer, nullptr);
  EXPECT_TRUE(third && third->now);
  core.end();
}

TEST_F(EngineAcceptedConnections, AnEngineLogsThatFewerConnectionsThanHandshakesMayBeHalfOpen) {
  static std::vector<std::string> lines;
  const auto keep = [](spinwire::LogLevel, std::string_view text) {
    if (text.find("connections.handshakes") != std::string_view::npos) lines.emplace_back(text);
  };
  spinwire::set_log(keep, spinwire::LogLevel::info);
  Config config = small_config();
  config.connections.handshakes = config.connections.maximum / 4;
  { const Node quiet(config); }
  EXPECT_EQ(lines.size(), 0u) << lines.front();
  ++config.connections.handshakes;
  { const Node logged(config); }
  spinwire::set_log({});
  EXPECT_EQ(lines.size(), 1u);
}

}  // namespace
}  // namespace accepted_connections_test
