// Damage to an arena: what its audit finds, and what ends the process.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "base/internals.h"
#include "memory/arenas.h"
#include "spinwire/log.h"

namespace arena_test {

TEST(ArenaTest, AuditFindsDamage) {
  const ArenaPtr arena = make_arena(2);
  Block* a = arena->allocate(PoolId::send, 256);
  Block* b = arena->allocate(PoolId::send, 256);
  Block* c = arena->allocate(PoolId::send, 256);
  Block* run = arena->allocate(PoolId::send, kChunkBytes - 64);
  give_back(b);
  ASSERT_EQ(fault(*arena), "");

  b->refs = 1;
  EXPECT_NE(fault(*arena).find("has 1 references"), std::string::npos) << fault(*arena);
  b->refs = 0;
  const std::uint32_t link = b->link;
  b->link = 0;  // block a, which is in use
  EXPECT_NE(fault(*arena), "");
  b->link = 3;  // between blocks
  EXPECT_NE(fault(*arena).find("free list"), std::string::npos) << fault(*arena);
  b->link = link;
  c->capacity = 512;
  EXPECT_NE(fault(*arena).find("overwritten"), std::string::npos) << fault(*arena);
  c->capacity = 256;
  a->link = 5;
  EXPECT_NE(fault(*arena).find("marked"), std::string::npos) << fault(*arena);
  a->link = c->link;
  run->owner = nullptr;
  EXPECT_NE(fault(*arena).find("overwritten"), std::string::npos) << fault(*arena);
  run->owner = arena.get();
  EXPECT_EQ(fault(*arena), "");
  give_back(a);
  give_back(c);
  give_back(run);
}

TEST(ArenaTest, AuditFindsAListOfAnotherEnd) {
  const ArenaPtr arena = make_arena(1);
  Block* const first = arena->allocate(PoolId::send, 524288, Reuse::oldest);
  Block* const second = arena->allocate(PoolId::send, 524288, Reuse::oldest);
  give_back(first);
  give_back(second);
  ASSERT_EQ(fault(*arena), "");
  // The list now ends at a block that is not the one freed last.
  const std::uint32_t link = first->link;
  first->link = 0xffff;
  EXPECT_NE(fault(*arena).find("ends at unit"), std::string::npos) << fault(*arena);
  first->link = link;
  EXPECT_EQ(fault(*arena), "");
}

void log_to_stderr() {
  spinwire::set_log([](spinwire::LogLevel, std::string_view text) {
    std::fprintf(stderr, "%.*s\n", static_cast<int>(text.size()), text.data());
  });
}

// Each misuse in a child with its own arena, because a fork shares the slab.
TEST(ArenaTest, MisuseTraps) {
  const auto twice = [](std::size_t size) {
    log_to_stderr();
    const ArenaPtr arena = make_arena(2);
    Block* block = arena->allocate(PoolId::send, size);
    block->recycle(block);
    block->recycle(block);
  };
  const auto foreign = [] {
    log_to_stderr();
    const ArenaPtr arena = make_arena(1);
    const ArenaPtr other = make_arena(1);
    Block* block = arena->allocate(PoolId::send, 256);
    block->owner = other.get();
    give_back(block);
  };
  const auto stray_reference = [] {
    log_to_stderr();
    const ArenaPtr arena = make_arena(1);
    Block* block = arena->allocate(PoolId::send, 256);
    give_back(block);
    give_back(block);
    EXPECT_NE(fault(*arena), "");
    block = arena->allocate(PoolId::send, 256);
  };
  const auto late_key = [] {
    log_to_stderr();
    const ArenaPtr arena = make_arena(1);
    const Buffer buffer = spinwire::detail::make<Buffer>(arena->allocate(PoolId::send, 256), 256);
    arena->set_lkey(1);
  };
  EXPECT_DEATH(twice(256), "a block is freed once");
  EXPECT_DEATH(twice(kChunkBytes - 64), "a block is freed once");
  EXPECT_DEATH(foreign(), "goes back to the arena that it came from");
  EXPECT_DEATH(stray_reference(), "a reference to a free block");
  EXPECT_DEATH(late_key(), "would keep the old key");
}

TEST(ArenaTest, FreePayloadsArePoisoned) {
#if !SPINWIRE_ASAN
  GTEST_SKIP() << "needs AddressSanitizer: make asan";
#else
  ArenaPtr arena = make_arena(2);
  const auto poisoned = [](const void* at) { return __asan_address_is_poisoned(at) != 0; };
  EXPECT_TRUE(poisoned(arena->slab().data())) << "nothing is allocated yet";
  for (const std::size_t size : {std::size_t{256}, std::size_t{524288}, kChunkBytes - 64}) {
    Block* block = arena->allocate(PoolId::send, size);
    const std::byte* payload = block->payload;
    EXPECT_EQ(__asan_region_is_poisoned(block, size + 64), nullptr);
    EXPECT_TRUE(size > 524288 || poisoned(payload + size + 64)) << "the next block";
    give_back(block);
    EXPECT_TRUE(poisoned(payload) && poisoned(payload + size - 1));
    EXPECT_DEATH(*const_cast<volatile std::byte*>(payload) = std::byte{1}, "use-after-poison");
  }
  Block* block = arena->allocate(PoolId::send, 256);
  const std::byte* slab = arena->slab().data();
  arena->unpoison_all();
  EXPECT_FALSE(poisoned(slab + kChunkBytes));
  give_back(block);
  EXPECT_TRUE(poisoned(block->payload));
  arena.reset();
  EXPECT_FALSE(poisoned(slab + 64)) << "other memory may come to lie there";
#endif
}

}  // namespace arena_test
