// The slots of receives: each has a block for the next message, waits to be posted, or is with the
// device. Most slots are of the shared receive queue; own_receives.h has the others. Hot.
#pragma once

#include <cstdint>

#include "agent/engine_context.h"
#include "agent/own_receives.h"

namespace spinwire::agent {

/// Makes the slots, and fills the shared receive queue if there is one. Errors: no_memory when the
/// receive pool is short.
Result<void> post_first_receives(EngineContext& ctx);
/// Fills the slots that lack a block, as far as the pool has blocks.
void fill_empty_slots(EngineContext& ctx) noexcept;
/// Posts the chain of receives that wait.
void post_receives(EngineContext& ctx) noexcept;

/// Whether the slot is of one connection's own queue.
inline bool is_own_slot(EngineContext& ctx, std::uint32_t slot) noexcept {
  return ctx.receives.queue(slot) != kNone;
}
/// Aims the slot at a block: the header goes into the headroom. `lkey` opens the block to the queue
/// pair.
inline void aim_receive(EngineContext& ctx, std::uint32_t slot, const Block& block,
                        std::uint32_t lkey) noexcept {
  const std::uint32_t bytes =
      ctx.config.connections.eager_bytes + std::uint32_t{wire::kMessageHeaderBytes};
  ctx.receives.aim(slot, block.payload - wire::kMessageHeaderBytes, bytes, lkey);
}
/// Adds a slot to the receives that wait to be posted. `own`: is_own_slot(), which the caller
/// knows.
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
