#include "agent/in_place.h"

#include <cstring>

#include "agent/agent.h"
#include "spinwire/message.h"

namespace spinwire {

Buffer Message::take_copy() noexcept {
  auto& ctx = *std::exchange(engine_, nullptr);
  detail::Block* const block = agent::block_for_kept(ctx, size_);
  if (block == nullptr) {
    ++ctx.stats.unkept_messages;
    return {};
  }
  std::memcpy(block->payload, data_, size_);
  return Buffer(block, size_);
}

namespace agent {

void open_in_place(EngineContext& ctx) noexcept {
  if (ctx.config.connections.direct_messages == DirectPath::off) return;
  ctx.direct = ctx.device->provider().direct_messages;
  if (ctx.direct == nullptr) return;
  ctx.direct_reads = &ctx.direct->reads(ctx.device->context());
  ctx.direct_round = &ctx.direct->round(ctx.device->context());
  fill_spare_blocks(ctx);
  release_in_place(ctx);
}

void fill_spare_blocks(EngineContext& ctx) noexcept {
  SpareBlocks& spare = ctx.spare_blocks;
  while (spare.count < SpareBlocks::kMost) {
    Block* const block =
        ctx.arena->allocate(memory::PoolId::receive, ctx.config.connections.eager_bytes);
    if (block == nullptr) return;
    spare.blocks[spare.count++] = block;
  }
}

void renew_spare_blocks(EngineContext& ctx) noexcept {
  if (ctx.direct != nullptr && ctx.spare_blocks.count != SpareBlocks::kMost) release_in_place(ctx);
}

Block* block_for_kept(EngineContext& ctx) noexcept {
  Block* const block =
      ctx.arena->allocate(memory::PoolId::receive, ctx.config.connections.eager_bytes);
  if (block != nullptr) [[likely]]
    return block;
  SpareBlocks& spare = ctx.spare_blocks;
  return spare.count != 0 ? spare.blocks[--spare.count] : nullptr;
}

Block* block_for_kept(EngineContext& ctx, std::size_t size) noexcept {
  return size <= ctx.config.connections.eager_bytes
             ? block_for_kept(ctx)
             : ctx.arena->allocate(memory::PoolId::rendezvous, size);
}

}  // namespace agent
}  // namespace spinwire
