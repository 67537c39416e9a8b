// Connections and engines that come and go leave nothing behind.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <vector>

#include "engine/harness.h"

namespace connection_churn_test {
namespace {

using namespace engine_test;  // the names of a test namespace

bool gone(const Node& n) { return n.engine.stats().connections == 0; }

TEST(EngineReconnect, ManyTimesLeavesNothingBehind) {
  Node server;
  Node client;
  server.listen();
  std::size_t descriptors = 0;
  std::size_t maps = 0;
  Buffer b = client.filled(500, 3);
  for (int i = 0; i < 200; ++i) {
    Ends ends = connect(client, server);
    const std::uint64_t before = server.messages;
    ASSERT_EQ(ends.client.send(b), Status::ok);
    ASSERT_TRUE(until({&client, &server}, [&] { return server.messages == before + 1; }));
    ASSERT_EQ((i % 2 == 0 ? ends.client : ends.server).close(), Status::ok);
    ASSERT_TRUE(until({&client, &server}, [&] { return gone(client) && gone(server); }));
    if (i == 20) {
      descriptors = open_descriptors();
      maps = mappings();
    }
  }
  EXPECT_EQ(open_descriptors(), descriptors);
  EXPECT_LE(mappings(), maps + kHeapMappings);
  EXPECT_EQ(server.engine.stats().accepted, 200u);
  EXPECT_EQ(server.engine.stats().closed, 200u);
  EXPECT_EQ(client.engine.stats().connected, 200u);
  EXPECT_EQ(server.engine.stats().peers_lost, 0u);
  b.reset();
  finish(client, server);
}

Config crowd_config() {
  Config c = small_config();
  c.connections.maximum = 512;  // a quarter of them may be half-open
  c.connections.handshakes = 128;
  c.queues.completion_depth = 8192;
  return c;
}

/// Median ticks of an idle poll without the control step.
std::uint64_t idle_ticks(Node& node) {
  std::vector<std::uint64_t> each(2001);
  const Clock clock = Clock::real();
  for (std::uint64_t& ticks : each) {
    const std::uint64_t before = clock.now();
    (void)node.engine.poll();
    ticks = clock.now() - before;
  }
  std::nth_element(each.begin(), each.begin() + 1000, each.end());
  return each[1000];
}

/// Opens `count` connections to one engine together, uses and closes them, `rounds` times.
void crowd(std::size_t count, int rounds) {
  Config manual = crowd_config();
  manual.engine.control = ControlMode::manual;
  Node server(manual);
  Node client(crowd_config());
  server.listen();
  const std::uint64_t alone = idle_ticks(server);
  std::size_t descriptors = 0;
  std::size_t maps = 0;
  Buffer b = client.filled(700, 9);
  std::vector<std::uint32_t> seen;
  bool good = true;
  server.on_message = [&](Connection c, Message& m) {
    ++seen[c.index()];
    good = good && Node::holds(m.bytes(), 9);
  };
  for (int round = 0; round < rounds; ++round) {
    seen.assign(512, 0);
    client.ready.clear();
    server.ready.clear();
    for (std::size_t i = 0; i < count; ++i) (void)client.begin(server);
    ASSERT_TRUE(until({&client, &server}, [&] {
      return client.ready.size() == count && server.ready.size() == count;
    }));
    EXPECT_GE(server.engine.stats().reserved_receives, count);
    if (round == 0) {
      EXPECT_LE(idle_ticks(server), alone * 3 + 200);
    }
    for (Connection c : client.ready) {
      ASSERT_EQ(client.tally.run([&](CompletionCallback done) { return c.send(b, done); }),
                Status::ok);
    }
    ASSERT_TRUE(until({&client, &server}, [&] { return client.tally.idle(); }));
    for (Connection c : server.ready) ASSERT_EQ(seen[c.index()], 1u);
    for (std::size_t i = 0; i < count; ++i) {
      (void)(i % 2 == 0 ? client.ready : server.ready)[i].close();
      (void)(i % 2 == 1 ? client.ready : server.ready)[i].close();
    }
    ASSERT_TRUE(until({&client, &server}, [&] { return gone(client) && gone(server); }));
    EXPECT_EQ(server.engine.stats().reserved_receives, 0u);
    EXPECT_EQ(server.engine.memory_stats(Pool::send).blocks_used, 0u);
    if (round == 0) {
      descriptors = open_descriptors();
      maps = mappings();
    }
  }
  EXPECT_TRUE(good);
  EXPECT_EQ(open_descriptors(), descriptors);
  EXPECT_LE(mappings(), maps + kHeapMappings);
  EXPECT_EQ(server.engine.stats().peers_lost, 0u);
  EXPECT_EQ(server.closed.size(), count * static_cast<std::size_t>(rounds));
  b.reset();
  finish(client, server);
}

TEST(EngineCrowd, ThirtyConnectionsOpenedAndClosedThreeTimes) { crowd(30, 3); }
TEST(SlowEngineCrowd, HundredConnectionsOpenedAndClosedHundredTimes) { crowd(100, 100); }

TEST(SlowEngineCrowd, ManyEnginesComeAndGoAtOneServer) {
  Config c = crowd_config();
  Node server(c);
  server.listen();
  std::size_t descriptors = 0;
  std::size_t maps = 0;
  for (int round = 0; round < 12; ++round) {
    std::deque<std::optional<Node>> clients(12);
    for (auto& client : clients) {
      client.emplace();
      Ends ends = connect(*client, server);
      const Buffer b = client->filled(5, 1);
      ASSERT_EQ(ends.client.send(b), Status::ok);
    }
    const std::uint64_t wanted = 12u * (static_cast<unsigned>(round) + 1);
    ASSERT_TRUE(until({&server}, [&] { return server.messages == wanted; }));
    clients.clear();
    ASSERT_TRUE(until({&server}, [&] { return gone(server); }));
    // The control step frees peers and lanes of closed engines step by step.
    if (round == 3) {
      for (int i = 0; i < 5000; ++i) (void)server.engine.poll_control();
      descriptors = open_descriptors();
      maps = mappings();
    }
  }
  EXPECT_TRUE(until({&server}, [&] { return open_descriptors() == descriptors; }));
  EXPECT_TRUE(until({&server}, [&] { return mappings() <= maps + kHeapMappings; }));
  server.stale_allowed = true;
  server.expect_clean();
}

}  // namespace
}  // namespace connection_churn_test
