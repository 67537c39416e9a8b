#include "agent/receive_slots.h"

#include <algorithm>

#include "agent/credit.h"
#include "base/error.h"

namespace spinwire::agent {
namespace {

bool fill_any_slot(EngineContext& ctx, std::uint32_t slot) noexcept {
  return is_own_slot(ctx, slot) ? fill_slot<true>(ctx, slot) : fill_slot<false>(ctx, slot);
}

/// Without a shared queue, each slot belongs to some connection's own queue.
void make_receives(EngineContext& ctx) {
  const std::uint32_t depth = ctx.config.queues.receive_depth;
  if (ctx.device->srq() == nullptr) {
    const OwnShare share = own_share(ctx.config, ctx.device->info().own_receives);
    ctx.receives.make(depth, receive_id);
    make_own_queues(ctx, share, 0, std::min(depth / share.slots, ctx.config.connections.maximum));
    ctx.config.connections.credits = share.credits;
    ctx.reservable_receives = ctx.own_queues->queues.capacity() * share.credits;
    ctx.list_length = 1;
    return;
  }
  const OwnShare share = own_share(ctx.config, ctx.device->domain_receives());
  const std::uint32_t domains = ctx.config.connections.own_domains;
  ctx.receives.make(depth + domains * share.slots, receive_id);
  for (std::uint32_t i = 0; i < depth; ++i) ctx.receives.queue(i) = kNone;
  ctx.reservable_receives = config::reservable_receives(ctx.config);
  ctx.list_length = ctx.config.queues.receive_postlist;
  ctx.shortage_allowed = kUnreservedReceives;
  if (domains != 0) make_own_queues(ctx, share, depth, domains);
}

}  // namespace

void post_receives(EngineContext& ctx) noexcept {
  const std::uint32_t before = ctx.receives.count();
  // The queue has room for all slots. Receives that the device refuses wait for the next call.
  (void)ctx.receives.chain().post(ctx.device->srq());
  const std::uint32_t posted = before - ctx.receives.count();
  ctx.posted_receives += posted;
  ctx.stats.receives_posted += posted;
}

void fill_empty_slots(EngineContext& ctx) noexcept {
  while (ctx.receive_shortage != 0 && fill_any_slot(ctx, ctx.empty_slots[ctx.receive_shortage - 1]))
    --ctx.receive_shortage;
  if (ctx.receive_waiters.count() != 0) grant_to_waiters(ctx);
}

Result<void> post_first_receives(EngineContext& ctx) {
  make_receives(ctx);
  const std::uint32_t count = ctx.receives.size();
  ctx.empty_slots = std::make_unique<std::uint32_t[]>(count);
  const std::size_t bytes = ctx.config.connections.eager_bytes + wire::kMessageHeaderBytes;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (!fill_any_slot(ctx, i)) {
      return base::fail(Status::no_memory, base::format("{} receives of {} bytes", count, bytes),
                        base::format("memory.receive_bytes has room for {}", i),
                        "raise memory.receive_bytes, or lower queues.receive_depth or "
                        "connections.own_domains");
    }
  }
  post_receives(ctx);
  return {};
}

std::uint64_t staging_bytes(const Config& config) noexcept {
  return (std::uint64_t{config.queues.operations} + config::internal_operations(config)) *
         kStagingBytes;
}

bool open_staging(EngineContext& ctx) noexcept {
  ctx.staging_block = ctx.arena->allocate(memory::PoolId::control, staging_bytes(ctx.config));
  if (ctx.staging_block == nullptr) return false;
  ctx.staging = ctx.staging_block->payload;
  return true;
}

void open_element_lists(EngineContext& ctx) {
  ctx.element_lists = std::make_unique<ElementLists>(
      ctx.config.queues.operations,
      std::min<std::uint32_t>(ctx.device->info().max_sge, kMaxParts + 1));
}

void release_blocks(EngineContext& ctx) noexcept {
  const auto release = [](Block* block) {
    if (block != nullptr) detail::release(block);
  };
  SpareBlocks& spare = ctx.spare_blocks;
  while (spare.count != 0) release(spare.blocks[--spare.count]);
  for (std::uint32_t i = 0; i < ctx.receives.size(); ++i) release(ctx.receives.memory(i));
  release(ctx.staging_block);
}

}  // namespace spinwire::agent
