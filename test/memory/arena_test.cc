#include "memory/arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/random.h"
#include "base/shared_memory.h"
#include "memory/arenas.h"

namespace arena_test {

using spinwire::BufferSlice;
using spinwire::base::Random;
using spinwire::memory::PoolStats;

constexpr std::size_t kClassSizes[] = {256,   512,   1024,  2048,   4096,   8192,
                                       16384, 32768, 65536, 131072, 262144, 524288};

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

}  // namespace arena_test
