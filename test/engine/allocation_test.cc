// Memory of the pools: with options, and in the statistics.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/internals.h"
#include "base/owner_guard.h"
#include "engine/engine_core.h"
#include "engine/harness.h"

namespace allocation_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::AllocateOptions;
using spinwire::detail::EngineCore;
using spinwire::memory::PoolId;
using spinwire::memory::RegistrationTable;

AllocateOptions aligned(std::size_t alignment, Pool pool = Pool::send) {
  return {pool, alignment, false};
}
std::uint64_t used(const Node& node, Pool pool) {
  return node.engine.memory_stats(pool).blocks_used;
}

TEST(EngineAllocate, AlignsToEachPowerOfTwoUpToAHugePage) {
  Node node;
  for (std::size_t alignment = 1; alignment <= std::size_t{2} << 20; alignment *= 2) {
    for (const std::size_t size : {std::size_t{1}, std::size_t{64}, std::size_t{5000}}) {
      BufferSlice first = node.engine.allocate(size, aligned(alignment));
      ASSERT_TRUE(first) << alignment;
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first.data()) % alignment, 0u) << alignment;
      EXPECT_EQ(first.size(), size);
      std::memset(first.data(), 1, size);  // the sanitizer knows what belongs to the block
      EXPECT_EQ(used(node, Pool::send), 1u);
    }
  }
  std::vector<BufferSlice> many;
  for (int i = 0; i < 100; ++i) {
    many.push_back(node.engine.allocate(4096, aligned(4096)));
    ASSERT_TRUE(many.back());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(many.back().data()) % 4096, 0u);
    std::memset(many.back().data(), i, 4096);
  }
  for (std::size_t i = 0; i < many.size(); ++i) {
    const auto bytes = many[i].bytes();
    EXPECT_TRUE(std::all_of(bytes.begin(), bytes.end(), [i](std::byte b) {
      return b == static_cast<std::byte>(i);
    })) << "another one lies in the same bytes";
  }
  many.clear();
  node.expect_clean();
}

TEST(EngineAllocate, GivesZeroedMemoryWhenAsked) {
  Node node;
  for (const std::size_t size : {std::size_t{1}, std::size_t{200}, std::size_t{3000000}}) {
    for (const std::size_t alignment : {std::size_t{1}, std::size_t{4096}}) {
      {
        const BufferSlice dirty = node.engine.allocate(size, aligned(alignment, Pool::lease));
        ASSERT_TRUE(dirty);
        std::memset(dirty.data(), 0xa5, size);
      }
      const BufferSlice zeroed = node.engine.allocate(size, {Pool::lease, alignment, true});
      ASSERT_TRUE(zeroed);
      const auto bytes = zeroed.bytes();
      EXPECT_TRUE(
          std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{}; }));
    }
  }
  node.expect_clean();
}

TEST(EngineAllocate, RefusesWhatNoPoolHas) {
  Node node;
  const std::size_t all = ~std::size_t{0};
  struct Case {
    std::size_t size;
    AllocateOptions options;
  };
  const Case wrong[] = {
      {0, {}},
      {8, aligned(0)},
      {8, aligned(48)},
      {8, aligned(std::size_t{4} << 20)},
      {8, aligned(all)},
      {std::size_t{1} << 40, {}},
      {all, {}},
      {all, aligned(4096)},
      {8, aligned(64, Pool::rendezvous)},  // a pool without memory
      {8, aligned(64, Pool::receive)},
  };
  for (const Case& test : wrong) {
    EXPECT_FALSE(node.engine.allocate(test.size, test.options))
        << test.size << ' ' << test.options.alignment;
    EXPECT_EQ(node.engine.allocate_status(), Status::invalid_argument);
    EXPECT_TRUE(node.engine.allocate(8));
  }
  EXPECT_FALSE(node.engine.allocate(8, Pool::receive));
  EXPECT_EQ(node.engine.allocate_status(), Status::invalid_argument);
  std::vector<BufferSlice> all_blocks;
  while (BufferSlice block = node.engine.allocate(1, aligned(std::size_t{1} << 20)))
    all_blocks.push_back(std::move(block));
  EXPECT_EQ(node.engine.allocate_status(), Status::no_buffer);
  EXPECT_FALSE(all_blocks.empty());
  all_blocks.clear();
  node.expect_clean();
}

TEST(EngineAllocate, GivesMemoryForEveryOperation) {
  Pair p;
  std::uint64_t whole = 0;
  p.server.on_message = [&](Connection, Message& m) { whole += Node::holds(m.bytes(), 3) ? 1 : 0; };
  BufferSlice message = p.client.engine.allocate(1000, aligned(4096));
  ASSERT_TRUE(message);
  for (std::size_t i = 0; i < message.size(); ++i) message.data()[i] = Node::pattern(3, i);
  ASSERT_EQ(p.client.tally.run([&](auto done) { return p.ends.client.send(message, done); }),
            Status::ok);
  ASSERT_TRUE(p.until([&] { return p.server.messages == 1 && p.client.tally.idle(); }));
  EXPECT_EQ(whole, 1u);
  BufferSlice target = p.server.engine.allocate(1000, {Pool::lease, 4096, true});
  const auto region = p.server.engine.expose(target, Access::remote_read_write);
  ASSERT_TRUE(region) << region.error().message();
  EXPECT_EQ(region->address % 4096, 0u);
  ASSERT_EQ(
      p.client.tally.run([&](auto done) { return p.ends.client.write(message, *region, done); }),
      Status::ok);
  ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
  EXPECT_TRUE(Node::holds(target.bytes(), 3));
  message = {};
  target = {};
  EXPECT_EQ(p.server.engine.revoke(*region), Status::ok);
  p.finish();
}

TEST(EngineMemoryStats, CountReceives) {
  Pair p;
  const auto before = p.server.engine.memory_stats(Pool::receive);
  EXPECT_EQ(before.pool_bytes, p.server.engine.config().memory.receive_bytes);
  EXPECT_GE(before.blocks_used, p.server.engine.stats().receives);
  EXPECT_GE(before.allocations, before.blocks_used);
  Buffer kept;
  p.server.on_message = [&](Connection, Message& m) { kept = m.take(); };
  {
    const Buffer message = p.client.filled(2000, 1);
    ASSERT_EQ(p.ends.client.send(message), Status::ok);
  }
  ASSERT_TRUE(p.until([&] { return static_cast<bool>(kept); }));
  p.settle();
  EXPECT_EQ(p.server.engine.memory_stats(Pool::receive).blocks_used, before.blocks_used + 1)
      << "the application holds one, and the engine has replaced it";
  kept.reset();
  EXPECT_EQ(p.server.engine.memory_stats(Pool::receive).blocks_used, before.blocks_used);
  p.finish();
}

TEST(EngineAllocate, GivesMoreThanTwoGiBInOnePiece) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "pages are allocated when touched";
  constexpr std::size_t kSize = (std::size_t{2} << 30) + 4096;
  Config config = small_config();
  config.memory.lease_bytes = std::size_t{3} << 30;
  EngineCore core(config, Clock::real(), std::move(*spinwire::base::OwnerGuard::create()));
  const auto opened = core.open({.sparse = true});
  if (!opened && opened.error().status == Status::no_memory) GTEST_SKIP() << "no 3 GiB here";
  ASSERT_TRUE(opened) << opened.error().message();
  auto* const block = core.context.arena->allocate(PoolId::lease, kSize);
  ASSERT_NE(block, nullptr);
  Buffer whole = spinwire::detail::make<Buffer>(block, kSize);
  EXPECT_GE(whole.capacity(), kSize);
  whole.data()[0] = whole.data()[kSize - 1] = std::byte{7};
  const auto exposed = core.context.registrations->expose(
      whole.slice(), Access::remote_read, nullptr, RegistrationTable::kApplication, {});
  ASSERT_TRUE(exposed) << exposed.error().message();
  EXPECT_EQ(exposed->length, kSize);
  EXPECT_EQ(core.context.registrations->revoke(exposed->rkey), Status::ok);
  whole.reset();
  EXPECT_TRUE(core.audit());
}

}  // namespace
}  // namespace allocation_test
