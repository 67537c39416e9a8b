// The receiver's side of long messages: pulled with READs, the connections taking turns; what comes
// behind one is held until it is delivered.
#include <endian.h>

#include <algorithm>
#include <string>

#include "agent/agent.h"
#include "agent/submit.h"
#include "agent/transfers.h"

namespace spinwire::agent {
namespace {

using Kind = Arrival::Kind;

void protocol_error(EngineContext& ctx, Agent& a, const char* found) noexcept {
  fail_bad(ctx, a,
           {Status::protocol, "take the offer of a long message", found,
            "the peer is broken or hostile"});
}

void line_up(EngineContext& ctx, AgentLine& line, Agent& a) noexcept {
  a.rendezvous.lined_up = true;
  ++ctx.queued_agents;
  line.push(a);
}

Agent& next_in(EngineContext& ctx, AgentLine& line) noexcept {
  Agent& a = line.pop();
  a.rendezvous.lined_up = false;
  --ctx.queued_agents;
  return a;
}

/// The next arrival behind `v` that has bytes to be asked for.
Arrival* next_pull(Arrival* v) noexcept {
  while (v != nullptr && (v->kind != Kind::pull || v->complete || v->asked == v->length))
    v = v->next;
  return v;
}

void answer(EngineContext& ctx, Agent& a, const Arrival& v, wire::Verdict verdict) noexcept {
  Note note = make_note(wire::MessageKind::answer, wire::encode(wire::Answer{v.id, verdict}));
  if (v.invalidate) note.invalidate = v.rkey;
  tell(ctx, a, note);
}

void refuse(EngineContext& ctx, Agent& a, Arrival& v, wire::Verdict verdict) noexcept {
  v.complete = v.refused = true;
  answer(ctx, a, v, verdict);
}

void release_arrival(EngineContext& ctx, Arrival& v) noexcept {
  if (v.block != nullptr) detail::release(v.block);
  ctx.transfers->arrivals.release(v.index);
}

/// Lets the application have it. Its record goes first, since the callback may end everything.
void hand_over(EngineContext& ctx, Agent& a, Arrival& item) noexcept {
  const Arrival v = item;
  ctx.transfers->arrivals.release(item.index);
  if (v.kind == Kind::goodbye) return on_goodbye(ctx, a);
  if (!v.refused) {
    Block* const block = v.named ? nullptr : v.block;
    Message message({block, v.data, v.length, v.immediate, v.has_immediate, v.kind == Kind::write});
    deliver(ctx, a, message);
    if (block != nullptr && message.taken()) return;
  }
  if (v.block != nullptr) detail::release(v.block);
}

/// Delivers what is complete at the head of the line.
void deliver_held(EngineContext& ctx, Agent& a) noexcept {
  Line<Arrival>& held = a.rendezvous.held;
  while (!held.empty() && held.first->complete && a.state == ConnectionState::ready) {
    Arrival& v = held.pop();
    if (held.empty()) a.detour &= static_cast<std::uint8_t>(~kHolding);
    if (v.credited) ++a.credit.reserved;  // its receive may be used again
    hand_over(ctx, a, v);
  }
  if (a.state == ConnectionState::ready) grant_more(ctx, a);
}

/// A block for it; false if the pool is dry.
bool find_room(EngineContext& ctx, Arrival& v) noexcept {
  if (v.block != nullptr) return true;
  v.block = ctx.arena->allocate(memory::PoolId::large, v.length);
  if (v.block == nullptr) return false;
  v.data = v.block->payload;
  return true;
}

/// False: all records are in use.
bool post_read(EngineContext& ctx, Agent& a, Arrival& v) noexcept {
  Operation* const op = ctx.operations.acquire_for_agent();
  if (op == nullptr) return false;
  const std::uint32_t bytes = std::min(v.length - v.asked, kPullBytes);
  begin<OperationKind::pull>(a, *op, v.block, bytes, {});
  op->beside = false;
  op->wr.send_flags = 0;
  op->sges[0] = {reinterpret_cast<std::uint64_t>(v.data + v.asked), bytes, v.block->lkey};
  op->wr.wr.rdma.remote_addr = v.remote + v.asked;
  op->wr.wr.rdma.rkey = v.rkey;
  if (a.domain != nullptr) use_own_key(ctx, *a.domain, *op);
  v.asked += bytes;
  append(a, *op);
  defer(ctx, a);
  ++a.rendezvous.pulls;
  ++ctx.transfers->pulls;
  return true;
}

/// Moves agents whose block has come to the head of the line to pull.
void feed_dry(EngineContext& ctx) noexcept {
  AgentLine& dry = ctx.transfers->dry;
  while (dry.first != nullptr) {
    Agent& a = *dry.first;
    Arrival* const v = a.rendezvous.pulling;
    const bool goes_on = a.state == ConnectionState::ready && v != nullptr;
    if (goes_on && !find_room(ctx, *v)) return;
    (void)next_in(ctx, dry);
    if (goes_on) line_up(ctx, ctx.transfers->pullers, a);
  }
}

/// The application is asked where it wants the message.
void ask(EngineContext& ctx, Agent& a, Arrival& v) noexcept {
  if ((a.detour & kReplaced) != 0) replace_handlers(a);
  if (!a.handlers.on_offer) return;
  Offer offer(v.length, v.has_immediate ? std::optional(v.immediate) : std::nullopt);
  a.handlers.on_offer(handle(ctx, a), offer);
  if (a.state != ConnectionState::ready) return;  // closing has answered it
  if (offer.refused()) return refuse(ctx, a, v, wire::Verdict::refused);
  const BufferSlice& to = offer.destination();
  // What the connection's own protection domain has no key to cannot be read into.
  if (!to || (a.domain != nullptr && !reaches(ctx, *a.domain, *to.block()))) return;
  v.block = to.block();
  detail::retain(v.block);
  v.data = to.data();
  v.named = true;
}

}  // namespace

void AgentLine::push(Agent& a) noexcept {
  a.rendezvous.next = nullptr;
  (first == nullptr ? first : last->rendezvous.next) = &a;
  last = &a;
}

Agent& AgentLine::pop() noexcept {
  Agent& a = *first;
  first = a.rendezvous.next;
  return a;
}

void AgentLine::remove(const Agent& a) noexcept {
  Agent* before = nullptr;
  for (Agent* each = first; each != nullptr; before = each, each = each->rendezvous.next) {
    if (each != &a) continue;
    (before == nullptr ? first : before->rendezvous.next) = a.rendezvous.next;
    if (last == &a) last = before;
    return;
  }
}

Arrival* hold(EngineContext& ctx, Agent& a, const Arrival& what) noexcept {
  // There are as many as receives, and connections to say goodbye.
  const std::uint32_t index = ctx.transfers->arrivals.acquire();
  if (index == kNone) {
    fail(ctx, a,
         {Status::limit, "hold a message behind one that is being pulled",
          "the records for such are used up", "report this as a defect"});
    return nullptr;
  }
  Arrival& v = ctx.transfers->arrivals.at(index);
  v = what;
  v.index = index;
  a.rendezvous.held.push(v);
  a.detour |= kHolding;
  // What is held keeps its credit: the peer can have no more here than it was granted.
  v.credited = v.kind != Kind::goodbye && a.credit.reserved != 0;
  if (v.credited) --a.credit.reserved;
  return &v;
}

void take_offer(EngineContext& ctx, Agent& a, const ibv_wc& wc,
                std::span<const std::byte> body) noexcept {
  const Config::Connections& c = ctx.config.connections;
  wire::Offer offer;
  if (!wire::decode(body, offer)) return protocol_error(ctx, a, "it is malformed");
  if (offer.length > c.message_bytes || c.message_bytes == c.eager_bytes)
    return protocol_error(ctx, a, "it is longer than connections.message_bytes");
  Arrival v;
  v.kind = Kind::pull;
  v.length = offer.length;
  v.has_immediate = (wc.wc_flags & IBV_WC_WITH_IMM) != 0;
  v.immediate = be32toh(wc.imm_data);
  v.remote = offer.address;
  v.rkey = offer.rkey;
  v.id = offer.id;
  v.invalidate = offer.invalidate;
  if (a.state != ConnectionState::ready) return answer(ctx, a, v, wire::Verdict::closing);
  Arrival* const kept = hold(ctx, a, v);
  if (kept == nullptr) return;
  Arrival& held = *kept;
  ask(ctx, a, held);
  if (a.state != ConnectionState::ready) return;  // closed by the callback
  if (!held.complete && !held.named && !ctx.arena->fits(memory::PoolId::large, held.length))
    refuse(ctx, a, held, wire::Verdict::no_room);
  if (held.complete) return deliver_held(ctx, a);
  if (a.rendezvous.pulling == nullptr) a.rendezvous.pulling = &held;
  if (!a.rendezvous.lined_up && a.rendezvous.pulls < kPullsOfOne)
    line_up(ctx, ctx.transfers->pullers, a);
  list_grant(ctx, a);  // the end of the poll begins to pull
}

void pump_pulls(EngineContext& ctx) noexcept {
  Transfers& all = *ctx.transfers;
  if (all.dry.first != nullptr) feed_dry(ctx);
  while (all.pulls < kPullsAtOnce && all.pullers.first != nullptr) {
    Agent& a = next_in(ctx, all.pullers);
    Arrival* const v = a.rendezvous.pulling;
    if (v == nullptr || a.state != ConnectionState::ready) continue;
    // Behind those that wait already, or short messages would take what a long one waits for.
    if (v->block == nullptr && (all.dry.first != nullptr || !find_room(ctx, *v))) {
      v->deadline = ctx.now + ctx.clock.ticks(ctx.config.connections.large_timeout);
      line_up(ctx, all.dry, a);
      continue;
    }
    if (!post_read(ctx, a, *v)) return line_up(ctx, all.pullers, a);
    if (v->asked == v->length) a.rendezvous.pulling = next_pull(v->next);
    if (a.rendezvous.pulling != nullptr && a.rendezvous.pulls < kPullsOfOne)
      line_up(ctx, all.pullers, a);
  }
}

void look_at_dry(EngineContext& ctx) noexcept {
  AgentLine& dry = ctx.transfers->dry;
  if (dry.first == nullptr) return;
  pump_pulls(ctx);
  while (dry.first != nullptr) {
    Arrival* const first = dry.first->rendezvous.pulling;
    const bool waits = dry.first->state == ConnectionState::ready && first != nullptr;
    if (waits && first->deadline > ctx.now) return;
    Agent& a = next_in(ctx, dry);
    if (!waits) continue;  // it has closed meanwhile
    Arrival& v = *first;
    a.rendezvous.pulling = next_pull(v.next);
    refuse(ctx, a, v, wire::Verdict::no_room);
    if (a.rendezvous.pulling != nullptr) line_up(ctx, ctx.transfers->pullers, a);
    deliver_held(ctx, a);
  }
}

void refuse_held(EngineContext& ctx, Agent& a) noexcept {
  if (a.rendezvous.pulls != 0 || a.stage != Stage::up) return;  // a READ needs its key
  a.rendezvous.pulling = nullptr;
  for (Arrival* v = a.rendezvous.held.first; v != nullptr && a.stage == Stage::up; v = v->next) {
    if (v->kind == Kind::pull && !v->complete) refuse(ctx, a, *v, wire::Verdict::closing);
  }
}

void on_pulled(EngineContext& ctx, Agent& a, std::uint32_t bytes, Status status) noexcept {
  --a.rendezvous.pulls;
  --ctx.transfers->pulls;
  if (status != Status::ok) return;
  if (a.state != ConnectionState::ready) return refuse_held(ctx, a);
  // READs of a queue pair end in order.
  Arrival* v = a.rendezvous.held.first;
  while (v->kind != Kind::pull || v->complete) v = v->next;
  v->arrived += bytes;
  if (a.rendezvous.pulling != nullptr && !a.rendezvous.lined_up)
    line_up(ctx, ctx.transfers->pullers, a);
  if (v->arrived != v->length) return;
  v->complete = true;
  answer(ctx, a, *v, wire::Verdict::pulled);
  deliver_held(ctx, a);
}

void drop_held(EngineContext& ctx, Agent& a) noexcept {
  while (!a.rendezvous.held.empty()) {
    Arrival& v = a.rendezvous.held.pop();
    if (v.credited) ++a.credit.reserved;
    release_arrival(ctx, v);
  }
  a.rendezvous.pulling = nullptr;
  a.rendezvous.notes_waiting = 0;
  while (!a.rendezvous.notes.empty()) ctx.transfers->notes.release(a.rendezvous.notes.pop().index);
  if (a.rendezvous.lined_up) {
    ctx.transfers->pullers.remove(a);
    ctx.transfers->dry.remove(a);
    a.rendezvous.lined_up = false;
    --ctx.queued_agents;
  }
  a.detour &= static_cast<std::uint8_t>(~kHolding);
}

}  // namespace spinwire::agent
