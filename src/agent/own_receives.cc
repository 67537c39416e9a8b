#include "agent/own_receives.h"

#include <algorithm>
#include <utility>

#include "agent/agent.h"

namespace spinwire::agent {
namespace {

/// With fewer slots, a peer would mostly wait for credit.
constexpr std::uint32_t kLeastSlots = 8;

/// The first slot of a queue, and the one behind its last.
struct Range {
  std::uint32_t begin;
  std::uint32_t end;
};
Range slots_of(const OwnQueues& own, std::uint32_t queue) noexcept {
  const std::uint32_t begin = own.first + queue * own.share.slots;
  return {begin, begin + own.share.slots};
}

/// Whether the queue pair takes receives: from INIT until it ends.
bool takes_receives(const OwnQueue& queue) noexcept {
  const Agent& a = *queue.agent;
  return a.stage >= Stage::wait && a.stage <= Stage::up && !queue.failed;
}

/// Posts the queue's receives. Receives that the device refuses wait for the next call; the peer
/// has no credit for them.
int post(EngineContext& ctx, OwnQueue& queue) noexcept {
  const std::uint32_t before = queue.back.count();
  const int error = queue.back.post(queue.agent->qp);
  const std::uint32_t posted = before - queue.back.count();
  ctx.posted_receives += posted;
  ctx.stats.receives_posted += posted;
  return error;
}

std::uint32_t receive_shortage(EngineContext& ctx, std::uint32_t queue) noexcept {
  const Range slots = slots_of(*ctx.own_queues, queue);
  std::uint32_t count = 0;
  for (std::uint32_t i = slots.begin; i != slots.end; ++i)
    count += ctx.receives.memory(i) == nullptr ? 1 : 0;
  return count;
}

void aim(EngineContext& ctx, std::uint32_t index, std::uint32_t lkey) noexcept {
  ctx.own_queues->queues.at(index).lkey = lkey;
  const Range slots = slots_of(*ctx.own_queues, index);
  for (std::uint32_t i = slots.begin; i != slots.end; ++i) {
    if (const Block* block = ctx.receives.memory(i); block != nullptr)
      aim_receive(ctx, i, *block, lkey);
  }
}

/// Fills the chain with the slots that have a block. Returns false if a connection needs more,
/// because the application keeps the other blocks.
bool fill_chain(EngineContext& ctx, std::uint32_t index) noexcept {
  constexpr std::uint32_t kLeast = 2;  // one for credit, one for a goodbye
  OwnQueue& queue = ctx.own_queues->queues.at(index);
  (void)queue.back.take();
  aim(ctx, index, ctx.staging_block->lkey);
  const Range slots = slots_of(*ctx.own_queues, index);
  for (std::uint32_t i = slots.begin; i != slots.end; ++i) {
    if (ctx.receives.memory(i) != nullptr) queue.back.add(ctx.receives.request(i));
  }
  return queue.back.count() >= kLeast;
}

}  // namespace

std::uint32_t own_slots(const Config& config) noexcept {
  const std::uint32_t depth = config.queues.receive_depth;
  const std::uint32_t useful = config.connections.credits + config.queues.receive_postlist;
  return std::min({std::max(depth / config.connections.maximum, kLeastSlots), useful, depth});
}

OwnShare own_share(const Config& config, std::uint32_t slots) noexcept {
  // Receives that wait to be posted (one less than a list) and one for a goodbye are not granted.
  const std::uint32_t list = std::clamp(slots / 4, 1u, config.queues.receive_postlist);
  return {slots, list, std::min(config.connections.credits, slots - std::min(list, slots))};
}

void make_own_queues(EngineContext& ctx, const OwnShare& share, std::uint32_t first,
                     std::uint32_t count) {
  ctx.own_queues = std::make_unique<OwnQueues>(share, count);
  ctx.own_queues->first = first;
  for (std::uint32_t i = first; i < ctx.receives.size(); ++i)
    ctx.receives.queue(i) = (i - first) / share.slots;
  ctx.shortage_allowed = 0;
}

void repost_own(EngineContext& ctx, std::uint32_t slot) noexcept {
  const std::uint32_t index = ctx.receives.queue(slot);
  // fill_chain() collects the slots of free queues.
  if (!ctx.own_queues->queues.in_use(index)) return;
  OwnQueue& queue = ctx.own_queues->queues.at(index);
  queue.back.add(ctx.receives.request(slot));
  if (queue.back.count() >= ctx.own_queues->share.postlist && takes_receives(queue))
    (void)post(ctx, queue);
}

std::uint32_t own_lkey(const EngineContext& ctx, std::uint32_t slot, const Block& block) noexcept {
  const std::uint32_t index = ctx.receives.queue(slot);
  return ctx.own_queues->queues.in_use(index) ? ctx.own_queues->queues.at(index).lkey : block.lkey;
}

void aim_own_receives(EngineContext& ctx, const Agent& a, std::uint32_t lkey) noexcept {
  aim(ctx, a.own_queue, lkey);
}

bool acquire_own_queue(EngineContext& ctx, Agent& a) noexcept {
  base::IndexPool<OwnQueue>& queues = ctx.own_queues->queues;
  // With a shared queue, the application gives single connections a domain and a queue.
  if (ctx.device->srq() == nullptr && shares_receives(ctx) &&
      !has_share(a.source->own_queues, queues.capacity() - queues.size()))
    return false;
  std::uint32_t passed = kNone;
  std::uint32_t index = queues.acquire();
  while (index != kNone && !fill_chain(ctx, index)) {
    queues.at(index).next = std::exchange(passed, index);
    index = queues.acquire();
  }
  while (passed != kNone) queues.release(std::exchange(passed, queues.at(passed).next));
  if (index == kNone) return false;
  queues.at(index).agent = &a;
  queues.at(index).failed = false;
  a.own_queue = index;
  ++a.source->own_queues;
  return true;
}

int post_own_receives(EngineContext& ctx, Agent& a) noexcept {
  return post(ctx, ctx.own_queues->queues.at(a.own_queue));
}

bool has_own_receive_shortage(EngineContext& ctx, const Agent& a) noexcept {
  return receive_shortage(ctx, a.own_queue) != 0;
}

std::uint32_t own_receives_posted(EngineContext& ctx, const Agent& a) noexcept {
  return ctx.own_queues->share.slots - ctx.own_queues->queues.at(a.own_queue).back.count() -
         receive_shortage(ctx, a.own_queue);
}

void stop_own_receives(EngineContext& ctx, const Agent& a) noexcept {
  ctx.own_queues->queues.at(a.own_queue).failed = true;
}

void reclaim_own_receives(EngineContext& ctx, Agent& a) noexcept {
  ctx.posted_receives -= own_receives_posted(ctx, a);
  const std::uint32_t index = std::exchange(a.own_queue, kNone);
  --a.source->own_queues;
  ctx.own_queues->queues.at(index).agent = nullptr;
  ctx.own_queues->queues.release(index);
}

}  // namespace spinwire::agent
