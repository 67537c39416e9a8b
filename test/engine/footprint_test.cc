// footprint() against what opened engines report and accept.
#include "spinwire/footprint.h"

#include <gtest/gtest.h>

#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <set>
#include <string>

#include "engine/harness.h"

namespace footprint_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::Footprint;
using spinwire::Pool;

constexpr std::uint64_t kChunk = 2u << 20;

Config odd_config() {
  Config c = small_config();
  c.memory.send_bytes = 5u << 20;
  c.memory.rendezvous_bytes = 9u << 20;
  c.memory.windows = 16;
  c.connections.max_message_bytes = 3u << 20;
  c.queues.operations = 30000;
  c.queues.completion_depth = 32'767;  // the most that Soft-RoCE has
  c.rpc.send_depth = 4096;
  return c;
}

/// Bytes of each mapping of an engine's pools.
std::multiset<std::uint64_t> slabs() {
  std::multiset<std::uint64_t> sizes;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    if (line.find("spinwire-slab") != std::string::npos &&
        std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64, &begin, &end) == 2)  // NOLINT
      sizes.insert(end - begin);
  }
  return sizes;
}

/// Whether remote calls are possible with these settings.
bool serves(const Config& config) {
  auto engine = Engine::open(config);
  EXPECT_TRUE(engine) << engine.error().message();
  if (!engine) return false;
  return engine->serve(1, [](spinwire::Request& request) { (void)request.reply(request.bytes()); })
      .has_value();
}

TEST(EngineFootprint, HasThePoolsOfAnOpenedEngine) {
  for (const Config& config : {small_config(), odd_config()}) {
    const Footprint sizes = spinwire::footprint(config);
    const std::size_t before = slabs().count(sizes.pool_bytes);
    Node node(config);
    EXPECT_EQ(node.engine.memory_stats(Pool::send).pool_bytes, sizes.send_bytes);
    EXPECT_EQ(node.engine.memory_stats(Pool::receive).pool_bytes, sizes.receive_bytes);
    EXPECT_EQ(node.engine.memory_stats(Pool::lease).pool_bytes, sizes.lease_bytes);
    EXPECT_EQ(node.engine.memory_stats(Pool::rendezvous).pool_bytes, sizes.rendezvous_bytes);
    EXPECT_EQ(slabs().count(sizes.pool_bytes), before + 1) << "the control pool, too";
    EXPECT_EQ(sizes.pool_bytes, sizes.send_bytes + sizes.receive_bytes + sizes.lease_bytes +
                                    sizes.rendezvous_bytes + sizes.control_bytes);
    EXPECT_EQ(sizes.pool_bytes % kChunk, 0u);
  }
}

TEST(EngineFootprint, HasTheReceivesOfAnOpenedEngine) {
  Config config = without_direct_messages();  // they take blocks of their own
  config.connections.own_domains = 2;
  config.connections.credits = 32;
  config.memory.receive_bytes = 8u << 20;
  const Footprint sizes = spinwire::footprint(config);
  Node node(config);
  if (!node.engine.device().shared_receives) GTEST_SKIP() << "the connections share no queue";
  EXPECT_EQ(node.engine.memory_stats(Pool::receive).blocks_used, sizes.receive_entries);
  EXPECT_EQ(sizes.connections_with_all_credits, (256u - 16 - 8) / 32);
}

TEST(EngineFootprint, CountsConnectionsThatHaveTheirOwnReceives) {
  Config config = small_config();
  config.queues.shared_receive_queue = SharedReceiveQueue::off;
  config.queues.receive_depth = 64;
  config.connections.maximum = 100;
  const Footprint sizes = spinwire::footprint(config);
  Node node(config);
  EXPECT_EQ(sizes.connections * node.engine.device().own_receives, 64u);
  EXPECT_EQ(sizes.connections_with_all_credits, 0u) << "each has fewer than connections.credits";
}

TEST(EngineFootprint, NamesTheLeastCompletionQueue) {
  Config config = small_config();
  config.queues.completion_depth =
      static_cast<std::uint32_t>(spinwire::footprint(config).completion_entries);
  EXPECT_TRUE(config.check());
  --config.queues.completion_depth;
  EXPECT_FALSE(config.check());

  config.queues.completion_depth =
      static_cast<std::uint32_t>(spinwire::footprint(config).completion_entries_with_calls);
  config.memory.receive_bytes = 8u << 20;
  EXPECT_TRUE(serves(config));
  --config.queues.completion_depth;
  const bool uses_datagrams = Node(config).engine.device().datagrams;
  EXPECT_EQ(serves(config), !uses_datagrams);
}

TEST(EngineFootprint, NamesTheLeastPools) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "the completion queue is a long one";
  Config config = odd_config();
  config.queues.receive_depth = 1024;
  config.queues.completion_depth = 1u << 17;
  config.memory.rendezvous_bytes = spinwire::footprint(config).longest_message_bytes;
  config.memory.receive_bytes = spinwire::footprint(config).receive_bytes_needed;
  EXPECT_TRUE(config.check());
  EXPECT_EQ(spinwire::footprint(config).longest_messages, 1u);
  --config.memory.rendezvous_bytes;
  EXPECT_FALSE(config.check());
  ++config.memory.rendezvous_bytes;
  --config.memory.receive_bytes;
  EXPECT_FALSE(config.check());
  config.memory.receive_bytes = spinwire::footprint(config).receive_bytes_needed_with_calls;
  EXPECT_TRUE(serves(config));
}

}  // namespace
}  // namespace footprint_test
