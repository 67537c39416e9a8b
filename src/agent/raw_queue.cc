#include "agent/raw_queue.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "agent/agent.h"
#include "base/error.h"
#include "base/random.h"

namespace spinwire::agent {
namespace {

/// Returns the receives of shared queues that were reserved for the agent.
void return_reserved_receives(EngineContext& ctx, Agent& a) noexcept {
  unreserve_receives(ctx, a, a.credit.reserved);
  a.credit.granted = a.credit.advertised = 0;
  if (a.own_queue != kNone) reclaim_own_receives(ctx, a);
}

/// Entries of the completion queue that raw receives may use.
std::uint32_t completion_room(const EngineContext& ctx) noexcept {
  const std::uint64_t taken = std::uint64_t{ctx.operations.capacity()} + ctx.receives.size();
  const std::uint64_t depth = ctx.config.queues.completion_depth;
  return static_cast<std::uint32_t>(depth - std::min(taken, depth));
}

}  // namespace

RawQueue::RawQueue(RawShared& all, const verbs::QueuePairOptions& sizes)
    : depth(sizes.receive_depth),
      receive_elements(sizes.receive_elements),
      send_elements(sizes.send_elements),
      accepted(static_cast<std::uint32_t>(base::random_seed())),
      posted(accepted),
      notified(accepted),
      completed(accepted),
      all_(all),
      mask_(std::bit_ceil(depth + 1) - 1),
      // One operation's memory is held while its callback starts another.
      lists_(send_elements > 1 ? sizes.send_depth + 1 : 0),
      free_(lists_ != 0 ? 0 : kNone) {
  const std::size_t slots = std::size_t{mask_} + 1;
  slots_ = std::make_unique<RawSlot[]>(slots);
  sges_ = std::make_unique<ibv_sge[]>(slots * receive_elements);
  blocks_ = std::make_unique<Block*[]>(slots * receive_elements);
  list_sges_ = std::make_unique<ibv_sge[]>(std::size_t{lists_} * send_elements);
  list_blocks_ = std::make_unique<Block*[]>(std::size_t{lists_} * send_elements);
  sizes_ = std::make_unique<std::uint32_t[]>(lists_);
  for (std::uint32_t i = 0; i < lists_; ++i) sizes_[i] = i + 1 < lists_ ? i + 1 : kNone;
  all_.reserved += depth;
}

RawQueue::~RawQueue() { all_.reserved -= depth; }

std::uint32_t RawQueue::receive_at(const ibv_recv_wr* wr) const noexcept {
  const auto index =
      static_cast<std::uint32_t>(reinterpret_cast<const RawSlot*>(wr) - slots_.get());
  return posted + ((index - posted) & mask_);
}

std::uint32_t RawQueue::acquire_elements(std::size_t size) noexcept {
  const std::uint32_t index = free_;
  if (index != kNone) free_ = std::exchange(sizes_[index], static_cast<std::uint32_t>(size));
  return index;
}

void RawQueue::free_elements(std::uint32_t index) noexcept {
  sizes_[index] = std::exchange(free_, index);
}

Result<std::unique_ptr<RawQueue>> make_raw(EngineContext& ctx,
                                           const config::ConnectionAttributes& attributes,
                                           const RawQueue* instead_of) {
  using Made = Result<std::unique_ptr<RawQueue>>;
  if (!attributes.raw) return nullptr;
  return base::no_throw("make the queues of a raw connection", [&]() -> Made {
    if (ctx.raw == nullptr) ctx.raw = std::make_unique<RawShared>();
    const std::uint32_t asked = attributes.queue_pair.receive_depth;
    const std::uint32_t had = instead_of != nullptr ? instead_of->depth : 0;
    const std::uint32_t room = completion_room(ctx);
    const std::uint32_t others = ctx.raw->reserved - had;
    if (others > room || asked > room - others) {
      const std::uint32_t left = room - std::min(others, room);
      return base::fail(
          Status::limit, base::format("raw.receive_depth = {}", asked),
          base::format("queues.completion_depth = {} leaves room for {} receives of raw "
                       "connections, of which {} are others'",
                       ctx.config.queues.completion_depth, room, others),
          base::format("raise it by {}, or lower receive_depth", asked - left));
    }
    return std::make_unique<RawQueue>(*ctx.raw, attributes.queue_pair);
  });
}

bool use_raw(EngineContext& ctx, Agent& a, std::unique_ptr<RawQueue> queue) noexcept {
  if (queue == nullptr) {
    std::unique_ptr<RawQueue> was = std::move(a.raw);
    if (was == nullptr || reserve_first_receive(ctx, a)) return true;
    a.raw = std::move(was);
    return false;
  }
  if (a.raw == nullptr) return_reserved_receives(ctx, a);
  a.raw = std::move(queue);
  return true;
}

Result<void> agree_on_raw(const Agent& a, bool peers) {
  const bool ours = a.raw != nullptr;
  if (ours == peers) return {};
  return base::fail(
      Status::unsupported, base::format("connect to {}{}", ours ? "raw, " : "", a.peer.name.data()),
      base::format("the end at {} is not raw, the other is", ours ? "the peer" : "this engine"),
      "give both ends ConnectionSettings::raw, or neither");
}

void reset_raw(RawQueue& queue) noexcept {
  queue.failed = false;
  queue.send_limit = 0;
}

}  // namespace spinwire::agent
