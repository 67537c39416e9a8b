// Peers that are slow, but honest, are not taken for peers that hold something up.
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "engine/harness.h"
#include "sim/serving_nodes.h"

namespace slow_peers_test {
namespace {

using namespace engine_test;  // names of a test namespace of its own
using spinwire::Nanoseconds;
using spinwire::NetworkFaults;
using spinwire::NodeId;
using spinwire::Simulation;

constexpr std::size_t kLong = 1u << 20;

/// Two nodes that are far from each other: each request of a connection takes a while.
struct FarNodes {
  explicit FarNodes(Nanoseconds away) : sim(Simulation::create(3).value()) {
    for (NodeId node = 0; node < 2; ++node) {
      Config c = Simulation::config();
      c.connections.keepalive_interval = 20ms;
      c.connections.peer_timeout = node == 0 ? 800ms : 20s;
      c.connections.rendezvous_timeout = 100ms;
      c.connections.connect_timeout = 5s;
      c.connections.credits = 4;
      c.memory.windows = 64;
      c.memory.rendezvous_bytes = 64u << 20;
      const auto added = sim.add(c);
      EXPECT_TRUE(added) << added.error().message();
    }
    NetworkFaults slow;
    slow.message_delay_min = slow.message_delay_max = away;
    EXPECT_TRUE(sim.set_faults(slow));
    ListenOptions options;
    options.handlers.on_ready = [this](Connection c) { served.push_back(c); };
    options.handlers.on_message = [this](Connection, Message& m) {
      (m.size() == kLong ? long_ones : short_ones) += 1;
    };
    options.handlers.on_closed = [this](Connection, const Error& e) { note(e); };
    auto made = sim.engine(1).listen(Simulation::address(1), options);
    EXPECT_TRUE(made) << made.error().message();
    listener = std::move(*made);
  }
  void note(const Error& e) {
    if (why.empty()) why = e.message();
  }
  Connection connect() {
    ConnectOptions options;
    options.handlers.on_closed = [this](Connection, const Error& e) { note(e); };
    const Connection c = *sim.engine(0).connect(Simulation::address(1), options);
    EXPECT_TRUE(sim.run_until([&] { return c.ready(); }, 5s)) << why;
    return c;
  }
  Buffer filled() {
    Buffer b = sim.engine(0).allocate(kLong);
    EXPECT_TRUE(b);
    return b;
  }

  Simulation sim;
  Listener listener;
  std::vector<Connection> served;
  std::uint32_t long_ones = 0;
  std::uint32_t short_ones = 0;
  std::string why;  ///< of the first connection that ended
};

class SlowPeers : public testing::Test {
 protected:
  void SetUp() override {
    if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "a simulation";
  }
};

// Offers that take long are no stall while there are enough records and windows for all.
TEST_F(SlowPeers, LongMessagesTakeAsLongAsTheyNeed) {
  FarNodes far(750ms);
  constexpr std::uint32_t kCount = 4;
  std::vector<Connection> all;
  for (std::uint32_t i = 0; i < kCount; ++i) all.push_back(far.connect());
  const Buffer message = far.filled();
  const auto start = far.sim.now();
  for (Connection& each : all) ASSERT_EQ(each.send(message), Status::ok);
  ASSERT_TRUE(far.sim.run_until([&] { return far.long_ones == kCount; }, 60s))
      << far.long_ones << " came; " << far.why;
  EXPECT_GT(far.sim.now() - start, 2s) << "more than an offer may take when they are short";
  EXPECT_EQ(far.why, "");
}

// Short messages behind a long one keep their receives, so the receiver grants no credit, which an
// answer to it needs.
TEST_F(SlowPeers, AnAnswerWaitsForALongMessage) {
  FarNodes far(200ms);
  Connection c = far.connect();
  ASSERT_TRUE(far.sim.run_until([&] { return far.served.size() == 1; }, 5s));
  const Buffer message = far.filled();
  ASSERT_EQ(c.send(message), Status::ok);
  std::uint32_t behind = 0;
  std::optional<Status> leased;
  const auto asked =
      far.served[0].request_memory(64, {}, [&](spinwire::LeaseReply& r) { leased = r.status; });
  ASSERT_EQ(asked, Status::ok);
  ASSERT_TRUE(far.sim.run_until(
      [&] {
        while (c.send_copy(std::as_bytes(std::span("?", 1))) == Status::ok) ++behind;
        return leased.has_value() && far.long_ones == 1;
      },
      30s))
      << far.why;
  EXPECT_EQ(*leased, Status::ok);
  ASSERT_TRUE(far.sim.run_until([&] { return far.short_ones == behind; }, 30s));
  EXPECT_EQ(far.why, "");
}

}  // namespace
}  // namespace slow_peers_test
