// Arrivals: receive completions, credit, and what a poll does at its end. Hot.
#include <endian.h>

#include <algorithm>
#include <string>

#include "agent/agent.h"
#include "agent/completion.h"
#include "base/error.h"
#include "base/internals.h"

namespace spinwire::agent {
namespace {

inline bool is_success(const ibv_wc& wc) noexcept { return wc.status == IBV_WC_SUCCESS; }

void post_receives(EngineContext& ctx) noexcept {
  const std::uint32_t before = ctx.receives.count();
  // Never more than the queue was made for: a refusal leaves the rest for the next time.
  (void)ctx.receives.chain().post(ctx.device->srq());
  const std::uint32_t posted = before - ctx.receives.count();
  ctx.posted_receives += posted;
  ctx.stats.receives_posted += posted;
}

/// Puts a slot into the chain of receives to be posted.
inline void repost(EngineContext& ctx, std::uint32_t slot) noexcept {
  ctx.receives.add(slot);
  // At once when the list is full, not at the poll's end only: credit may be told before that.
  if (ctx.receives.count() >= ctx.list_length) [[unlikely]]
    post_receives(ctx);
}

/// Whether fewer receives are posted than this agent's peer might be granted.
bool has_receive_shortage(EngineContext& ctx, const Agent& a) noexcept {
  return a.own_queue != kNone ? has_own_receive_shortage(ctx, a)
                              : ctx.receive_shortage > kUnreservedReceives;
}

/// Credit has to wait until receives are posted for it; what was granted before is told to a peer
/// that has none left.
void wait_for_receives(EngineContext& ctx, Agent& a) noexcept {
  if (a.credit.peer_needs_credit && a.credit.advertised != a.credit.granted) queue_credit(ctx, a);
  if (a.credit.waits_for_receives) return;
  a.credit.waits_for_receives = true;
  ctx.receive_waiters.add(a);
}

/// Lets the peer have credit up to its allotment, if receives are there for it.
inline void grant(EngineContext& ctx, Agent& a) noexcept {
  if (ctx.receive_shortage > ctx.shortage_allowed && has_receive_shortage(ctx, a)) [[unlikely]]
    return wait_for_receives(ctx, a);
  const std::uint32_t target = a.credit.received + a.credit.returned + a.credit.reserved;
  if (static_cast<std::int32_t>(target - a.credit.granted) <= 0) return;
  a.credit.granted = target;
  // A message of ours may take it along; else it is told once it is worth a write of its own.
  if (a.credit.peer_needs_credit || (target - a.credit.advertised) * 2 > a.credit.reserved)
    queue_credit(ctx, a);
}

inline bool is_holding(const Agent& a) noexcept { return (a.detour & kRendezvousAhead) != 0; }

/// A message's credit is used: its receive will be posted again for whoever has credit next, which
/// process_receives() tells the peer, once for all messages of a batch.
inline void use_credit(EngineContext& ctx, Agent& a, bool wants_more, bool held) noexcept {
  ++a.credit.received;
  if (held) [[unlikely]]
    return;  // hold() takes it out of the allotment
  if (ctx.reservations_refused) [[unlikely]]
    yield_credit(ctx, a);
  if (wants_more) [[unlikely]] {
    reserve_more_receives(ctx, a, a.credit.reserved * 2 + 14);
    a.credit.peer_needs_credit = true;
  }
}

void malformed(EngineContext& ctx, Agent& a, std::uint32_t bytes) noexcept {
  fail_bad(ctx, a,
           {Status::protocol, "take a message of " + std::to_string(bytes) + " bytes",
            "no valid header in front of it", "the peer is broken or hostile"});
}

[[gnu::cold, gnu::noinline]] void bad_credit(EngineContext& ctx, Agent& a) noexcept {
  fail_bad(ctx, a,
           {Status::protocol, "read the credit that the peer granted",
            "a count that no peer of this protocol writes", "the peer is broken or hostile"});
}

/// The peer gives credit back, by a message that took one itself. What it could not know of stays
/// allotted: credit that is on its way to it; what it was not told of is taken back.
void on_credit_return(EngineContext& ctx, Agent& a, std::uint32_t credits) noexcept {
  ++a.credit.received;
  a.credit.returned += credits;
  a.credit.granted = a.credit.advertised;
  const std::uint32_t kept = std::max(peer_credits(a), 1u);
  if (kept < a.credit.reserved) {
    reserved_total(ctx, a) -= a.credit.reserved - kept;
    a.credit.reserved = kept;
  }
  grant(ctx, a);
}

/// Whether it costs credit without being a message of the application's.
constexpr bool is_control_kind(wire::MessageKind kind) noexcept {
  return wire::body_bytes(kind) != 0;
}

void on_control_message(EngineContext& ctx, Agent& a, const Block* block,
                        const wire::MessageHeader& header, const ibv_wc& wc) noexcept {
  if (peer_credits(a) == 0) return malformed(ctx, a, wc.byte_len);
  use_credit(ctx, a, (header.flags & wire::message_flag::kWantCredit) != 0,
             header.kind == wire::MessageKind::rendezvous_offer || is_holding(a));
  const std::span<const std::byte> body(block->payload, header.length);
  if (header.kind == wire::MessageKind::rendezvous_offer)
    return on_rendezvous_offer(ctx, a, wc, body);
  if (header.kind == wire::MessageKind::rendezvous_answer)
    return on_rendezvous_answer(ctx, a, wc, body);
  const bool invalidates = (wc.wc_flags & IBV_WC_WITH_INV) != 0;
  on_lease_message(ctx, a, header.kind, body, invalidates ? wc.invalidated_rkey : 0);
}

/// The peer closes, which comes true when all that it sent before is delivered.
void on_goodbye_message(EngineContext& ctx, Agent& a) noexcept {
  if (!is_holding(a)) return on_goodbye(ctx, a);
  if (a.goodbye_received) return malformed(ctx, a, wire::kMessageHeaderBytes);
  a.goodbye_received = a.closing = true;
  RendezvousReceive goodbye;
  goodbye.kind = RendezvousReceive::Kind::goodbye;
  goodbye.complete = true;
  queue_receive(ctx, a, goodbye);
}

/// Keeps a message, or without a block the notice of a write, behind one that is being pulled;
/// answers whether it did.
bool hold_message(EngineContext& ctx, Agent& a, Block* block, std::uint32_t length,
                  const ibv_wc& wc) noexcept {
  RendezvousReceive v;
  v.kind = block != nullptr ? RendezvousReceive::Kind::message : RendezvousReceive::Kind::write;
  v.block = block;
  v.data = block != nullptr ? block->payload : nullptr;
  v.length = length;
  v.has_immediate = (wc.wc_flags & IBV_WC_WITH_IMM) != 0;
  v.immediate = be32toh(wc.imm_data);
  v.complete = true;
  return queue_receive(ctx, a, v) != nullptr;
}

/// A message with its header in the block; answers whether the block was kept.
bool on_message_received(EngineContext& ctx, Agent& a, Block* block, const ibv_wc& wc) noexcept {
  wire::MessageHeader header{};
  const std::byte* at = block->payload - wire::kMessageHeaderBytes;
  if (!wire::decode(at, wc.byte_len, header)) [[unlikely]] {
    malformed(ctx, a, wc.byte_len);
    return false;
  }
  a.credit.header_granted = header.granted;
  if (header.kind != wire::MessageKind::data) [[unlikely]] {
    if (is_control_kind(header.kind)) {
      on_control_message(ctx, a, block, header, wc);
    } else if (header.kind == wire::MessageKind::goodbye) {
      on_goodbye_message(ctx, a);
    } else if (header.length >= peer_credits(a)) {
      malformed(ctx, a, wc.byte_len);  // the return takes a credit itself
    } else {
      on_credit_return(ctx, a, header.length);
    }
    return false;
  }
  if (peer_credits(a) == 0) [[unlikely]] {
    malformed(ctx, a, wc.byte_len);  // sent without credit
    return false;
  }
  use_credit(ctx, a, (header.flags & wire::message_flag::kWantCredit) != 0, is_holding(a));
  if (is_holding(a)) [[unlikely]]
    return hold_message(ctx, a, block, header.length, wc);
  Message message =
      detail::make<Message>(block, block->payload, header.length, be32toh(wc.imm_data),
                            (wc.wc_flags & IBV_WC_WITH_IMM) != 0, false);
  deliver(ctx, a, message);
  return detail::block_of(message) == nullptr;
}

/// A peer's write with immediate: the receive carries no bytes.
void on_write_notice(EngineContext& ctx, Agent& a, const ibv_wc& wc) noexcept {
  if (peer_credits(a) == 0) [[unlikely]]
    return malformed(ctx, a, wc.byte_len);
  // No header tells that the peer used its last credit: it is evident here.
  use_credit(ctx, a, peer_credits(a) == 1, is_holding(a));
  if (is_holding(a)) [[unlikely]]
    return (void)hold_message(ctx, a, nullptr, wc.byte_len, wc);
  Message message =
      detail::make<Message>(nullptr, nullptr, wc.byte_len, be32toh(wc.imm_data), true, true);
  deliver(ctx, a, message);
}

/// Whether the slot is of a queue that one connection has for itself.
inline bool is_own(EngineContext& ctx, std::uint32_t slot) noexcept {
  return ctx.receives.queue(slot) != kNone;
}

/// Puts a slot where it will be posted from. `own` is whether it is_own(), which the hot path knows
/// without a look.
template <bool own>
inline void recycle_slot(EngineContext& ctx, std::uint32_t slot) noexcept {
  own ? repost_own(ctx, slot) : repost(ctx, slot);
}

/// A block for a slot whose own went to the application; false if the pool is dry.
template <bool own>
bool fill_slot(EngineContext& ctx, std::uint32_t slot) noexcept {
  Block* block = ctx.arena->allocate(memory::PoolId::receive, ctx.config.connections.eager_bytes);
  ctx.receives.memory(slot) = block;
  if (block == nullptr) return false;
  aim_receive(ctx, slot, *block, own ? own_lkey(ctx, slot, *block) : block->lkey);
  recycle_slot<own>(ctx, slot);
  return true;
}
bool fill_slot(EngineContext& ctx, std::uint32_t slot) noexcept {
  return is_own(ctx, slot) ? fill_slot<true>(ctx, slot) : fill_slot<false>(ctx, slot);
}

template <bool own>
void refill_slot(EngineContext& ctx, std::uint32_t slot) noexcept {
  if (!fill_slot<own>(ctx, slot)) ctx.empty_slots[ctx.receive_shortage++] = slot;
}

/// Whether the peer may still send what we need.
bool takes_part(const Agent& a) noexcept {
  return a.state == ConnectionState::ready ||
         (a.stage == Stage::up &&
          (!a.rendezvous.sends.empty() || !a.control_queue.messages.empty()));
}

/// Grants what had to wait, where receives are there again.
void grant_to_waiters(EngineContext& ctx) noexcept {
  post_receives(ctx);
  std::uint32_t kept = 0;
  for (std::uint32_t i = 0; i < ctx.receive_waiters.count(); ++i) {
    Agent& a = ctx.receive_waiters[i];
    if (has_receive_shortage(ctx, a)) {
      ctx.receive_waiters.keep(kept++, a);
      continue;
    }
    a.credit.waits_for_receives = false;
    if (!takes_part(a)) continue;
    const std::uint32_t target = a.credit.received + a.credit.returned + a.credit.reserved;
    if (static_cast<std::int32_t>(target - a.credit.granted) <= 0) continue;
    a.credit.granted = target;
    queue_credit(ctx, a);
  }
  ctx.receive_waiters.cut(kept);
}

void fill_empty_slots(EngineContext& ctx) noexcept {
  while (ctx.receive_shortage != 0 && fill_slot(ctx, ctx.empty_slots[ctx.receive_shortage - 1]))
    --ctx.receive_shortage;
  if (ctx.receive_waiters.count() != 0) grant_to_waiters(ctx);
}

/// Tells peers of credit that no message took along, and what else there is to be told.
void advertise_credit(EngineContext& ctx) noexcept {
  std::uint32_t kept = 0;
  for (std::uint32_t i = 0; i < ctx.credit_queue.count(); ++i) {
    Agent& a = ctx.credit_queue[i];
    const bool told = a.control_queue.messages.empty() || post_control_messages(ctx, a);
    if ((a.credit.advertised != a.credit.granted || a.credit.write_again) && takes_part(a)) {
      if (a.credit.write_pending || !submit_control(ctx, a, OperationKind::credit_write)) {
        ctx.credit_queue.keep(kept++, a);  // when the one under way has ended
        continue;
      }
    }
    if (!told) {
      ctx.credit_queue.keep(kept++, a);  // when there is credit
      continue;
    }
    a.credit.in_credit_queue = a.credit.peer_needs_credit = a.credit.write_again = false;
  }
  ctx.credit_queue.cut(kept);
}

}  // namespace

void deliver(EngineContext& ctx, Agent& a, Message& message) noexcept {
  ++a.traffic.messages_received;
  a.traffic.bytes_received += message.size();
  if ((a.detour & kReplaced) != 0) [[unlikely]]
    replace_handlers(a);
  if (a.handlers.on_message) a.handlers.on_message(handle(ctx, a), message);
}

void grant_more(EngineContext& ctx, Agent& a) noexcept { grant(ctx, a); }

bool read_credit_cell(EngineContext& ctx, Agent& a) noexcept {
  if (a.credit.cell == nullptr) return true;
  const auto granted =
      static_cast<std::uint32_t>(a.credit.cell->granted.load(std::memory_order_acquire));
  const std::uint32_t news = granted - a.credit.granted_to_us;
  if (news >= 0x80000000u) return true;  // a message told of more already
  if (news > 0x8000) [[unlikely]] {
    bad_credit(ctx, a);
    return false;
  }
  a.credit.granted_to_us = granted;
  a.credit.header_granted =
      static_cast<std::uint16_t>(granted);  // what was told before is old by now
  a.credit.send_limit = granted - a.credit.returned_by_us;
  return true;
}

void queue_credit(EngineContext& ctx, Agent& a) noexcept {
  if (a.credit.in_credit_queue) return;
  a.credit.in_credit_queue = true;
  ctx.credit_queue.add(a);
}

void reserve_more_receives(EngineContext& ctx, Agent& a, std::uint32_t wanted) noexcept {
  if (a.own_queue != kNone) {  // nobody else could have them
    const std::uint32_t more =
        std::max(std::min(wanted, ctx.own_queues->share.credits), a.credit.reserved) -
        a.credit.reserved;
    ctx.own_queues->reserved_receives += more;
    a.credit.reserved += more;
    return;
  }
  std::uint32_t most = std::min(wanted, ctx.config.connections.credits);
  if (ctx.reservations_refused) most = std::min(most, fair_share(ctx));
  if (most <= a.credit.reserved) return;
  // A quarter is kept for connections to come, as many as there can be.
  const std::uint32_t to_come =
      std::min(ctx.agents.capacity() - ctx.agents.size(), ctx.reservable_receives / 4);
  const std::uint32_t taken = ctx.reserved_receives + to_come;
  const std::uint32_t free = ctx.reservable_receives - std::min(taken, ctx.reservable_receives);
  const std::uint32_t more = std::min(most - a.credit.reserved, free);
  a.credit.reserved += more;
  ctx.reserved_receives += more;
  ctx.reservations_refused = a.credit.reserved < most;
}

std::uint32_t fair_share(const EngineContext& ctx) noexcept {
  return std::max(ctx.reservable_receives / std::max(ctx.agents.size(), 1u), 1u);
}

void yield_credit(EngineContext& ctx, Agent& a) noexcept {
  if (a.own_queue != kNone || a.credit.reserved <= fair_share(ctx)) return;
  --a.credit.reserved;
  --ctx.reserved_receives;
}

namespace {

/// A receive that is not a message on a connection in order. Answers whether the block was kept.
bool on_other_receive(EngineContext& ctx, Agent& a, Block* block, const ibv_wc& wc) noexcept {
  if (a.stage == Stage::drain) queue_setup(ctx, a);  // it may be the last to wait for
  if (wc.status != IBV_WC_SUCCESS) {
    on_receive_failed(ctx, a, wc);
    return false;
  }
  a.liveness.last_heard = ctx.now;
  // A first message may overtake the last frame of the handshake, or our own last step.
  if (a.state == ConnectionState::exchanging) on_early_message(ctx, a);
  if (a.state != ConnectionState::ready) {
    if (a.state == ConnectionState::draining && wc.opcode == IBV_WC_RECV)
      on_message_while_draining(ctx, a, block, wc);
    return false;
  }
  if (wc.opcode != IBV_WC_RECV_RDMA_WITH_IMM) return on_message_received(ctx, a, block, wc);
  on_write_notice(ctx, a, wc);
  return false;
}

/// A receive that is not a plain message. Answers whether the block was kept.
[[gnu::noinline]] bool on_unusual_receive(EngineContext& ctx, Agent& a, Block* block,
                                          const ibv_wc& wc) noexcept {
  const bool message =
      a.state == ConnectionState::ready && is_success(wc) && wc.opcode == IBV_WC_RECV;
  return message ? on_message_received(ctx, a, block, wc) : on_other_receive(ctx, a, block, wc);
}

/// A receive of a queue pair that is no more. One of its own went back to its queue with it, and
/// may be posted to another queue pair by now.
[[gnu::cold, gnu::noinline]] void on_stale_receive(EngineContext& ctx, const ibv_wc& wc) noexcept {
  ++ctx.stats.stale_completions;
  if (is_own(ctx, slot_of(wc.wr_id))) return;
  --ctx.posted_receives;
  repost(ctx, slot_of(wc.wr_id));
}

/// Devices set others as they like: on RoCE, for one, that there is a GRH.
constexpr unsigned kUnusualFlags = IBV_WC_WITH_IMM | IBV_WC_WITH_INV;

/// Whether nothing but the delivery is to be done for the message that came with `header`.
inline bool is_plain(const EngineContext& ctx, const Agent& a, const ibv_wc& wc,
                     std::uint64_t header) noexcept {
  return is_success(wc) && wc.opcode == IBV_WC_RECV && (wc.wc_flags & kUnusualFlags) == 0 &&
         wire::is_plain(header, wc.byte_len) && a.state == ConnectionState::ready &&
         peer_credits(a) != 0 && !ctx.reservations_refused && a.detour == 0;
}

/// A message of an agent's; answers whether the block was kept.
inline bool on_receive(EngineContext& ctx, Agent& a, Block* block, const ibv_wc& wc) noexcept {
  const std::uint64_t header =
      wire::get(block->header + sizeof block->header - wire::kMessageHeaderBytes);
  if (!is_plain(ctx, a, wc, header)) [[unlikely]]
    return on_unusual_receive(ctx, a, block, wc);
  const std::uint32_t size = wc.byte_len - std::uint32_t{wire::kMessageHeaderBytes};
  a.credit.header_granted = wire::granted_of(header);
  ++a.credit.received;
  ++a.traffic.messages_received;
  a.traffic.bytes_received += size;
  Message message =
      detail::make<Message>(block, reinterpret_cast<std::byte*>(block + 1), size, 0, false, false);
  if (a.handlers.on_message) a.handlers.on_message(handle(ctx, a), message);
  return detail::block_of(message) == nullptr;
}

/// Receives of one queue pair in a row: its agent is looked up, and its credit settled, once.
/// Answers the first completion that is not of them.
template <bool own>
inline const ibv_wc* process_receives_of(EngineContext& ctx, Agent& a, const ibv_wc* wc,
                                         const ibv_wc* end) noexcept {
  const std::uint32_t qp_num = wc->qp_num;
  do {
    const std::uint32_t slot = slot_of(wc->wr_id);
    Block* const block = ctx.receives.memory(slot);
    --ctx.posted_receives;
    if (on_receive(ctx, a, block, *wc)) [[unlikely]] {
      refill_slot<own>(ctx, slot);
    } else {
      recycle_slot<own>(ctx, slot);
    }
  } while (++wc != end && wc->qp_num == qp_num && is_receive(wc->wr_id));
  a.liveness.last_heard = ctx.now;
  if (a.state == ConnectionState::ready) grant(ctx, a);
  return wc;
}

/// The same of a queue pair that does not share the receive queue, or is no more.
[[gnu::noinline]] const ibv_wc* process_other_receives(EngineContext& ctx, const ibv_wc* wc,
                                                       const ibv_wc* end) noexcept {
  Agent* const a = ctx.own_queues != nullptr ? ctx.own_queues->by_qpn.find(wc->qp_num) : nullptr;
  if (a != nullptr) return process_receives_of<true>(ctx, *a, wc, end);
  if (is_raw_receive(wc->wr_id)) return process_raw_receives(ctx, wc, end);
  on_stale_receive(ctx, *wc);
  return wc + 1;
}

const ibv_wc* process_receives(EngineContext& ctx, const ibv_wc* wc, const ibv_wc* end) noexcept {
  Agent* const a = ctx.by_qpn.find(wc->qp_num);
  if (a == nullptr) [[unlikely]]
    return process_other_receives(ctx, wc, end);
  return process_receives_of<false>(ctx, *a, wc, end);
}

}  // namespace

std::uint32_t process_completions(EngineContext& ctx, const ibv_wc* wcs, int count) noexcept {
  const ibv_wc* const end = wcs + count;
  for (const ibv_wc* wc = wcs + 1; wc < end; ++wc) {
    if (is_receive(wc->wr_id)) __builtin_prefetch(ctx.receives.memory(slot_of(wc->wr_id)));
  }
  std::uint32_t events = 0;
  for (const ibv_wc* wc = wcs; wc != end;) {
    if (!is_receive(wc->wr_id)) {
      events += on_send_completion(ctx, *wc++);
      continue;
    }
    const ibv_wc* const behind = process_receives(ctx, wc, end);
    events += static_cast<std::uint32_t>(behind - wc);
    wc = behind;
  }
  return events;
}

void on_message_while_draining(EngineContext& ctx, Agent& a, const Block* block,
                               const ibv_wc& wc) noexcept {
  // Messages that crossed our close are dropped; only the peer's own goodbye still matters, and
  // answers, for which it needs credit.
  wire::MessageHeader header{};
  if (!wire::decode(block->payload - wire::kMessageHeaderBytes, wc.byte_len, header)) return;
  if (header.kind == wire::MessageKind::goodbye) return on_goodbye(ctx, a);
  if (peer_credits(a) == 0) return;
  ++a.credit.received;
  if (!a.rendezvous.sends.empty()) grant_more(ctx, a);
  if (a.stage == Stage::up && header.kind == wire::MessageKind::rendezvous_offer)
    return on_rendezvous_offer(ctx, a, wc, {block->payload, header.length});
  if (a.rendezvous.sends.empty()) return;
  if (header.kind == wire::MessageKind::rendezvous_answer)
    on_rendezvous_answer(ctx, a, wc, {block->payload, header.length});
}

void finish_poll(EngineContext& ctx) noexcept {
  if (ctx.receive_shortage != 0) [[unlikely]]
    fill_empty_slots(ctx);
  // Receives first: credit told below counts on them.
  if (ctx.receives.count() >= ctx.list_length) post_receives(ctx);
  if (ctx.queued_agents != 0) [[unlikely]] {
    if (ctx.raw != nullptr) post_queued_raw_receives(ctx);
    post_rendezvous_reads(ctx);
  }
  flush_queued_agents(ctx);
  if (ctx.credit_queue.count() != 0) {
    advertise_credit(ctx);
    // Last, so that what is cancelled meanwhile is listed for the next poll.
    if (ctx.pending_cancellations != 0) run_cancel_callbacks(ctx);
    if (ctx.raw != nullptr) run_posted_callbacks(ctx);
    flush_queued_agents(ctx);
  }
}

namespace {

/// Without a queue to share all slots are connections' own; else those are beside it.
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
  ctx.reservable_receives = depth - ctx.config.queues.receive_postlist - kUnreservedReceives;
  ctx.list_length = ctx.config.queues.receive_postlist;
  ctx.shortage_allowed = kUnreservedReceives;
  if (domains != 0) make_own_queues(ctx, share, depth, domains);
}

}  // namespace

Result<void> post_first_receives(EngineContext& ctx) {
  make_receives(ctx);
  const std::uint32_t count = ctx.receives.size();
  ctx.empty_slots = std::make_unique<std::uint32_t[]>(count);
  const std::size_t bytes = ctx.config.connections.eager_bytes + wire::kMessageHeaderBytes;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (!fill_slot(ctx, i)) {
      return base::fail(Status::no_memory,
                        std::to_string(count) + " receives of " + std::to_string(bytes) + " bytes",
                        "memory.receive_bytes has room for " + std::to_string(i),
                        "raise memory.receive_bytes, or lower queues.receive_depth or "
                        "connections.own_domains");
    }
  }
  post_receives(ctx);
  return {};
}

}  // namespace spinwire::agent
