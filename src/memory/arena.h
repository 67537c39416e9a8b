// The engine's memory: one slab divided into chunks, and chunks into blocks.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/check.h"
#include "base/intrusive_list.h"
#include "base/shared_memory.h"
#include "memory/chunk_map.h"
#include "memory/poison.h"
#include "spinwire/buffer.h"
#include "spinwire/config.h"
#include "spinwire/status.h"

namespace spinwire::memory {

using detail::Block;

/// Each pool has its own chunks, so an exhausted pool does not affect the others.
enum class PoolId : std::uint8_t { send, receive, lease, rendezvous, control };
inline constexpr std::size_t kPoolCount = 5;

inline constexpr std::size_t kChunkBytes = std::size_t{2} << 20;
inline constexpr std::size_t kHeadroom = sizeof(Block);
/// Small blocks have capacities of 256 B, 512 B, … 512 KiB; longer ones take whole chunks, with
/// room for n * 2 MiB - 64 bytes.
inline constexpr std::size_t kSmallestBlock = 256;
inline constexpr std::size_t kLargestSmallBlock = std::size_t{512} << 10;
inline constexpr std::size_t kSizeCount =
    std::bit_width(kLargestSmallBlock) - std::bit_width(kSmallestBlock) + 1;
/// The smallest capacity of blocks that rest: see Reuse::oldest.
inline constexpr std::size_t kLeastResting = std::size_t{32} << 10;
inline constexpr std::size_t kFirstResting =
    std::bit_width(kLeastResting) - std::bit_width(kSmallestBlock);
/// Blocks that rest are in classes of their own, behind those of all sizes.
inline constexpr std::size_t kClassCount = kSizeCount + (kSizeCount - kFirstResting);

/// Bytes that a block of up to kLargestSmallBlock takes in its chunk.
constexpr std::size_t small_block_bytes(std::size_t size) noexcept {
  return std::max(kSmallestBlock, std::bit_ceil(size)) + kHeadroom;
}

/// Which free block is used again next.
enum class Reuse : std::uint8_t {
  newest,  ///< the one freed last, whose bytes are in this processor's caches
  /// The one freed first. For blocks that another processor reads before they are freed: its caches
  /// hold the newest, and to write such a block means to take each line from there. For blocks of
  /// less than kLeastResting, and of more than kLargestSmallBlock, there is no order.
  oldest,
};

struct ArenaOptions {
  std::string name = "spinwire-slab";  ///< shown in /proc/PID/maps
  /// Bytes per pool, in the order of PoolId, rounded up to whole chunks. A pool of 0 bytes serves
  /// no request.
  std::array<std::uint64_t, kPoolCount> pool_bytes{};
  HugepagePolicy hugepages = HugepagePolicy::prefer;
  LockPolicy lock = LockPolicy::off;
  bool populate = true;  ///< false: ordinary pages only, allocated when touched
};

struct PoolStats {
  std::uint32_t chunks = 0;
  std::uint32_t free_chunks = 0;  ///< assigned to no size class now
  std::uint64_t blocks_used = 0;
  std::uint64_t allocations = 0;  ///< since the start
  std::uint64_t refusals = 0;     ///< allocations refused because the pool was exhausted
};

/// Gives blocks of an exhausted pool back. Cold.
class Reclaimer {
 public:
  virtual ~Reclaimer() = default;
  /// Releases some blocks, and allocates none. Returns false if there is none to release.
  virtual bool reclaim() noexcept = 0;
};

class Arena;
/// The engine's reference to its arena. An arena with blocks in use is freed with its last block.
struct ArenaDeleter {
  void operator()(Arena* arena) const noexcept;
};
using ArenaPtr = std::unique_ptr<Arena, ArenaDeleter>;

/// One slab of memory, divided into chunks of 2 MiB that belong to pools. A chunk serves one size
/// class while any of its blocks is in use. One thread. After make(), no call but audit() and
/// destruction allocates from the heap, takes a lock or enters the kernel. allocate() and recycling
/// take constant time; for requests of whole chunks the time is bounded by the number of chunks in
/// the pool.
///
/// Lifetime: handles hold a block, not the engine. Blocks still held when the ArenaPtr is destroyed
/// stay valid; the arena unmaps and deletes itself when the last block is released.
///
/// Under AddressSanitizer the payload of every free block is poisoned.
class Arena {
 public:
  /// Maps, populates and locks the slab. Errors: those of map_pages(); invalid_argument (no bytes
  /// at all, or more than 2^24 chunks). Set-up.
  static Result<ArenaPtr> make(const ArenaOptions& options);

  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Allocates a block of at least `size` bytes with one reference; its bytes are not cleared. Null
  /// if the pool is exhausted or fits() is false. Hot.
  [[nodiscard]] Block* allocate(PoolId pool, std::size_t size) noexcept {
    Pool& p = pools_[static_cast<std::size_t>(pool)];
    if (size - 1 < kLargestSmallBlock) [[likely]] {
      const std::size_t size_class = class_of(size);
      Chunk* const chunk = p.partial[size_class].front();
      if (chunk != nullptr) [[likely]]
        return allocate_block(p, *chunk);
      return allocate_from_fresh(p, size_class);
    }
    return allocate_run(p, size);
  }
  /// The same, with the order in which blocks are used again. For long blocks.
  [[nodiscard]] Block* allocate(PoolId pool, std::size_t size, Reuse order) noexcept;

  /// Whether `pool` could serve `size` bytes if all its blocks were free; false for 0. Hot.
  [[nodiscard]] bool fits(PoolId pool, std::size_t size) const noexcept {
    const Pool& p = pools_[static_cast<std::size_t>(pool)];
    return size != 0 && p.map.size() != 0 && size <= p.map.size() * kChunkBytes - kHeadroom;
  }

  /// Whether allocate() finds a block without having others given back. Time as for allocate() of
  /// whole chunks.
  [[nodiscard]] bool has_block(PoolId pool, std::size_t size) noexcept;

  /// Sets the local key that blocks carry: the key of the slab's registration. Set-up; before the
  /// first block is allocated.
  void set_lkey(std::uint32_t lkey) noexcept {
    SPINWIRE_CHECK(live_ == 1, "a block that is already in use would keep the old key");
    lkey_ = lkey;
  }

  /// Sets who gives blocks back when the send pool is exhausted, before it refuses a request. Null:
  /// nobody. Set-up.
  void set_reclaimer(Reclaimer* reclaimer) noexcept { reclaimer_ = reclaimer; }

  /// The whole slab, to be registered.
  [[nodiscard]] std::span<std::byte> slab() const noexcept { return {base_, slab_bytes_}; }
  [[nodiscard]] const base::SharedMemory& memory() const noexcept { return memory_; }
  [[nodiscard]] PoolStats stats(PoolId pool) const noexcept;

  /// Checks that every block has exactly one owner: the lists of chunks, the free lists and the
  /// counts must agree with each other and with the blocks' control words. Allocates; takes time in
  /// proportion to the blocks ever used. Errors: system, naming what does not hold.
  [[nodiscard]] Result<void> audit() const;

  /// Lets code read the whole slab under AddressSanitizer, e.g. to dump it. Set-up.
  void unpoison_all() const noexcept { unpoison(base_, slab_bytes_); }

 private:
  friend struct ArenaDeleter;

  // A block's address determines its chunk. Block::chunk holds the low bits of the index, as a
  // check. Offsets within a chunk are counted in cache lines and fit 16 bits.
  static constexpr std::size_t kUnit = 64;
  static constexpr std::uint16_t kNoBlock = 0xffff;
  static constexpr std::uint32_t kInUse = 0xffff'ffff;  ///< Block::link while allocated

  /// The blocks of a resting chunk are used again in the order in which they were freed. All were
  /// carved when it was taken, so that there are many.
  enum class ChunkState : std::uint8_t { free, blocks, resting, run_head, run_body };

  struct alignas(32) Chunk {
    base::IntrusiveLinks<Chunk> links;  ///< in Pool::partial
    /// In the head of a run, its length in chunks. In a resting chunk, the block freed last, in
    /// units.
    std::uint32_t run = 0;
    std::uint16_t free = kNoBlock;  ///< first recycled block, in units
    std::uint16_t bump = 0;         ///< first unit never carved
    std::uint16_t used = 0;         ///< blocks allocated
    std::uint16_t limit = 0;        ///< capacity in blocks
    ChunkState state = ChunkState::free;
    std::uint8_t size_class = 0;
    std::uint8_t pool = 0;
  };
  static_assert(sizeof(Chunk) == 32);

  struct Pool {
    /// Per class, the chunks with free blocks.
    std::array<base::IntrusiveList<&Chunk::links>, kClassCount> partial;
    std::uint64_t used = 0;
    std::uint64_t allocations = 0;
    std::uint64_t refusals = 0;
    std::uint32_t first = 0;  ///< first chunk in the slab
    ChunkMap map;             ///< the pool's free chunks, counted from `first`
  };

  explicit Arena(base::SharedMemory memory) noexcept;
  ~Arena();
  void set_up(const std::array<std::uint32_t, kPoolCount>& chunks);

  static std::size_t class_of(std::size_t size) noexcept {
    const std::size_t width = static_cast<std::size_t>(std::bit_width((size - 1) | 0xff));
    return width - 8;
  }
  static constexpr std::size_t capacity_of(std::size_t size_class) noexcept {
    const bool rests = size_class >= kSizeCount;
    return kSmallestBlock << (rests ? size_class - (kSizeCount - kFirstResting) : size_class);
  }
  /// Distance of a class's blocks, in units.
  static constexpr std::uint16_t stride_of(std::size_t size_class) noexcept {
    return static_cast<std::uint16_t>((capacity_of(size_class) + kHeadroom) / kUnit);
  }
  [[nodiscard]] std::uint32_t index_of(const Chunk& chunk) const noexcept {
    return static_cast<std::uint32_t>(&chunk - chunks_.get());
  }
  [[nodiscard]] Block* block_at(std::uint32_t chunk, std::size_t unit) const noexcept {
    return reinterpret_cast<Block*>(base_ + chunk * kChunkBytes + unit * kUnit);
  }

  /// Allocates a block of a chunk that has a free one.
  Block* allocate_block(Pool& pool, Chunk& chunk) noexcept {
    const std::uint32_t index = index_of(chunk);
    Block* block = nullptr;
    if (chunk.free != kNoBlock) [[likely]] {
      block = block_at(index, chunk.free);
      chunk.free = static_cast<std::uint16_t>(block->link);
    } else {
      block = carve(chunk, index);
    }
    if (++chunk.used == chunk.limit) pool.partial[chunk.size_class].erase(chunk);
    return hand_out(pool, block);
  }

  Block* hand_out(Pool& pool, Block* block) noexcept {
    SPINWIRE_CHECK(block->refs == 0, "a reference to a free block was dropped or added");
    block->refs = 1;
    block->lkey = lkey_;
    block->link = kInUse;
    block->header_in_use = 0;
    unpoison(block->payload, block->capacity);
    ++pool.used;
    ++pool.allocations;
    ++live_;
    return block;
  }

  /// Block::recycle of all blocks of an arena.
  static void recycle(Block* block) noexcept { static_cast<Arena*>(block->owner)->free(block); }

  void free(Block* block) noexcept {
    const auto offset = static_cast<std::size_t>(reinterpret_cast<std::byte*>(block) - base_);
    SPINWIRE_CHECK(offset < slab_bytes_, "a block goes back to the arena that it came from");
    const auto index = static_cast<std::uint32_t>(offset / kChunkBytes);
    SPINWIRE_CHECK(block->link == kInUse && block->chunk == static_cast<std::uint16_t>(index),
                   "a block is freed once, with its control words intact");
    block->link = kNoBlock;
    poison(block->payload, block->capacity);
    Chunk& chunk = chunks_[index];
    Pool& pool = pools_[chunk.pool];
    --pool.used;
    if (chunk.state == ChunkState::blocks) [[likely]] {
      block->link = chunk.free;
      chunk.free = static_cast<std::uint16_t>(offset % kChunkBytes / kUnit);
      if (chunk.used-- == chunk.limit) pool.partial[chunk.size_class].push_front(chunk);
      if (chunk.used == 0) [[unlikely]]
        retire_if_spared(pool, chunk);
    } else {
      free_other(pool, index, static_cast<std::uint16_t>(offset % kChunkBytes / kUnit));
    }
    if (--live_ == 0) [[unlikely]]
      delete this;
  }

  Block* carve(Chunk& chunk, std::uint32_t index) noexcept;
  Block* write_control_words(std::uint32_t chunk, std::size_t unit, std::size_t capacity) noexcept;
  __attribute__((noinline)) Block* allocate_from_fresh(Pool& pool, std::size_t size_class) noexcept;
  __attribute__((noinline)) Block* allocate_run(Pool& pool, std::size_t size) noexcept;
  __attribute__((noinline)) void free_other(Pool& pool, std::uint32_t index,
                                            std::uint16_t unit) noexcept;
  void free_run(Pool& pool, std::uint32_t head) noexcept;
  void free_resting(Pool& pool, Chunk& chunk, std::uint16_t unit) noexcept;
  void lay_to_rest(Chunk& chunk, std::uint32_t index) noexcept;
  [[nodiscard]] bool reclaim(const Pool& pool, int& rounds) noexcept;
  void retire_if_spared(Pool& pool, Chunk& chunk) noexcept;
  void retire(Pool& pool, Chunk& chunk) noexcept;
  std::size_t retire_spares(Pool& pool, std::size_t most) noexcept;

  class Auditor;

  std::byte* base_ = nullptr;
  std::size_t slab_bytes_ = 0;
  std::unique_ptr<Chunk[]> chunks_;
  std::uint64_t live_ = 1;  ///< blocks allocated, plus one for the engine's reference
  std::uint32_t lkey_ = 0;
  std::uint32_t chunk_count_ = 0;
  std::array<Pool, kPoolCount> pools_;
  base::SharedMemory memory_;
  Reclaimer* reclaimer_ = nullptr;
};

}  // namespace spinwire::memory
