// Arrivals: receive completions, credit, and what a poll does at its end. Hot.
#include <endian.h>

#include <algorithm>
#include <string>

#include "agent/agent.h"
#include "agent/completion.h"
#include "base/error.h"

namespace spinwire::agent {
namespace {

inline bool is_success(const ibv_wc& wc) noexcept { return wc.status == IBV_WC_SUCCESS; }

void post_receives(Shared& s) noexcept {
  const std::uint32_t before = s.receives.count();
  // Never more than the queue was made for: a refusal leaves the rest for the next time.
  (void)s.receives.chain().post(s.device->srq());
  const std::uint32_t posted = before - s.receives.count();
  s.posted_receives += posted;
  s.stats.receives_posted += posted;
}

/// Puts a slot into the chain of receives to be posted.
inline void repost(Shared& s, std::uint32_t slot) noexcept {
  s.receives.add(slot);
  // At once when the list is full, not at the poll's end only: credit may be told before that.
  if (s.receives.count() >= s.list_length) [[unlikely]]
    post_receives(s);
}

/// Whether fewer receives are posted than this agent's peer might be granted.
bool lacks_receives(Shared& s, const Agent& a) noexcept {
  return a.own_queue != kNone ? lacks_own_receives(s, a) : s.deficit > kSpareReceives;
}

/// Credit has to wait until receives are posted for it; what was granted before is told to a peer
/// that has none left.
void starve(Shared& s, Agent& a) noexcept {
  if (a.grant_urgent && a.published != a.granted) list_grant(s, a);
  if (a.starved) return;
  a.starved = true;
  s.starved.add(a);
}

/// Lets the peer have credit up to its allotment, if receives are there for it.
inline void grant(Shared& s, Agent& a) noexcept {
  if (s.deficit > s.spare_receives && lacks_receives(s, a)) [[unlikely]]
    return starve(s, a);
  const std::uint32_t target = a.received + a.returned + a.allotment;
  if (static_cast<std::int32_t>(target - a.granted) <= 0) return;
  a.granted = target;
  // A message of ours may take it along; else it is told once it is worth a write of its own.
  if (a.grant_urgent || (target - a.published) * 2 > a.allotment) list_grant(s, a);
}

inline bool is_holding(const Agent& a) noexcept { return (a.detour & kHolding) != 0; }

/// A message's credit is used: its receive will be posted again for whoever has credit next, which
/// take_run() tells the peer, once for all messages of a batch.
inline void count_credit(Shared& s, Agent& a, bool wants_more, bool held) noexcept {
  ++a.received;
  if (held) [[unlikely]]
    return;  // hold() takes it out of the allotment
  if (s.scarce) [[unlikely]]
    yield_credit(s, a);
  if (wants_more) [[unlikely]] {
    grow_allotment(s, a, a.allotment * 2 + 14);
    a.grant_urgent = true;
  }
}

void malformed(Shared& s, Agent& a, std::uint32_t bytes) noexcept {
  fail_bad(s, a,
           {Status::protocol, "take a message of " + std::to_string(bytes) + " bytes",
            "no valid header in front of it", "the peer is broken or hostile"});
}

[[gnu::cold, gnu::noinline]] void bad_credit(Shared& s, Agent& a) noexcept {
  fail_bad(s, a,
           {Status::protocol, "read the credit that the peer granted",
            "a count that no peer of this protocol writes", "the peer is broken or hostile"});
}

/// The peer gives credit back, by a message that took one itself. What it could not know of stays
/// allotted: credit that is on its way to it; what it was not told of is taken back.
void take_return(Shared& s, Agent& a, std::uint32_t credits) noexcept {
  ++a.received;
  a.returned += credits;
  a.granted = a.published;
  const std::uint32_t kept = std::max(peer_credits(a), 1u);
  if (kept < a.allotment) {
    allotted_with(s, a) -= a.allotment - kept;
    a.allotment = kept;
  }
  grant(s, a);
}

/// Whether it costs credit without being a message of the application's.
constexpr bool is_note(wire::MessageKind kind) noexcept { return wire::body_bytes(kind) != 0; }

void take_note(Shared& s, Agent& a, const Block* block, const wire::MessageHeader& header,
               const ibv_wc& wc) noexcept {
  if (peer_credits(a) == 0) return malformed(s, a, wc.byte_len);
  count_credit(s, a, (header.flags & wire::message_flag::kWantCredit) != 0,
               header.kind == wire::MessageKind::offer || is_holding(a));
  const std::span<const std::byte> body(block->payload, header.length);
  if (header.kind == wire::MessageKind::offer) return take_offer(s, a, wc, body);
  if (header.kind == wire::MessageKind::answer) return take_answer(s, a, wc, body);
  const bool invalidates = (wc.wc_flags & IBV_WC_WITH_INV) != 0;
  take_lease_message(s, a, header.kind, body, invalidates ? wc.invalidated_rkey : 0);
}

/// The peer closes, which comes true when all that it sent before is delivered.
void take_goodbye(Shared& s, Agent& a) noexcept {
  if (!is_holding(a)) return on_goodbye(s, a);
  if (a.goodbye_received) return malformed(s, a, wire::kMessageHeaderBytes);
  a.goodbye_received = a.closing = true;
  Arrival goodbye;
  goodbye.kind = Arrival::Kind::goodbye;
  goodbye.complete = true;
  hold(s, a, goodbye);
}

/// Keeps a message, or without a block the notice of a write, behind one that is being pulled;
/// answers whether it did.
bool hold_message(Shared& s, Agent& a, Block* block, std::uint32_t length,
                  const ibv_wc& wc) noexcept {
  Arrival v;
  v.kind = block != nullptr ? Arrival::Kind::message : Arrival::Kind::write;
  v.block = block;
  v.data = block != nullptr ? block->payload : nullptr;
  v.length = length;
  v.has_immediate = (wc.wc_flags & IBV_WC_WITH_IMM) != 0;
  v.immediate = be32toh(wc.imm_data);
  v.complete = true;
  return hold(s, a, v) != nullptr;
}

/// A message with its header in the block; answers whether the block was kept.
bool take_message(Shared& s, Agent& a, Block* block, const ibv_wc& wc) noexcept {
  wire::MessageHeader header{};
  const std::byte* at = block->payload - wire::kMessageHeaderBytes;
  if (!wire::decode(at, wc.byte_len, header)) [[unlikely]] {
    malformed(s, a, wc.byte_len);
    return false;
  }
  a.told_granted = header.granted;
  if (header.kind != wire::MessageKind::data) [[unlikely]] {
    if (is_note(header.kind)) {
      take_note(s, a, block, header, wc);
    } else if (header.kind == wire::MessageKind::goodbye) {
      take_goodbye(s, a);
    } else if (header.length >= peer_credits(a)) {
      malformed(s, a, wc.byte_len);  // the return takes a credit itself
    } else {
      take_return(s, a, header.length);
    }
    return false;
  }
  if (peer_credits(a) == 0) [[unlikely]] {
    malformed(s, a, wc.byte_len);  // sent without credit
    return false;
  }
  count_credit(s, a, (header.flags & wire::message_flag::kWantCredit) != 0, is_holding(a));
  if (is_holding(a)) [[unlikely]]
    return hold_message(s, a, block, header.length, wc);
  Message message({block, block->payload, header.length, be32toh(wc.imm_data),
                   (wc.wc_flags & IBV_WC_WITH_IMM) != 0, false});
  deliver(s, a, message);
  return message.taken();
}

/// A peer's write with immediate: the receive carries no bytes.
void take_write(Shared& s, Agent& a, const ibv_wc& wc) noexcept {
  if (peer_credits(a) == 0) [[unlikely]]
    return malformed(s, a, wc.byte_len);
  // No header tells that the peer used its last credit: it is evident here.
  count_credit(s, a, peer_credits(a) == 1, is_holding(a));
  if (is_holding(a)) [[unlikely]]
    return (void)hold_message(s, a, nullptr, wc.byte_len, wc);
  Message message({nullptr, nullptr, wc.byte_len, be32toh(wc.imm_data), true, true});
  deliver(s, a, message);
}

/// Whether the slot is of a queue that one connection has for itself.
inline bool is_own(Shared& s, std::uint32_t slot) noexcept {
  return s.receives.queue(slot) != kNone;
}

/// Puts a slot where it will be posted from. `own` is whether it is_own(), which the hot path knows
/// without a look.
template <bool own>
inline void give_back(Shared& s, std::uint32_t slot) noexcept {
  own ? repost_own(s, slot) : repost(s, slot);
}

/// A block for a slot whose own went to the application; false if the pool is dry.
template <bool own>
bool fill_slot(Shared& s, std::uint32_t slot) noexcept {
  Block* block = s.arena->allocate(memory::PoolId::receive, s.config.connections.eager_bytes);
  s.receives.memory(slot) = block;
  if (block == nullptr) return false;
  aim_receive(s, slot, *block, own ? own_lkey(s, slot, *block) : block->lkey);
  give_back<own>(s, slot);
  return true;
}
bool fill_slot(Shared& s, std::uint32_t slot) noexcept {
  return is_own(s, slot) ? fill_slot<true>(s, slot) : fill_slot<false>(s, slot);
}

template <bool own>
void replace_kept(Shared& s, std::uint32_t slot) noexcept {
  if (!fill_slot<own>(s, slot)) s.missing[s.deficit++] = slot;
}

/// Whether the peer may still send what we need.
bool takes_part(const Agent& a) noexcept {
  return a.state == ConnectionState::ready ||
         (a.stage == Stage::up && (a.transfers.offered != nullptr || !a.transfers.notes.empty()));
}

/// Grants what had to wait, where receives are there again.
void feed_starved(Shared& s) noexcept {
  post_receives(s);
  std::uint32_t kept = 0;
  for (std::uint32_t i = 0; i < s.starved.count(); ++i) {
    Agent& a = s.starved[i];
    if (lacks_receives(s, a)) {
      s.starved.keep(kept++, a);
      continue;
    }
    a.starved = false;
    if (!takes_part(a)) continue;
    const std::uint32_t target = a.received + a.returned + a.allotment;
    if (static_cast<std::int32_t>(target - a.granted) <= 0) continue;
    a.granted = target;
    list_grant(s, a);
  }
  s.starved.cut(kept);
}

void fill_deficit(Shared& s) noexcept {
  while (s.deficit != 0 && fill_slot(s, s.missing[s.deficit - 1])) --s.deficit;
  if (s.starved.count() != 0) feed_starved(s);
}

/// Tells peers of credit that no message took along, and what else there is to be told.
void tell_credit(Shared& s) noexcept {
  std::uint32_t kept = 0;
  for (std::uint32_t i = 0; i < s.grants.count(); ++i) {
    Agent& a = s.grants[i];
    const bool told = a.transfers.notes.empty() || post_notes(s, a);
    if ((a.published != a.granted || a.tell_again) && takes_part(a)) {
      if (a.credit_write_pending || !submit_control(s, a, OperationKind::credit_write)) {
        s.grants.keep(kept++, a);  // when the one under way has ended
        continue;
      }
    }
    if (!told) {
      s.grants.keep(kept++, a);  // when there is credit
      continue;
    }
    a.grant_listed = a.grant_urgent = a.tell_again = false;
  }
  s.grants.cut(kept);
}

}  // namespace

void deliver(Shared& s, Agent& a, Message& message) noexcept {
  ++a.messages_received;
  a.bytes_received += message.size();
  if ((a.detour & kReplaced) != 0) [[unlikely]]
    replace_handlers(a);
  if (a.handlers.on_message) a.handlers.on_message(handle(s, a), message);
}

void grant_more(Shared& s, Agent& a) noexcept { grant(s, a); }

bool read_credit_cell(Shared& s, Agent& a) noexcept {
  if (a.cell == nullptr) return true;
  const auto granted = static_cast<std::uint32_t>(a.cell->granted.load(std::memory_order_acquire));
  const std::uint32_t news = granted - a.granted_to_us;
  if (news >= 0x80000000u) return true;  // a message told of more already
  if (news > 0x8000) [[unlikely]] {
    bad_credit(s, a);
    return false;
  }
  a.granted_to_us = granted;
  a.told_granted = static_cast<std::uint16_t>(granted);  // what was told before is old by now
  a.send_limit = granted - a.returned_by_us;
  return true;
}

void list_grant(Shared& s, Agent& a) noexcept {
  if (a.grant_listed) return;
  a.grant_listed = true;
  s.grants.add(a);
}

void grow_allotment(Shared& s, Agent& a, std::uint32_t wanted) noexcept {
  if (a.own_queue != kNone) {  // nobody else could have them
    const std::uint32_t more =
        std::max(std::min(wanted, s.own->share.credits), a.allotment) - a.allotment;
    s.own->allotted += more;
    a.allotment += more;
    return;
  }
  std::uint32_t most = std::min(wanted, s.config.connections.credits);
  if (s.scarce) most = std::min(most, fair_share(s));
  if (most <= a.allotment) return;
  // A quarter is kept for connections to come, as many as there can be.
  const std::uint32_t to_come =
      std::min(s.agents.capacity() - s.agents.size(), s.receive_capacity / 4);
  const std::uint32_t taken = s.allotted + to_come;
  const std::uint32_t free = s.receive_capacity - std::min(taken, s.receive_capacity);
  const std::uint32_t more = std::min(most - a.allotment, free);
  a.allotment += more;
  s.allotted += more;
  s.scarce = a.allotment < most;
}

std::uint32_t fair_share(const Shared& s) noexcept {
  return std::max(s.receive_capacity / std::max(s.agents.size(), 1u), 1u);
}

void yield_credit(Shared& s, Agent& a) noexcept {
  if (a.own_queue != kNone || a.allotment <= fair_share(s)) return;
  --a.allotment;
  --s.allotted;
}

namespace {

/// A receive that is not a message on a connection in order. Answers whether the block was kept.
bool take_other(Shared& s, Agent& a, Block* block, const ibv_wc& wc) noexcept {
  if (a.stage == Stage::drain) list_setup(s, a);  // it may be the last to wait for
  if (wc.status != IBV_WC_SUCCESS) {
    on_receive_failed(s, a, wc);
    return false;
  }
  a.last_heard = s.now;
  // A first message may overtake the last frame of the handshake, or our own last step.
  if (a.state == ConnectionState::exchanging) overtake_handshake(s, a);
  if (a.state != ConnectionState::ready) {
    if (a.state == ConnectionState::draining && wc.opcode == IBV_WC_RECV)
      take_while_draining(s, a, block, wc);
    return false;
  }
  if (wc.opcode != IBV_WC_RECV_RDMA_WITH_IMM) return take_message(s, a, block, wc);
  take_write(s, a, wc);
  return false;
}

/// A receive that is not a plain message. Answers whether the block was kept.
[[gnu::noinline]] bool take_unusual(Shared& s, Agent& a, Block* block, const ibv_wc& wc) noexcept {
  const bool message =
      a.state == ConnectionState::ready && is_success(wc) && wc.opcode == IBV_WC_RECV;
  return message ? take_message(s, a, block, wc) : take_other(s, a, block, wc);
}

/// A receive of a queue pair that is no more. One of its own went back to its queue with it, and
/// may be posted to another queue pair by now.
[[gnu::cold, gnu::noinline]] void take_stray(Shared& s, const ibv_wc& wc) noexcept {
  ++s.stats.stale_completions;
  if (is_own(s, slot_of(wc.wr_id))) return;
  --s.posted_receives;
  repost(s, slot_of(wc.wr_id));
}

/// Devices set others as they like: on RoCE, for one, that there is a GRH.
constexpr unsigned kUnusualFlags = IBV_WC_WITH_IMM | IBV_WC_WITH_INV;

/// Whether nothing but the delivery is to be done for the message that came with `header`.
inline bool is_plain(const Shared& s, const Agent& a, const ibv_wc& wc,
                     std::uint64_t header) noexcept {
  return is_success(wc) && wc.opcode == IBV_WC_RECV && (wc.wc_flags & kUnusualFlags) == 0 &&
         wire::is_plain(header, wc.byte_len) && a.state == ConnectionState::ready &&
         peer_credits(a) != 0 && !s.scarce && a.detour == 0;
}

/// A message of an agent's; answers whether the block was kept.
inline bool take_receive(Shared& s, Agent& a, Block* block, const ibv_wc& wc) noexcept {
  const std::uint64_t header =
      wire::get(block->header + sizeof block->header - wire::kMessageHeaderBytes);
  if (!is_plain(s, a, wc, header)) [[unlikely]]
    return take_unusual(s, a, block, wc);
  const std::uint32_t size = wc.byte_len - std::uint32_t{wire::kMessageHeaderBytes};
  a.told_granted = wire::granted_of(header);
  ++a.received;
  ++a.messages_received;
  a.bytes_received += size;
  Message message({block, reinterpret_cast<std::byte*>(block + 1), size, 0, false, false});
  if (a.handlers.on_message) a.handlers.on_message(handle(s, a), message);
  return message.taken();
}

/// Receives of one queue pair in a row: its agent is looked up, and its credit settled, once.
/// Answers the first completion that is not of them.
template <bool own>
inline const ibv_wc* take_run_of(Shared& s, Agent& a, const ibv_wc* wc,
                                 const ibv_wc* end) noexcept {
  const std::uint32_t qp_num = wc->qp_num;
  do {
    const std::uint32_t slot = slot_of(wc->wr_id);
    Block* const block = s.receives.memory(slot);
    --s.posted_receives;
    if (take_receive(s, a, block, *wc)) [[unlikely]] {
      replace_kept<own>(s, slot);
    } else {
      give_back<own>(s, slot);
    }
  } while (++wc != end && wc->qp_num == qp_num && is_receive(wc->wr_id));
  a.last_heard = s.now;
  if (a.state == ConnectionState::ready) grant(s, a);
  return wc;
}

/// The same of a queue pair that does not share the receive queue, or is no more.
[[gnu::noinline]] const ibv_wc* take_other_run(Shared& s, const ibv_wc* wc,
                                               const ibv_wc* end) noexcept {
  Agent* const a = s.own != nullptr ? s.own->by_qpn.find(wc->qp_num) : nullptr;
  if (a != nullptr) return take_run_of<true>(s, *a, wc, end);
  if (is_raw_receive(wc->wr_id)) return take_raw_run(s, wc, end);
  take_stray(s, *wc);
  return wc + 1;
}

const ibv_wc* take_run(Shared& s, const ibv_wc* wc, const ibv_wc* end) noexcept {
  Agent* const a = s.by_qpn.find(wc->qp_num);
  if (a == nullptr) [[unlikely]]
    return take_other_run(s, wc, end);
  return take_run_of<false>(s, *a, wc, end);
}

}  // namespace

std::uint32_t take_completions(Shared& s, const ibv_wc* wcs, int count) noexcept {
  const ibv_wc* const end = wcs + count;
  for (const ibv_wc* wc = wcs + 1; wc < end; ++wc) {
    if (is_receive(wc->wr_id)) __builtin_prefetch(s.receives.memory(slot_of(wc->wr_id)));
  }
  std::uint32_t events = 0;
  for (const ibv_wc* wc = wcs; wc != end;) {
    if (!is_receive(wc->wr_id)) {
      events += on_send_completion(s, *wc++);
      continue;
    }
    const ibv_wc* const behind = take_run(s, wc, end);
    events += static_cast<std::uint32_t>(behind - wc);
    wc = behind;
  }
  return events;
}

void take_while_draining(Shared& s, Agent& a, const Block* block, const ibv_wc& wc) noexcept {
  // Messages that crossed our close are dropped; only the peer's own goodbye still matters, and
  // answers, for which it needs credit.
  wire::MessageHeader header{};
  if (!wire::decode(block->payload - wire::kMessageHeaderBytes, wc.byte_len, header)) return;
  if (header.kind == wire::MessageKind::goodbye) return on_goodbye(s, a);
  if (peer_credits(a) == 0) return;
  ++a.received;
  if (a.transfers.offered != nullptr) grant_more(s, a);
  if (a.stage == Stage::up && header.kind == wire::MessageKind::offer)
    return take_offer(s, a, wc, {block->payload, header.length});
  if (a.transfers.offered == nullptr) return;
  if (header.kind == wire::MessageKind::answer)
    take_answer(s, a, wc, {block->payload, header.length});
}

void finish_poll(Shared& s) noexcept {
  if (s.deficit != 0) [[unlikely]]
    fill_deficit(s);
  // Receives first: credit told below counts on them.
  if (s.receives.count() >= s.list_length) post_receives(s);
  if (s.lined_up != 0) [[unlikely]] {
    if (s.raw != nullptr) post_raw_listed(s);
    pump_pulls(s);
  }
  flush_all(s);
  if (s.grants.count() != 0) {
    tell_credit(s);
    // Last, so that what is cancelled meanwhile is listed for the next poll.
    if (s.untold != 0) tell_cancelled(s);
    if (s.raw != nullptr) tell_raw_posted(s);
    flush_all(s);
  }
}

namespace {

/// Without a queue to share all slots are connections' own; else those are beside it.
void make_receives(Shared& s) {
  const std::uint32_t depth = s.config.queues.receive_depth;
  if (s.device->srq() == nullptr) {
    const OwnShare share = own_share(s.config, s.device->info().own_receives);
    s.receives.make(depth, receive_id);
    make_own_queues(s, share, 0, std::min(depth / share.slots, s.config.connections.maximum));
    s.config.connections.credits = share.credits;
    s.receive_capacity = s.own->queues.capacity() * share.credits;
    s.list_length = 1;
    return;
  }
  const OwnShare share = own_share(s.config, s.device->domain_receives());
  const std::uint32_t domains = s.config.connections.own_domains;
  s.receives.make(depth + domains * share.slots, receive_id);
  for (std::uint32_t i = 0; i < depth; ++i) s.receives.queue(i) = kNone;
  s.receive_capacity = depth - s.config.queues.receive_postlist - kSpareReceives;
  s.list_length = s.config.queues.receive_postlist;
  s.spare_receives = kSpareReceives;
  if (domains != 0) make_own_queues(s, share, depth, domains);
}

}  // namespace

Result<void> post_first_receives(Shared& s) {
  make_receives(s);
  const std::uint32_t count = s.receives.size();
  s.missing = std::make_unique<std::uint32_t[]>(count);
  const std::size_t bytes = s.config.connections.eager_bytes + wire::kMessageHeaderBytes;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (!fill_slot(s, i)) {
      return base::fail(Status::no_memory,
                        std::to_string(count) + " receives of " + std::to_string(bytes) + " bytes",
                        "memory.receive_bytes has room for " + std::to_string(i),
                        "raise memory.receive_bytes, or lower queues.receive_depth or "
                        "connections.own_domains");
    }
  }
  post_receives(s);
  return {};
}

}  // namespace spinwire::agent
