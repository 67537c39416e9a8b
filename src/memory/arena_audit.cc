// Arena::audit(): checks that every block has exactly one owner. Cold.
#include <string>
#include <vector>

#include "base/auditor.h"
#include "memory/arena.h"

namespace spinwire::memory {

/// Checks an arena and stops at the first fault.
class Arena::Auditor : public base::Auditor {
 public:
  explicit Auditor(const Arena& arena) : arena_(arena), listed_(arena.chunk_count_, false) {}

  std::string run() {
    std::uint64_t used = 0;
    for (std::size_t i = 0; i < kPoolCount && ok(); ++i) {
      pool_ = i;
      set_place(base::format("pool {}: ", i));
      used += check_pool(arena_.pools_[i]);
    }
    expect(arena_.live_ == used || arena_.live_ == used + 1,
           "the arena counts {} holds, its pools {} blocks", arena_.live_, used);
    return take_fault();
  }

 private:
  static bool has_blocks(const Chunk& chunk) {
    return chunk.state == ChunkState::blocks || chunk.state == ChunkState::resting;
  }

  /// Returns the number of blocks in use.
  std::uint64_t check_pool(const Pool& pool) {
    for (std::size_t i = 0; i < kClassCount && ok(); ++i) check_list(pool, i);
    std::uint64_t used = 0;
    std::uint32_t free = 0;
    for (std::uint32_t i = 0; i < pool.map.size() && ok();) {
      const std::uint32_t index = pool.first + i;
      const Chunk& chunk = arena_.chunks_[index];
      const bool is_free = chunk.state == ChunkState::free;
      expect(chunk.pool == pool_, "chunk {} belongs to pool {}", index, chunk.pool);
      expect(is_free == pool.map.test(i),
             "chunk {} is in use and in the map of free ones, or "
             "neither",
             index);
      std::uint32_t length = 1;
      if (is_free) {
        ++free;
      } else if (has_blocks(chunk)) {
        check_blocks(index);
        used += chunk.used;
      } else {
        length = check_run(pool, index);
        ++used;
      }
      expect(has_blocks(chunk) || !listed_[index],
             "chunk {} is in a list of chunks with free blocks", index);
      i += length;
    }
    expect(free == pool.map.free(), "{} chunks are free, {} counted", free, pool.map.free());
    expect(used == pool.used, "{} blocks are in use, {} counted", used, pool.used);
    return used;
  }

  /// Checks the list of a class's chunks with free blocks.
  void check_list(const Pool& pool, std::size_t size_class) {
    const Chunk* const first = arena_.chunks_.get() + pool.first;
    const auto& list = pool.partial[size_class];
    const Chunk* before = nullptr;
    for (const Chunk* at = list.front(); at != nullptr; before = at, at = at->links.next) {
      if (!expect(at >= first && at < first + pool.map.size(),
                  "class {} lists a chunk of another pool", size_class))
        return;
      const std::uint32_t index = arena_.index_of(*at);
      if (!expect(!listed_[index], "chunk {} is listed twice", index)) return;
      listed_[index] = true;
      expect(has_blocks(*at) && at->size_class == size_class,
             "class {} lists chunk {}, which does not serve it", size_class, index);
      expect(at->used != 0 || at == list.back(),
             "class {} keeps the empty chunk {}, which is not its last", size_class, index);
      if (!expect(at->links.prev == before, "the list of class {} is broken at chunk {}",
                  size_class, index))
        return;
    }
    expect(list.back() == before, "the list of class {} ends before its last chunk", size_class);
  }

  void check_blocks(std::uint32_t index) {
    const Chunk& chunk = arena_.chunks_[index];
    const std::size_t stride = stride_of(chunk.size_class);
    if (!expect(chunk.size_class < kClassCount && chunk.limit == kChunkBytes / kUnit / stride &&
                    (chunk.state == ChunkState::resting) == (chunk.size_class >= kSizeCount),
                "chunk {} is not cut for its class", index)) {
      return;
    }
    const std::size_t carved = chunk.bump / stride;
    if (!expect(chunk.bump % stride == 0 && carved <= chunk.limit && chunk.used <= carved,
                "chunk {} has {} blocks in use, {} units carved", index, chunk.used, chunk.bump)) {
      return;
    }
    expect(listed_[index] == (chunk.used < chunk.limit),
           "chunk {} is full and listed, or has room and is not listed", index);
    std::vector<bool> free(carved, false);
    std::size_t free_count = 0;
    std::size_t last = kNoBlock;
    for (std::size_t unit = chunk.free; unit != kNoBlock;) {
      if (!expect(unit % stride == 0 && unit / stride < carved && !free[unit / stride],
                  "the free list of chunk {} is broken at unit {}", index, unit)) {
        return;
      }
      free[unit / stride] = true;
      ++free_count;
      last = unit;
      unit = arena_.block_at(index, unit)->link;
    }
    expect(chunk.state != ChunkState::resting || last == kNoBlock || last == chunk.run,
           "the free list of chunk {} ends at unit {}, not at {}", index, last, chunk.run);
    expect(chunk.used + free_count == carved,
           "chunk {} has {} blocks in use and {} free, but {} were carved", index, chunk.used,
           free_count, carved);
    for (std::size_t i = 0; i < carved && ok(); ++i) {
      check_block(index, i * stride, capacity_of(chunk.size_class), free[i]);
    }
  }

  void check_block(std::uint32_t index, std::size_t unit, std::size_t capacity, bool free) {
    const Block* block = arena_.block_at(index, unit);
    expect(block->capacity == capacity && block->owner == &arena_ &&
               block->recycle == &Arena::recycle &&
               block->payload == reinterpret_cast<const std::byte*>(block) + kHeadroom &&
               block->chunk == static_cast<std::uint16_t>(index),
           "control words of the block at unit {} of chunk {} were overwritten", unit, index);
    expect((block->refs == 0) == free, "the {} block at unit {} of chunk {} has {} references",
           free ? "free" : "used", unit, index, block->refs);
    expect((block->link == kInUse) != free, "the {} block at unit {} of chunk {} is marked {}",
           free ? "free" : "used", unit, index, block->link);
  }

  /// Checks a run. Returns its length in chunks, at least 1.
  std::uint32_t check_run(const Pool& pool, std::uint32_t head) {
    const Chunk& chunk = arena_.chunks_[head];
    if (!expect(chunk.state == ChunkState::run_head && chunk.run >= 1 &&
                    chunk.run <= pool.map.size() - (head - pool.first),
                "chunk {} is part of a run that has no head", head)) {
      return 1;
    }
    for (std::uint32_t i = 1; i < chunk.run; ++i) {
      expect(arena_.chunks_[head + i].state == ChunkState::run_body &&
                 !pool.map.test(head + i - pool.first) && !listed_[head + i],
             "chunk {} left the run of chunk {}", head + i, head);
    }
    check_block(head, 0, chunk.run * kChunkBytes - kHeadroom, false);
    return chunk.run;
  }

  const Arena& arena_;
  std::vector<bool> listed_;  ///< chunks found in some list
  std::size_t pool_ = 0;
};

Result<void> Arena::audit() const {
  return base::run_audit("audit of the arena", [&] { return Auditor(*this).run(); });
}

}  // namespace spinwire::memory
