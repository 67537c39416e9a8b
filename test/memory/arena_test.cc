#include "memory/arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/internals.h"
#include "base/random.h"
#include "base/shared_memory.h"
#include "memory/chunk_map.h"
#include "spinwire/log.h"

namespace arena_test {

using spinwire::Buffer;
using spinwire::BufferSlice;
using spinwire::Status;
using spinwire::base::Random;
using spinwire::detail::Block;
using spinwire::memory::Arena;
using spinwire::memory::ArenaOptions;
using spinwire::memory::ArenaPtr;
using spinwire::memory::ChunkMap;
using spinwire::memory::kChunkBytes;
using spinwire::memory::PoolId;
using spinwire::memory::PoolStats;
using spinwire::memory::Reuse;

constexpr std::size_t kClassSizes[] = {256,   512,   1024,  2048,   4096,   8192,
                                       16384, 32768, 65536, 131072, 262144, 524288};

ArenaPtr make_arena(std::uint64_t send, std::uint64_t receive = 0, std::uint64_t lease = 0,
                    std::uint64_t control = 0) {
  ArenaOptions options;
  options.pool_bytes = {send * kChunkBytes, receive * kChunkBytes, lease * kChunkBytes,
                        control * kChunkBytes};
  options.hugepages = spinwire::HugepagePolicy::off;
  auto arena = Arena::make(options);
  EXPECT_TRUE(arena.has_value()) << arena.error().message();
  return arena ? std::move(*arena) : nullptr;
}

std::string fault(const Arena& arena) {
  const auto result = arena.audit();
  return result ? "" : result.error().message();
}

void give_back(Block* block) { spinwire::detail::release(block); }

/// Takes blocks of `size` until the pool is empty.
std::vector<Block*> drain(Arena& arena, PoolId pool, std::size_t size,
                          Reuse order = Reuse::newest) {
  std::vector<Block*> blocks;
  while (Block* block = arena.allocate(pool, size, order)) blocks.push_back(block);
  return blocks;
}

void release_all(std::vector<Block*>& blocks) {
  for (Block* block : blocks) give_back(block);
  blocks.clear();
}

TEST(ArenaTest, BlockIsRightBeforeItsAlignedPayloadAndHasRoom) {
  const ArenaPtr arena = make_arena(16);
  arena->set_lkey(77);
  for (const std::size_t size :
       {1u, 255u, 256u, 257u, 511u, 512u, 513u, 4096u, 4097u, 524287u, 524288u}) {
    Block* block = arena->allocate(PoolId::send, size);
    ASSERT_NE(block, nullptr) << size;
    EXPECT_EQ(block->payload, reinterpret_cast<std::byte*>(block) + 64);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block->payload) % 64, 0u);
    EXPECT_EQ(block->capacity,
              *std::lower_bound(std::begin(kClassSizes), std::end(kClassSizes), size));
    EXPECT_EQ(block->refs, 1u);
    EXPECT_EQ(block->lkey, 77u);
    EXPECT_EQ(block->header_in_use, 0);
    block->header_in_use = 3;
    std::memset(block->header, 0xee, sizeof block->header);
    std::memset(block->payload, 0xee, block->capacity);
    EXPECT_EQ(fault(*arena), "");
    give_back(block);
    block = arena->allocate(PoolId::send, size);
    EXPECT_EQ(block->header_in_use, 0);
    give_back(block);
  }
  EXPECT_EQ(fault(*arena), "");
}

TEST(ArenaTest, LongRequestsTakeAdjacentChunks) {
  const ArenaPtr arena = make_arena(8);
  for (const std::size_t chunks : {1u, 2u, 3u, 8u}) {
    for (const std::size_t size :
         {chunks * kChunkBytes - 64, (chunks - 1) * kChunkBytes + kChunkBytes / 2}) {
      Block* block = arena->allocate(PoolId::send, size);
      ASSERT_NE(block, nullptr) << size;
      EXPECT_EQ(block->capacity, chunks * kChunkBytes - 64);
      EXPECT_EQ(block->payload, reinterpret_cast<std::byte*>(block) + 64);
      EXPECT_EQ(arena->stats(PoolId::send).free_chunks, 8 - chunks);
      std::memset(block->payload, 0xee, block->capacity);
      EXPECT_EQ(fault(*arena), "");
      give_back(block);
      EXPECT_EQ(arena->stats(PoolId::send).free_chunks, 8u);
    }
  }
  // One byte more than n chunks hold needs n + 1.
  Block* block = arena->allocate(PoolId::send, kChunkBytes - 63);
  ASSERT_NE(block, nullptr);
  EXPECT_EQ(block->capacity, 2 * kChunkBytes - 64);
  give_back(block);
}

TEST(ArenaTest, TellsDryFromUnservable) {
  const ArenaPtr arena = make_arena(2);
  EXPECT_FALSE(arena->fits(PoolId::send, 0));
  EXPECT_TRUE(arena->fits(PoolId::send, 1));
  EXPECT_TRUE(arena->fits(PoolId::send, 2 * kChunkBytes - 64));
  EXPECT_FALSE(arena->fits(PoolId::send, 2 * kChunkBytes - 63));
  EXPECT_FALSE(arena->fits(PoolId::send, ~std::size_t{0}));
  EXPECT_FALSE(arena->fits(PoolId::lease, 1)) << "that pool has no chunks";

  EXPECT_EQ(arena->allocate(PoolId::send, 0), nullptr);
  EXPECT_EQ(arena->allocate(PoolId::send, 2 * kChunkBytes - 63), nullptr);
  EXPECT_EQ(arena->allocate(PoolId::send, ~std::size_t{0}), nullptr);
  EXPECT_EQ(arena->allocate(PoolId::lease, 1), nullptr);
  EXPECT_EQ(arena->allocate(PoolId::lease, kChunkBytes), nullptr);
  EXPECT_EQ(arena->stats(PoolId::send).refusals, 0u) << "those were no shortage";
  EXPECT_EQ(arena->stats(PoolId::lease).refusals, 0u);

  auto blocks = drain(*arena, PoolId::send, 4096);
  EXPECT_EQ(arena->stats(PoolId::send).refusals, 1u);
  EXPECT_EQ(arena->allocate(PoolId::send, kChunkBytes), nullptr);
  EXPECT_EQ(arena->stats(PoolId::send).refusals, 2u);
  release_all(blocks);
}

TEST(ArenaTest, DryPoolLeavesTheOthersAlone) {
  const ArenaPtr arena = make_arena(2, 1, 3, 1);
  std::vector<Block*> held[4];
  const PoolId pools[] = {PoolId::send, PoolId::receive, PoolId::lease, PoolId::control};
  const std::size_t per_chunk = kChunkBytes / (4096 + 64);
  for (std::size_t i = 0; i < 4; ++i) {
    const std::size_t chunks = arena->stats(pools[i]).chunks;
    held[i] = drain(*arena, pools[i], 4096);
    EXPECT_EQ(held[i].size(), chunks * per_chunk);
    EXPECT_EQ(arena->stats(pools[i]).blocks_used, held[i].size());
  }
  // A block returns to its own pool.
  give_back(held[1].back());
  held[1].pop_back();
  EXPECT_EQ(arena->allocate(PoolId::send, 1), nullptr);
  Block* block = arena->allocate(PoolId::receive, 4096);
  EXPECT_NE(block, nullptr);
  give_back(block);
  EXPECT_EQ(fault(*arena), "");
  for (auto& blocks : held) release_all(blocks);
  EXPECT_EQ(fault(*arena), "");
}

TEST(ArenaTest, PoolsLieApartInTheSlab) {
  const ArenaPtr arena = make_arena(2, 2);
  auto sends = drain(*arena, PoolId::send, 1000);
  auto receives = drain(*arena, PoolId::receive, 1000);
  const std::byte* border = arena->slab().data() + 2 * kChunkBytes;
  EXPECT_EQ(arena->slab().size(), 4 * kChunkBytes);
  for (const Block* b : sends) EXPECT_LE(b->payload + b->capacity, border);
  for (const Block* b : receives) EXPECT_GE(reinterpret_cast<const std::byte*>(b), border);
  release_all(sends);
  release_all(receives);
}

TEST(ArenaTest, EveryClassFillsTheWholePoolWithoutOverlap) {
  const ArenaPtr arena = make_arena(3);
  // All classes in turn in one arena: a pool without used blocks serves any size.
  for (int round = 0; round < 2; ++round) {
    for (const std::size_t size : kClassSizes) {
      auto blocks = drain(*arena, PoolId::send, size);
      EXPECT_EQ(blocks.size(), 3 * (kChunkBytes / (size + 64))) << size;
      EXPECT_EQ(fault(*arena), "") << size;
      std::vector<Block*> sorted = blocks;
      std::sort(sorted.begin(), sorted.end());
      for (std::size_t i = 1; i < sorted.size(); ++i) {
        ASSERT_GE(reinterpret_cast<std::byte*>(sorted[i]), sorted[i - 1]->payload + size);
      }
      release_all(blocks);
      EXPECT_EQ(fault(*arena), "") << size;
    }
    Block* all = arena->allocate(PoolId::send, 3 * kChunkBytes - 64);
    ASSERT_NE(all, nullptr) << "the empty chunks that classes kept have to come back";
    give_back(all);
  }
}

TEST(ArenaTest, ClassKeepsOneEmptyChunkUntilAnotherNeedsIt) {
  const ArenaPtr arena = make_arena(2);
  for (int i = 0; i < 10; ++i) {
    Block* block = arena->allocate(PoolId::send, 256);
    EXPECT_EQ(arena->stats(PoolId::send).free_chunks, 1u);
    give_back(block);
    EXPECT_EQ(arena->stats(PoolId::send).free_chunks, 1u) << "no thrashing";
  }
  // A class keeps one empty chunk, not two.
  auto blocks = drain(*arena, PoolId::send, 256);
  release_all(blocks);
  EXPECT_EQ(arena->stats(PoolId::send).free_chunks, 1u);
  // Each class gets a chunk although another class keeps an empty one.
  for (const std::size_t size : kClassSizes) {
    Block* first = arena->allocate(PoolId::send, size);
    ASSERT_NE(first, nullptr) << size;
    give_back(first);
    EXPECT_EQ(fault(*arena), "");
  }
}

TEST(ArenaTest, RunsAndSingleChunksDoNotBreakEachOtherUp) {
  const ArenaPtr arena = make_arena(8);
  std::vector<Block*> held;
  for (int i = 0; i < 4; ++i) {
    Block* run = arena->allocate(PoolId::send, kChunkBytes);  // two chunks
    Block* single = arena->allocate(PoolId::send, kClassSizes[4 + i]);
    ASSERT_TRUE(run != nullptr && single != nullptr);
    give_back(run);
    held.push_back(single);
  }
  // Four classes have a chunk each; the rest must be contiguous.
  Block* run = arena->allocate(PoolId::send, 4 * kChunkBytes - 64);
  EXPECT_NE(run, nullptr);
  EXPECT_EQ(fault(*arena), "");
  if (run != nullptr) give_back(run);
  release_all(held);
}

TEST(ArenaTest, RunIsRefusedWhileNoChunksAreAdjacent) {
  const ArenaPtr arena = make_arena(5);
  std::vector<Block*> singles = drain(*arena, PoolId::send, kChunkBytes - 64);
  ASSERT_EQ(singles.size(), 5u);
  std::sort(singles.begin(), singles.end());
  for (const std::size_t i : {0u, 2u, 4u}) give_back(singles[i]);
  EXPECT_EQ(arena->allocate(PoolId::send, 2 * kChunkBytes - 64), nullptr);
  give_back(singles[3]);
  Block* run = arena->allocate(PoolId::send, 3 * kChunkBytes - 64);
  ASSERT_NE(run, nullptr);
  EXPECT_EQ(run, singles[2]);
  give_back(run);
  give_back(singles[1]);
  EXPECT_EQ(fault(*arena), "");
}

/// A model of an arena with one pool: which chunks hold used blocks.
struct Model {
  struct Use {
    std::size_t capacity;
    std::size_t blocks;
  };

  explicit Model(const Arena& a, std::size_t count) : arena(a), chunks(count) {}

  [[nodiscard]] std::size_t chunk_of(const Block* block) const {
    return static_cast<std::size_t>(reinterpret_cast<const std::byte*>(block) -
                                    arena.slab().data()) /
           kChunkBytes;
  }
  [[nodiscard]] bool can_serve(std::size_t size) const {
    if (size <= 524288) {
      const std::size_t capacity =
          *std::lower_bound(std::begin(kClassSizes), std::end(kClassSizes), size);
      return std::any_of(chunks.begin(), chunks.end(), [&](const Use& use) {
        return use.blocks == 0 ||
               (use.capacity == capacity && use.blocks < kChunkBytes / (capacity + 64));
      });
    }
    const std::size_t length = (size + 64 + kChunkBytes - 1) / kChunkBytes;
    std::size_t run = 0;
    for (const Use& use : chunks) {
      run = use.blocks == 0 ? run + 1 : 0;
      if (run == length) return true;
    }
    return false;
  }
  void change(const Block* block, bool added) {
    const std::size_t capacity = block->capacity;
    const std::size_t first = chunk_of(block);
    const std::size_t length = (capacity + 64 + kChunkBytes - 1) / kChunkBytes;
    for (std::size_t i = first; i < first + length; ++i) {
      if (added) {
        chunks[i] = {capacity, chunks[i].blocks + 1};
      } else {
        --chunks[i].blocks;
      }
    }
  }

  const Arena& arena;
  std::vector<Use> chunks;
};

/// Marks both ends of a block, so that overlaps are detected.
void mark(Block* block, std::uint64_t value) {
  std::memcpy(block->payload, &value, sizeof value);
  std::memcpy(block->payload + block->capacity - sizeof value, &value, sizeof value);
}
bool marked(const Block* block, std::uint64_t value) {
  return std::memcmp(block->payload, &value, sizeof value) == 0 &&
         std::memcmp(block->payload + block->capacity - sizeof value, &value, sizeof value) == 0;
}

std::size_t random_size(Random& random) {
  switch (random.below(8)) {
    case 0:
      return 1 + random.below(5 * kChunkBytes);
    case 1:
    case 2:
      return 1 + random.below(524288);
    case 3:
      return kClassSizes[random.below(12)] + random.below(2);
    default:
      return std::size_t{1} << random.below(20);
  }
}

void run_against_model(std::uint64_t seed, int steps) {
  SCOPED_TRACE(seed);
  const std::size_t count = 12;
  const ArenaPtr arena = make_arena(count);
  Model model(*arena, count);
  Random random(seed);
  std::vector<std::pair<Block*, std::uint64_t>> held;
  std::uint64_t refusals = 0;
  bool growing = true;
  for (int step = 0; step < steps; ++step) {
    if (random.chance(2000)) growing = !growing;
    if (held.empty() || random.below(100) < (growing ? 60 : 40)) {
      const std::size_t size = random_size(random);
      const Reuse order = random.chance(3) ? Reuse::oldest : Reuse::newest;
      Block* block = arena->allocate(PoolId::send, size, order);
      ASSERT_EQ(block != nullptr, model.can_serve(size)) << "size " << size << " step " << step;
      if (block == nullptr) {
        ++refusals;
      } else {
        ASSERT_GE(block->capacity, size);
        model.change(block, true);
        held.emplace_back(block, random.next());
        mark(block, held.back().second);
      }
    } else {
      const std::size_t i = random.below(held.size());
      ASSERT_TRUE(marked(held[i].first, held[i].second)) << "blocks overlap, step " << step;
      model.change(held[i].first, false);
      give_back(held[i].first);
      held[i] = held.back();
      held.pop_back();
    }
    if (step % 997 == 0) {
      ASSERT_EQ(fault(*arena), "") << "step " << step;
    }
  }
  EXPECT_EQ(arena->stats(PoolId::send).blocks_used, held.size());
  EXPECT_EQ(arena->stats(PoolId::send).refusals, refusals);
  EXPECT_GT(refusals, 0u) << "the load never ran the pool dry";
  for (auto& [block, value] : held) give_back(block);
  EXPECT_EQ(fault(*arena), "");
}

TEST(ArenaTest, RandomLoadDoesWhatTheModelSays) {
  for (const std::uint64_t seed : {1u, 2u, 3u}) run_against_model(seed, 20000);
}

TEST(SlowArenaTest, RandomLoadDoesWhatTheModelSays) {
  for (std::uint64_t seed = 10; seed < 40; ++seed) run_against_model(seed, 200000);
}

TEST(ArenaTest, FreshChunksAreCutLazily) {
  const ArenaPtr arena = make_arena(1);
  Block* first = arena->allocate(PoolId::send, 256);
  Block* second = arena->allocate(PoolId::send, 256);
  EXPECT_EQ(reinterpret_cast<std::byte*>(second), first->payload + 256);
  // The following block is untouched: no loop has written to the whole chunk.
  arena->unpoison_all();
  const std::byte* next = second->payload + 256;
  EXPECT_TRUE(std::all_of(next, next + 4096, [](std::byte b) { return b == std::byte{0}; }));
  give_back(second);
  EXPECT_EQ(arena->allocate(PoolId::send, 256), second) << "the block used last is warm";
  give_back(second);
  give_back(first);
}

TEST(ArenaTest, LongBlocksRestAsLongAsPossible) {
  constexpr std::size_t kSize = spinwire::memory::kLeastResting;
  constexpr std::size_t kInChunk = kChunkBytes / (kSize + 64);
  const ArenaPtr arena = make_arena(2);
  // One block at a time goes round in the whole chunk.
  std::vector<Block*> order;
  for (std::size_t i = 0; i < 3 * kInChunk; ++i) {
    Block* const block = arena->allocate(PoolId::send, kSize, Reuse::oldest);
    ASSERT_NE(block, nullptr);
    EXPECT_EQ(std::find(order.begin(), order.end(), block) == order.end(), i < kInChunk) << i;
    if (i >= kInChunk) {
      EXPECT_EQ(block, order[i % kInChunk]) << i;
    }
    order.push_back(block);
    give_back(block);
    ASSERT_EQ(fault(*arena), "") << i;
  }
  EXPECT_EQ(arena->stats(PoolId::send).free_chunks, 1u);
  // Several are used again in the order in which they were freed, also out of a full chunk.
  auto held = drain(*arena, PoolId::send, kSize, Reuse::oldest);
  ASSERT_EQ(held.size(), 2 * kInChunk);
  std::vector<Block*> freed;
  for (const std::size_t i : {5u, 1u, 9u, 0u}) {
    freed.push_back(held[i]);
    give_back(held[i]);
    held[i] = nullptr;
    ASSERT_EQ(fault(*arena), "");
  }
  for (Block* const expected : freed)
    EXPECT_EQ(arena->allocate(PoolId::send, kSize, Reuse::oldest), expected);
  EXPECT_EQ(arena->allocate(PoolId::send, kSize, Reuse::oldest), nullptr);
  for (Block* const block : freed) give_back(block);
  for (Block* const block : held) {
    if (block != nullptr) give_back(block);
  }
  EXPECT_EQ(fault(*arena), "");
}

TEST(ArenaTest, ShortBlocksAndWholeChunksDoNotRest) {
  const ArenaPtr arena = make_arena(3);
  for (const std::size_t size : {spinwire::memory::kLeastResting / 2, kChunkBytes - 64}) {
    Block* const first = arena->allocate(PoolId::send, size, Reuse::oldest);
    give_back(first);
    Block* const second = arena->allocate(PoolId::send, size, Reuse::oldest);
    EXPECT_EQ(second, first);
    give_back(second);
  }
}

TEST(ArenaTest, BothOrdersHaveChunksOfTheirOwnUntilThePoolIsExhausted) {
  constexpr std::size_t kSize = 65536;
  const ArenaPtr arena = make_arena(2);
  Block* const resting = arena->allocate(PoolId::send, kSize, Reuse::oldest);
  Block* const warm = arena->allocate(PoolId::send, kSize);
  EXPECT_EQ(arena->stats(PoolId::send).free_chunks, 0u);
  give_back(resting);
  give_back(warm);
  Block* const again = arena->allocate(PoolId::send, kSize);
  EXPECT_EQ(again, warm);
  give_back(again);
  Block* const other = arena->allocate(PoolId::send, kSize, Reuse::oldest);
  EXPECT_NE(other, resting);
  // A request of either order gets the last block, in whichever chunk it is.
  for (const Reuse order : {Reuse::newest, Reuse::oldest}) {
    auto all = drain(*arena, PoolId::send, kSize, order);
    EXPECT_EQ(all.size() + 1, 2 * (kChunkBytes / (kSize + 64)));
    EXPECT_EQ(fault(*arena), "");
    release_all(all);
  }
  give_back(other);
  EXPECT_EQ(fault(*arena), "");
}

TEST(ArenaTest, BuffersOutliveTheArenasOwner) {
  ArenaPtr arena = make_arena(2);
  const std::byte* slab = arena->slab().data();
  Buffer buffer = spinwire::detail::make<Buffer>(arena->allocate(PoolId::send, 100), 100);
  Buffer large =
      spinwire::detail::make<Buffer>(arena->allocate(PoolId::send, kChunkBytes - 64), 10);
  BufferSlice slice = buffer.slice(10, 20);
  arena.reset();
  ASSERT_TRUE(spinwire::base::find_shared_memory(slab, 1).has_value());
  std::memset(buffer.data(), 1, buffer.capacity());
  std::memset(large.data(), 1, large.capacity());
  buffer.reset();
  large.reset();
  EXPECT_EQ(std::to_integer<int>(slice.data()[0]), 1);
  EXPECT_TRUE(spinwire::base::find_shared_memory(slab, 1).has_value());
  slice = {};
  EXPECT_FALSE(spinwire::base::find_shared_memory(slab, 1).has_value())
      << "the last reference takes the arena along";
}

TEST(ArenaTest, ABufferConvertsToASliceOfItsBytes) {
  const ArenaPtr arena = make_arena(1);
  Buffer buffer = spinwire::detail::make<Buffer>(arena->allocate(PoolId::send, 100), 60);
  BufferSlice slice = buffer;
  EXPECT_EQ(slice.data(), buffer.data());
  EXPECT_EQ(slice.size(), 60u);
  EXPECT_FALSE(buffer.unique()) << "the slice holds a reference";
  slice = Buffer();
  EXPECT_FALSE(slice);
  EXPECT_TRUE(buffer.unique());
}

TEST(ArenaTest, UnusedArenaGoesWithItsOwner) {
  ArenaPtr arena = make_arena(1);
  const std::byte* slab = arena->slab().data();
  give_back(arena->allocate(PoolId::send, 1));
  arena.reset();
  EXPECT_FALSE(spinwire::base::find_shared_memory(slab, 1).has_value());
}

TEST(ArenaTest, RefusesImpossibleSizes) {
  ArenaOptions options;
  auto none = Arena::make(options);
  ASSERT_FALSE(none.has_value());
  EXPECT_EQ(none.error().status, Status::invalid_argument);
  options.pool_bytes = {~std::uint64_t{0}, ~std::uint64_t{0}, ~std::uint64_t{0}, 1};
  auto vast = Arena::make(options);
  ASSERT_FALSE(vast.has_value());
  EXPECT_EQ(vast.error().status, Status::invalid_argument);
}

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

TEST(ChunkMapTest, FindsWhatAModelFinds) {
  for (const std::uint32_t count : {1u, 63u, 64u, 65u, 300u, 5000u}) {
    ChunkMap map(count);
    std::vector<bool> model(count, true);
    EXPECT_EQ(map.free(), count);
    Random random(count);
    for (int step = 0; step < 2000; ++step) {
      const auto first = static_cast<std::uint32_t>(random.below(count));
      const auto length = static_cast<std::uint32_t>(1 + random.below(count - first));
      const bool to = random.below(2) == 0;
      for (std::uint32_t i = first; i < first + (length + 7) / 8; ++i) {
        to ? map.set(i) : map.clear(i);
        model[i] = to;
      }
      const auto one = std::find(model.begin(), model.end(), true);
      ASSERT_EQ(map.find_one(), one == model.end()
                                    ? ChunkMap::kNone
                                    : static_cast<std::uint32_t>(one - model.begin()));
      ASSERT_EQ(map.free(),
                static_cast<std::uint32_t>(std::count(model.begin(), model.end(), true)));
      const auto wanted = static_cast<std::uint32_t>(1 + random.below(100));
      std::uint32_t run = 0;
      std::uint32_t found = ChunkMap::kNone;
      for (std::uint32_t i = count; i-- > 0;) {
        run = model[i] ? run + 1 : 0;
        if (run == wanted) {
          found = i;
          break;
        }
      }
      ASSERT_EQ(map.find_run(wanted), found) << "run of " << wanted;
    }
  }
  EXPECT_EQ(ChunkMap(0).find_one(), ChunkMap::kNone);
  EXPECT_EQ(ChunkMap(10).find_run(0), ChunkMap::kNone);
}

}  // namespace arena_test
