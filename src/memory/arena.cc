#include "memory/arena.h"

#include <fmt/core.h>

#include <utility>

#include "base/error.h"
#include "base/units.h"
#include "memory/hugepages.h"

namespace spinwire::memory {
namespace {

constexpr std::uint64_t kMaxChunks = std::uint64_t{1} << 24;

/// The class of the same blocks that are used again in the other order; the class itself if there
/// is none.
constexpr std::size_t other_order_of(std::size_t size_class) noexcept {
  constexpr std::size_t kApart = kSizeCount - kFirstResting;
  if (size_class >= kSizeCount) return size_class - kApart;
  return size_class >= kFirstResting ? size_class + kApart : size_class;
}

constexpr std::uint32_t chunks_for(std::size_t size) noexcept {
  return static_cast<std::uint32_t>((size + kHeadroom + kChunkBytes - 1) / kChunkBytes);
}

}  // namespace

Result<ArenaPtr> Arena::make(const ArenaOptions& options) {
  return base::no_throw("make an arena", [&]() -> Result<ArenaPtr> {
    std::array<std::uint32_t, kPoolCount> chunks{};
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < kPoolCount; ++i) {
      const std::uint64_t bytes = options.pool_bytes[i];
      const std::uint64_t count = bytes / kChunkBytes + (bytes % kChunkBytes != 0 ? 1 : 0);
      chunks[i] = static_cast<std::uint32_t>(count <= kMaxChunks ? count : kMaxChunks);
      total += count;
    }
    if (total == 0 || total > kMaxChunks) {
      return base::fail(
          Status::invalid_argument, "make an arena",
          base::format("its pools have {} chunks of {}", total, base::bytes_text(kChunkBytes)),
          base::format("give the pools 1 to {} chunks together", kMaxChunks));
    }
    Result<base::SharedMemory> memory =
        options.populate
            ? map_pages(total * kChunkBytes, options.hugepages, options.lock, options.name)
            : base::SharedMemory::create(total * kChunkBytes, {.name = options.name,
                                                               .page_size = 0,
                                                               .populate = false,
                                                               .kernel_populates = true});
    if (!memory) return tl::unexpected(std::move(memory.error()));
    ArenaPtr arena(new Arena(std::move(*memory)));
    arena->set_up(chunks);
    return arena;
  });
}

Arena::Arena(base::SharedMemory memory) noexcept
    : base_(memory.data()), memory_(std::move(memory)) {}

// Memory mapped later at these addresses must not be poisoned.
Arena::~Arena() { unpoison_all(); }

void Arena::set_up(const std::array<std::uint32_t, kPoolCount>& chunks) {
  for (const std::uint32_t count : chunks) chunk_count_ += count;
  chunks_ = std::make_unique<Chunk[]>(chunk_count_);
  std::uint32_t first = 0;
  for (std::size_t i = 0; i < kPoolCount; ++i) {
    Pool& pool = pools_[i];
    pool.first = first;
    pool.map = ChunkMap(chunks[i]);
    for (std::uint32_t k = 0; k < chunks[i]; ++k) {
      chunks_[first + k].pool = static_cast<std::uint8_t>(i);
    }
    first += chunks[i];
  }
  // Hugepages larger than a chunk may map more bytes than the chunks use.
  slab_bytes_ = chunk_count_ * kChunkBytes;
  poison(base_, slab_bytes_);
}

void ArenaDeleter::operator()(Arena* arena) const noexcept {
  if (--arena->live_ == 0) delete arena;
}

PoolStats Arena::stats(PoolId pool) const noexcept {
  const Pool& p = pools_[static_cast<std::size_t>(pool)];
  return {p.map.size(), p.map.free(), p.used, p.allocations, p.refusals};
}

Block* Arena::write_control_words(std::uint32_t chunk, std::size_t unit,
                                  std::size_t capacity) noexcept {
  Block* block = block_at(chunk, unit);
  unpoison(block, sizeof(Block));
  *block = Block{};
  block->capacity = capacity;
  block->payload = reinterpret_cast<std::byte*>(block) + kHeadroom;
  block->recycle = &Arena::recycle;
  block->owner = this;
  block->link = kNoBlock;
  block->chunk = static_cast<std::uint16_t>(chunk);
  return block;
}

Block* Arena::carve(Chunk& chunk, std::uint32_t index) noexcept {
  const std::size_t unit = chunk.bump;
  chunk.bump = static_cast<std::uint16_t>(unit + stride_of(chunk.size_class));
  return write_control_words(index, unit, capacity_of(chunk.size_class));
}

Block* Arena::allocate_from_fresh(Pool& pool, std::size_t size_class) noexcept {
  if (pool.map.size() == 0) return nullptr;
  for (int rounds = 0; pool.map.free() == 0 && retire_spares(pool, 1) == 0;) {
    for (const std::size_t each : {size_class, other_order_of(size_class)}) {
      if (Chunk* const chunk = pool.partial[each].front(); chunk != nullptr)
        return allocate_block(pool, *chunk);
    }
    if (!reclaim(pool, rounds)) {
      ++pool.refusals;
      return nullptr;
    }
  }
  const std::uint32_t local = pool.map.find_one();
  pool.map.clear(local);
  const std::uint32_t index = pool.first + local;
  Chunk& chunk = chunks_[index];
  chunk.state = ChunkState::blocks;
  chunk.size_class = static_cast<std::uint8_t>(size_class);
  chunk.free = kNoBlock;
  chunk.bump = 0;
  chunk.used = 0;
  chunk.limit = static_cast<std::uint16_t>(kChunkBytes / kUnit / stride_of(size_class));
  // Until now the control words of the chunk's former blocks stayed readable, to detect late
  // misuse.
  poison(base_ + index * kChunkBytes, kChunkBytes);
  if (size_class >= kSizeCount) lay_to_rest(chunk, index);
  pool.partial[size_class].push_front(chunk);
  return allocate_block(pool, chunk);
}

/// Carves all blocks of a fresh chunk into its free list.
void Arena::lay_to_rest(Chunk& chunk, std::uint32_t index) noexcept {
  chunk.state = ChunkState::resting;
  chunk.free = chunk.bump;
  for (std::uint16_t i = 0; i < chunk.limit; ++i) {
    chunk.run = chunk.bump;
    Block* const block = carve(chunk, index);
    block->link = i + 1 < chunk.limit ? chunk.bump : kNoBlock;
  }
}

Block* Arena::allocate(PoolId pool, std::size_t size, Reuse order) noexcept {
  const bool has_class = size - 1 < kLargestSmallBlock;
  if (order == Reuse::newest || !has_class || class_of(size) < kFirstResting)
    return allocate(pool, size);
  Pool& p = pools_[static_cast<std::size_t>(pool)];
  const std::size_t size_class = other_order_of(class_of(size));
  Chunk* const chunk = p.partial[size_class].front();
  return chunk != nullptr ? allocate_block(p, *chunk) : allocate_from_fresh(p, size_class);
}

/// Frees a block that is not one of ChunkState::blocks.
void Arena::free_other(Pool& pool, std::uint32_t index, std::uint16_t unit) noexcept {
  if (chunks_[index].state == ChunkState::resting) {
    free_resting(pool, chunks_[index], unit);
  } else {
    free_run(pool, index);
  }
}

void Arena::free_resting(Pool& pool, Chunk& chunk, std::uint16_t unit) noexcept {
  if (chunk.free == kNoBlock) {
    chunk.free = unit;
  } else {
    block_at(index_of(chunk), chunk.run)->link = unit;
  }
  chunk.run = unit;
  if (chunk.used-- == chunk.limit) pool.partial[chunk.size_class].push_front(chunk);
  if (chunk.used == 0) retire_if_spared(pool, chunk);
}

bool Arena::has_block(PoolId pool, std::size_t size) noexcept {
  Pool& p = pools_[static_cast<std::size_t>(pool)];
  if (!fits(pool, size)) return false;
  if (size <= kLargestSmallBlock) {
    const std::size_t size_class = class_of(size);
    const bool has_any = p.partial[size_class].front() != nullptr ||
                         p.partial[other_order_of(size_class)].front() != nullptr;
    return has_any || p.map.free() != 0 || retire_spares(p, 1) != 0;
  }
  const std::uint32_t length = chunks_for(size);
  return p.map.find_run(length) != ChunkMap::kNone ||
         (retire_spares(p, kClassCount) != 0 && p.map.find_run(length) != ChunkMap::kNone);
}

Block* Arena::allocate_run(Pool& pool, std::size_t size) noexcept {
  const std::size_t chunks = pool.map.size();
  if (size == 0 || chunks == 0 || size > chunks * kChunkBytes - kHeadroom) return nullptr;
  const std::uint32_t length = chunks_for(size);
  std::uint32_t local = pool.map.find_run(length);
  for (int rounds = 0; local == ChunkMap::kNone; local = pool.map.find_run(length)) {
    if (retire_spares(pool, kClassCount) == 0 && !reclaim(pool, rounds)) {
      ++pool.refusals;
      return nullptr;
    }
  }
  const std::uint32_t head = pool.first + local;
  for (std::uint32_t i = 0; i < length; ++i) {
    pool.map.clear(local + i);
    chunks_[head + i].state = ChunkState::run_body;
  }
  chunks_[head].state = ChunkState::run_head;
  chunks_[head].run = length;
  return hand_out(pool, write_control_words(head, 0, length * kChunkBytes - kHeadroom));
}

/// Has blocks given back to an exhausted pool. False: there are none, or enough was tried for one
/// request. Blocks of one class do not make room for another while their chunks have others in use.
bool Arena::reclaim(const Pool& pool, int& rounds) noexcept {
  constexpr int kMostRounds = 4;
  const bool is_send = &pool == &pools_[static_cast<std::size_t>(PoolId::send)];
  return is_send && reclaimer_ != nullptr && rounds++ < kMostRounds && reclaimer_->reclaim();
}

void Arena::free_run(Pool& pool, std::uint32_t head) noexcept {
  SPINWIRE_CHECK(chunks_[head].state == ChunkState::run_head, "a run is freed as a whole");
  const std::uint32_t length = chunks_[head].run;
  for (std::uint32_t i = 0; i < length; ++i) {
    chunks_[head + i].state = ChunkState::free;
    pool.map.set(head + i - pool.first);
  }
  chunks_[head].run = 0;
}

/// Returns an empty chunk to its pool, unless it is its class's only chunk with free blocks: a load
/// that varies by one block would otherwise take and return a chunk each time. So a class keeps at
/// most one empty chunk, always at the tail of its list, because chunks are linked at the front.
void Arena::retire_if_spared(Pool& pool, Chunk& chunk) noexcept {
  const auto& list = pool.partial[chunk.size_class];
  if (list.front() != list.back()) retire(pool, chunk);
}

void Arena::retire(Pool& pool, Chunk& chunk) noexcept {
  pool.partial[chunk.size_class].erase(chunk);
  chunk.state = ChunkState::free;
  pool.map.set(index_of(chunk) - pool.first);
}

/// Frees up to `most` empty chunks that classes keep. Returns their number.
std::size_t Arena::retire_spares(Pool& pool, std::size_t most) noexcept {
  std::size_t retired = 0;
  for (std::size_t i = 0; i < kClassCount && retired < most; ++i) {
    Chunk* const last = pool.partial[i].back();
    if (last == nullptr || last->used != 0) continue;
    retire(pool, *last);
    ++retired;
  }
  return retired;
}

}  // namespace spinwire::memory
