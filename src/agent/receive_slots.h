// The slots of receives: each has a block for the next message, waits to be posted, or is at the
// device. Most slots belong to the shared receive queue; own_receives.h has the others. Hot.
#pragma once

#include <cstdint>

#include "agent/engine_context.h"
#include "agent/own_receives.h"

namespace spinwire::agent {

/// Makes the slots, and fills the shared receive queue if there is one. Errors: no_memory when the
/// receive pool is short.
Result<void> post_first_receives(EngineContext& ctx);
/// Fills the slots that lack a block while the pool has blocks.
void fill_empty_slots(EngineContext& ctx) noexcept;
/// Receives that are posted together.
inline std::uint32_t receive_list_length(const EngineContext& ctx) noexcept {
  return ctx.list_length;
}
/// Posts the chain of waiting receives.
void post_receives(EngineContext& ctx) noexcept;

/// Bytes of the staging room of all operations.
std::uint64_t staging_bytes(const Config& config) noexcept;
/// Reserves the lists of gathered operations, for all elements that the device has. May throw
/// std::bad_alloc. Set-up.
void open_element_lists(EngineContext& ctx);
/// Allocates the staging room. False: the control pool is used up. Set-up.
bool open_staging(EngineContext& ctx) noexcept;
/// Releases the blocks of all receives, spare ones included, and the staging room. Set-up.
void release_blocks(EngineContext& ctx) noexcept;

/// Whether the slot belongs to one connection's own queue.
inline bool is_own_slot(EngineContext& ctx, std::uint32_t slot) noexcept {
  return ctx.receives.queue(slot) != kNone;
}
/// Aims the slot at a block: the header goes into the headroom. `lkey` gives the queue pair access
/// to the block.
inline void aim_receive(EngineContext& ctx, std::uint32_t slot, const Block& block,
                        std::uint32_t lkey) noexcept {
  const std::uint32_t bytes =
      ctx.config.connections.eager_bytes + std::uint32_t{wire::kMessageHeaderBytes};
  ctx.receives.aim(slot, block.payload - wire::kMessageHeaderBytes, bytes, lkey);
}
/// Adds a slot to the chain of receives to post. `own`: is_own_slot(), which the caller knows.
template <bool own>
inline void recycle_slot(EngineContext& ctx, std::uint32_t slot) noexcept {
  if constexpr (own) {
    repost_own(ctx, slot);
  } else {
    ctx.receives.add(slot);
    // A full chain is posted at once: credit may be advertised before the end of the poll.
    if (ctx.receives.count() >= ctx.list_length) [[unlikely]]
      post_receives(ctx);
  }
}
/// Gives a slot another block. False: the pool is empty.
template <bool own>
bool fill_slot(EngineContext& ctx, std::uint32_t slot) noexcept {
  Block* block = ctx.arena->allocate(memory::PoolId::receive, ctx.config.connections.eager_bytes);
  ctx.receives.memory(slot) = block;
  if (block == nullptr) return false;
  aim_receive(ctx, slot, *block, own ? own_lkey(ctx, slot, *block) : block->lkey);
  recycle_slot<own>(ctx, slot);
  return true;
}
/// Refills a slot whose block the application keeps.
template <bool own>
void refill_slot(EngineContext& ctx, std::uint32_t slot) noexcept {
  if (!fill_slot<own>(ctx, slot)) ctx.empty_slots[ctx.receive_shortage++] = slot;
}

}  // namespace spinwire::agent
