// The receiver's side of rendezvous: READs fetch the messages, and the connections take turns.
// Later arrivals wait until the message is delivered.
#include <endian.h>

#include <algorithm>
#include <string>

#include "agent/agent.h"
#include "agent/submit.h"
#include "base/error.h"
#include "base/internals.h"
#include "verbs/direct_messages.h"

namespace spinwire::agent {
namespace {

using Kind = RendezvousReceive::Kind;
using wire::RendezvousVerdict;

void fail_offer(EngineContext& ctx, Agent& a, const char* found) noexcept {
  fail_protocol(ctx, a,
                {Status::protocol, "receive the offer of a rendezvous message", found,
                 base::kProtocolRemedy});
}

void enqueue(EngineContext& ctx, AgentQueue& queue, Agent& a) noexcept {
  a.rendezvous.queue = &queue;
  ++ctx.queued_agents;
  queue.push_back(a);
}

Agent& dequeue(EngineContext& ctx, AgentQueue& queue) noexcept {
  Agent& a = queue.pop_front();
  a.rendezvous.queue = nullptr;
  --ctx.queued_agents;
  return a;
}

/// Whether another source has READs, or bytes to read.
bool do_others_read(const EngineContext& ctx, const SourceAccount& s) noexcept {
  for (const RendezvousPool::CountedRead& each : ctx.rendezvous->reads) {
    if (each.agent != nullptr && each.agent->source != &s) return true;
  }
  return !ctx.rendezvous->reader_turns.empty();
}

/// Lets the agent's source have turns, if it has bytes to read and may post a READ.
void take_turns(EngineContext& ctx, SourceAccount& s) noexcept {
  if (s.readers.is_listed || s.readers.agents.empty() ||
      (s.reads >= kRendezvousReadsPerSource && do_others_read(ctx, s)))
    return;
  s.readers.is_listed = true;
  ctx.rendezvous->reader_turns.push_back(s);
}

/// The agent has bytes to read.
void enqueue_reader(EngineContext& ctx, Agent& a) noexcept {
  enqueue(ctx, a.source->readers.agents, a);
  take_turns(ctx, *a.source);
}

/// A place for one more READ; null if all are in use, and no READ there is overdue.
RendezvousPool::CountedRead* find_place(EngineContext& ctx) noexcept {
  const std::uint64_t longest = ctx.clock.ticks(kOverdueRead);
  for (RendezvousPool::CountedRead& each : ctx.rendezvous->reads) {
    if (each.agent == nullptr || ctx.now - std::min(each.since, ctx.now) > longest) return &each;
  }
  return nullptr;
}

/// The agent's oldest READ has ended.
void uncount_read(EngineContext& ctx, Agent& a) noexcept {
  --a.rendezvous.reads_outstanding;
  --a.source->reads;
  RendezvousPool::CountedRead* oldest = nullptr;
  for (RendezvousPool::CountedRead& each : ctx.rendezvous->reads) {
    if (each.agent == &a && (oldest == nullptr || each.since < oldest->since)) oldest = &each;
  }
  // One that is overdue has lost its place.
  if (oldest != nullptr) oldest->agent = nullptr;
  take_turns(ctx, *a.source);
}

/// The first message from `r` on that has bytes to read.
RendezvousReceive* next_to_read(RendezvousReceive* r) noexcept {
  while (r != nullptr && (r->kind != Kind::rendezvous || r->complete || r->requested == r->length))
    r = r->next;
  return r;
}

void send_answer(EngineContext& ctx, Agent& a, const RendezvousReceive& r,
                 RendezvousVerdict verdict) noexcept {
  ControlMessage message = make_control_message(
      wire::MessageKind::rendezvous_answer, wire::encode(wire::RendezvousAnswer{r.id, verdict}));
  if (r.invalidate) message.invalidate = r.rkey;
  queue_control_message(ctx, a, message);
}

void refuse(EngineContext& ctx, Agent& a, RendezvousReceive& r,
            RendezvousVerdict verdict) noexcept {
  r.complete = r.refused = true;
  send_answer(ctx, a, r, verdict);
}

/// Gives one record to the application. The record is free before the callback, which may end the
/// connection.
void deliver_receive(EngineContext& ctx, Agent& a, RendezvousReceive& record) noexcept {
  const RendezvousReceive r = record;
  ctx.rendezvous->receives.release(record.index);
  if (r.kind == Kind::goodbye) return on_goodbye(ctx, a);
  if (!r.refused) {
    Block* const block = r.named ? nullptr : r.block;
    Message message = detail::make<Message>(block, r.data, r.length, r.immediate, r.has_immediate,
                                            r.kind == Kind::write);
    deliver(ctx, a, message);
    if (block != nullptr && detail::block_of(message) == nullptr) return;
  }
  if (r.block != nullptr) detail::release(r.block);
}

/// The receive that a held message has kept may be used again.
void give_receive_back(Agent& a, const RendezvousReceive& r) noexcept {
  if (!r.credited) return;
  ++a.credit.reserved;
  --a.rendezvous.credited;
}

/// Delivers the complete records at the front of the queue.
void deliver_complete(EngineContext& ctx, Agent& a) noexcept {
  auto& receives = a.rendezvous.receives;
  while (!receives.empty() && receives.front()->complete && takes_messages(a)) {
    RendezvousReceive& r = receives.pop_front();
    if (receives.empty()) a.slow_path &= static_cast<std::uint8_t>(~kRendezvousAhead);
    give_receive_back(a, r);
    deliver_receive(ctx, a, r);
  }
  if (takes_messages(a)) grant_credit(ctx, a);
}

/// Finds a block to read into; false if the pool has none.
bool find_block(EngineContext& ctx, const Agent& a, RendezvousReceive& r) noexcept {
  if (r.block != nullptr) return true;
  r.block = ctx.arena->allocate(memory::PoolId::rendezvous, r.length, a.rendezvous.reuse);
  if (r.block == nullptr) return false;
  r.data = r.block->payload;
  return true;
}

/// False: all operation records are in use.
bool post_read(EngineContext& ctx, Agent& a, RendezvousReceive& r,
               RendezvousPool::CountedRead& place) noexcept {
  Operation* const op = ctx.operations.acquire_for_agent();
  if (op == nullptr) return false;
  const std::uint32_t bytes = std::min(r.length - r.requested, kRendezvousReadBytes);
  begin<OperationKind::rendezvous_read>(a, *op, r.block, bytes, {});
  op->header_in_headroom = false;
  op->subject = bytes;
  // The sender keeps the message until the answer, which is sent after the READ.
  op->wr.send_flags = ctx.direct != nullptr ? verbs::kMayRunAhead : 0;
  if (r.is_local) op->wr.send_flags |= verbs::kNamedByPeer;
  op->sges[0] = {reinterpret_cast<std::uint64_t>(r.data + r.requested), bytes, r.block->lkey};
  op->wr.wr.rdma.remote_addr = r.remote + r.requested;
  op->wr.wr.rdma.rkey = r.rkey;
  if (a.domain != nullptr) use_own_key(ctx, *a.domain, *op);
  r.requested += bytes;
  append(a, *op);
  queue_flush(ctx, a);
  ++a.rendezvous.reads_outstanding;
  ++a.source->reads;
  place = {&a, ctx.now};
  return true;
}

/// Moves agents whose message has found a block to the readers.
void feed_buffer_waiters(EngineContext& ctx) noexcept {
  AgentQueue& waiters = ctx.rendezvous->buffer_waiters;
  while (!waiters.empty()) {
    Agent& a = *waiters.front();
    RendezvousReceive* const r = a.rendezvous.reading;
    const bool goes_on = takes_messages(a) && r != nullptr;
    if (goes_on && !find_block(ctx, a, *r)) return;
    (void)dequeue(ctx, waiters);
    if (goes_on) enqueue_reader(ctx, a);
  }
}

/// Asks the application for a destination.
void call_on_offer(EngineContext& ctx, Agent& a, RendezvousReceive& r) noexcept {
  use_next_handlers(a);
  if (!a.handlers.on_offer) return;
  Offer offer = detail::make<Offer>(&ctx, &a, r.length,
                                    r.has_immediate ? std::optional(r.immediate) : std::nullopt);
  a.handlers.on_offer(handle(ctx, a), offer);
  if (!takes_messages(a)) return;  // closing has answered the offer
  if (detail::Internals::is_refused(offer)) return refuse(ctx, a, r, RendezvousVerdict::refused);
  const BufferSlice& to = detail::Internals::destination(offer);
  if (!to) return;
  r.block = detail::block_of(to);
  detail::retain(r.block);
  r.data = to.data();
  r.named = true;
}

/// Posts the next READ of an agent, or lets it wait for a block. False: all operation records are
/// in use.
bool read_next(EngineContext& ctx, Agent& a, RendezvousPool::CountedRead& place) noexcept {
  RendezvousPool& all = *ctx.rendezvous;
  Rendezvous& mine = a.rendezvous;
  RendezvousReceive* const r = mine.reading;
  if (r == nullptr || !takes_messages(a)) return true;
  // A message must not overtake others that wait for a block: otherwise short messages would take
  // the blocks that a long one waits for.
  if (r->block == nullptr && (!all.buffer_waiters.empty() || !find_block(ctx, a, *r))) {
    r->deadline = ctx.now + ctx.clock.ticks(ctx.config.connections.rendezvous_timeout);
    enqueue(ctx, all.buffer_waiters, a);
    return true;
  }
  if (!post_read(ctx, a, *r, place)) return false;
  if (r->requested == r->length) mine.reading = next_to_read(r->next);
  if (mine.reading != nullptr && mine.reads_outstanding < kRendezvousReadsPerAgent)
    enqueue_reader(ctx, a);
  return true;
}

/// Reads an offer of either kind. Returns what is wrong with it; null: nothing.
const char* read_offer(const EngineContext& ctx, const ibv_wc& wc, wire::MessageKind kind,
                       std::span<const std::byte> body, RendezvousReceive& r) noexcept {
  constexpr const char* kMalformed = "it is malformed";
  r.kind = Kind::rendezvous;
  if (kind == wire::MessageKind::local_offer) {
    wire::LocalOffer offer;
    if (!reads_local_offers(ctx))
      return "it names memory by a local key, which the device does not read";
    if (!wire::decode(body, offer)) return kMalformed;
    r.length = offer.length;
    r.has_immediate = offer.has_immediate;
    r.immediate = offer.immediate;
    r.remote = offer.address;
    r.rkey = offer.lkey;
    r.id = offer.id;
    r.is_local = true;
    return nullptr;
  }
  wire::RendezvousOffer offer;
  if (!wire::decode(body, offer)) return kMalformed;
  r.length = offer.length;
  r.has_immediate = (wc.wc_flags & IBV_WC_WITH_IMM) != 0;
  r.immediate = be32toh(wc.imm_data);
  r.remote = offer.address;
  r.rkey = offer.rkey;
  r.id = offer.id;
  r.invalidate = offer.invalidate;
  return nullptr;
}

}  // namespace

bool reads_local_offers(const EngineContext& ctx) noexcept {
  return ctx.device->provider().direct_messages != nullptr;
}

Agent*& next_in_rendezvous(Agent& a) noexcept { return a.rendezvous.next; }

RendezvousReceive* queue_receive(EngineContext& ctx, Agent& a,
                                 const RendezvousReceive& what) noexcept {
  // There is a record for each receive, and one for the goodbye of each connection.
  const std::uint32_t index = ctx.rendezvous->receives.acquire();
  if (index == kNone) {
    fail(ctx, a,
         {Status::limit, "queue a message behind a rendezvous message", "all records are in use",
          "report this as a defect"});
    return nullptr;
  }
  RendezvousReceive& r = ctx.rendezvous->receives.at(index);
  r = what;
  r.index = index;
  a.rendezvous.receives.push_back(r);
  a.slow_path |= kRendezvousAhead;
  // A queued message keeps its credit, so the peer has no more messages here than it was granted.
  r.credited = r.kind != Kind::goodbye && a.credit.reserved != 0;
  if (r.credited) {
    --a.credit.reserved;
    ++a.rendezvous.credited;
  }
  return &r;
}

void on_rendezvous_offer(EngineContext& ctx, Agent& a, const ibv_wc& wc, wire::MessageKind kind,
                         std::span<const std::byte> body) noexcept {
  const Config::Connections& c = ctx.config.connections;
  RendezvousReceive offered;
  if (const char* const wrong = read_offer(ctx, wc, kind, body, offered); wrong != nullptr)
    return fail_offer(ctx, a, wrong);
  if (c.max_message_bytes == c.eager_bytes)
    return fail_offer(ctx, a, "connections.max_message_bytes is no more than eager_bytes here");
  if (offered.length > c.max_message_bytes)
    return fail_offer(ctx, a, "it is longer than connections.max_message_bytes");
  if (!takes_messages(a)) return send_answer(ctx, a, offered, RendezvousVerdict::closing);
  RendezvousReceive* const queued = queue_receive(ctx, a, offered);
  if (queued == nullptr) return;
  RendezvousReceive& r = *queued;
  call_on_offer(ctx, a, r);
  if (!takes_messages(a)) return;  // the callback has closed the connection
  if (!r.complete && !r.named && !ctx.arena->fits(memory::PoolId::rendezvous, r.length))
    refuse(ctx, a, r, RendezvousVerdict::no_room);
  if (r.complete) return deliver_complete(ctx, a);
  Rendezvous& mine = a.rendezvous;
  if (mine.reading == nullptr) mine.reading = &r;
  if (mine.queue == nullptr && mine.reads_outstanding < kRendezvousReadsPerAgent)
    enqueue_reader(ctx, a);
  visit_at_end_of_poll(ctx, a);  // the end of the poll posts the first READ
}

void post_rendezvous_reads(EngineContext& ctx) noexcept {
  RendezvousPool& all = *ctx.rendezvous;
  if (!all.buffer_waiters.empty()) feed_buffer_waiters(ctx);
  while (!all.reader_turns.empty()) {
    RendezvousPool::CountedRead* const place = find_place(ctx);
    if (place == nullptr) return;
    SourceAccount& source = all.reader_turns.pop_front();
    source.readers.is_listed = false;
    if (source.readers.agents.empty()) continue;
    Agent& a = dequeue(ctx, source.readers.agents);
    if (!read_next(ctx, a, *place)) return enqueue_reader(ctx, a);
    take_turns(ctx, source);
  }
}

void expire_buffer_waiters(EngineContext& ctx) noexcept {
  AgentQueue& waiters = ctx.rendezvous->buffer_waiters;
  if (waiters.empty()) return;
  post_rendezvous_reads(ctx);
  while (!waiters.empty()) {
    const Agent& first = *waiters.front();
    RendezvousReceive* const r = first.rendezvous.reading;
    const bool waits = takes_messages(first) && r != nullptr;
    if (waits && r->deadline > ctx.now) return;
    Agent& a = dequeue(ctx, waiters);
    if (!waits) continue;  // the connection has closed meanwhile
    a.rendezvous.reading = next_to_read(r->next);
    refuse(ctx, a, *r, RendezvousVerdict::no_room);
    if (a.rendezvous.reading != nullptr) enqueue_reader(ctx, a);
    deliver_complete(ctx, a);
  }
}

void refuse_rendezvous_receives(EngineContext& ctx, Agent& a) noexcept {
  // An outstanding READ needs its key; its completion calls this function again.
  if (a.rendezvous.reads_outstanding != 0 || a.stage != Stage::up) return;
  a.rendezvous.reading = nullptr;
  for (RendezvousReceive& r : a.rendezvous.receives) {
    if (a.stage != Stage::up) return;  // the previous answer could not be queued
    if (r.kind == Kind::rendezvous && !r.complete) refuse(ctx, a, r, RendezvousVerdict::closing);
  }
}

void on_rendezvous_read(EngineContext& ctx, Agent& a, std::uint32_t bytes, Status status) noexcept {
  Rendezvous& mine = a.rendezvous;
  uncount_read(ctx, a);
  if (status != Status::ok) return;
  if (!takes_messages(a)) return refuse_rendezvous_receives(ctx, a);
  // READs of a queue pair end in order, so this READ belongs to the first unfinished message.
  RendezvousReceive* r = mine.receives.front();
  while (r->kind != Kind::rendezvous || r->complete) r = r->next;
  r->arrived += bytes;
  if (mine.reading != nullptr && mine.queue == nullptr) enqueue_reader(ctx, a);
  if (r->arrived != r->length) return;
  r->complete = true;
  send_answer(ctx, a, *r, RendezvousVerdict::received);
  deliver_complete(ctx, a);
}

void drop_rendezvous_receives(EngineContext& ctx, Agent& a) noexcept {
  Rendezvous& mine = a.rendezvous;
  while (!mine.receives.empty()) {
    RendezvousReceive& r = mine.receives.pop_front();
    give_receive_back(a, r);
    if (r.block != nullptr) detail::release(r.block);
    ctx.rendezvous->receives.release(r.index);
  }
  mine.reading = nullptr;
  drop_control_messages(ctx, a);
  if (mine.queue != nullptr) {
    mine.queue->erase(a);
    mine.queue = nullptr;
    --ctx.queued_agents;
  }
  a.slow_path &= static_cast<std::uint8_t>(~kRendezvousAhead);
}

}  // namespace spinwire::agent

namespace spinwire {

Status Offer::place(const BufferSlice& to) noexcept {
  if (!to || to.size() < size_) return Status::out_of_bounds;
  const agent::EngineContext& ctx = *engine_;
  const agent::Agent& a = *connection_;
  const detail::Block& block = *detail::block_of(to);
  if (!ctx.owns(block) || (a.domain != nullptr && !agent::reaches(ctx, *a.domain, block)))
    return Status::invalid_argument;
  to_ = to;
  return Status::ok;
}

}  // namespace spinwire
