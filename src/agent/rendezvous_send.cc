// The sender's side of rendezvous: opens a message under a remote key, offers it, and ends it on
// the receiver's answer.
#include <endian.h>

#include <algorithm>
#include <string>
#include <utility>

#include "agent/agent.h"
#include "agent/completion.h"
#include "agent/long_messages.h"
#include "agent/rendezvous.h"
#include "agent/submit.h"
#include "base/error.h"
#include "base/internals.h"
#include "memory/window_requests.h"

namespace spinwire::agent {
namespace {

constexpr std::uint32_t kIndexBits = 16;

/// The send's name in the protocol: its index, and the low bits of its generation.
std::uint32_t id_of(const RendezvousPool& all, const RendezvousSend& t) noexcept {
  return t.index | all.sends.generation(t.index) << kIndexBits;
}

RendezvousSend* find_send(RendezvousPool& all, const Agent& a, std::uint32_t id) noexcept {
  const std::uint32_t index = id & ((1u << kIndexBits) - 1);
  if (index >= all.sends.capacity() || !all.sends.in_use(index)) return nullptr;
  RendezvousSend& t = all.sends.at(index);
  return id_of(all, t) == id && t.agent == &a ? &t : nullptr;
}

void link(Agent& a, RendezvousSend& t) noexcept {
  t.agent = &a;
  a.rendezvous.sends.push_front(t);
  ++a.rendezvous.send_count;
  ++a.source->offers;
}

/// Whether the peer reads the message by the local key of its memory, so that no key is opened. Not
/// the application's own memory: what a peer of this process reads by a local key is memory that is
/// shared with all peers.
bool is_named(const EngineContext& ctx, const Agent& a, const Request& r) noexcept {
  return offers_locally(ctx, a) && r.block->lkey == ctx.device->slab()->lkey;
}

/// Whether the agent's source has less than its share of the records and, if the message needs one,
/// of the windows. A peer decides for how long it lets an offer wait.
bool may_offer(EngineContext& ctx, const Agent& a, const Request& r, bool named) noexcept {
  const auto& sends = ctx.rendezvous->sends;
  const memory::KeySource keys = ctx.keys();
  std::uint32_t free = sends.capacity() - sends.size();
  if (a.domain == nullptr && !named && keys.can_bind(*r.block))
    free = std::min(free, keys.windows.free());
  return has_share(a.source->offers, free);
}

/// Ends a send whose key is closed. The record is free before the callback, which may send again. A
/// cancelled send counts by its outcome, but its callback has already run with `cancelled`.
void end_send(EngineContext& ctx, Agent& a, RendezvousSend& t, Status status) noexcept {
  a.rendezvous.sends.erase(t);
  --a.rendezvous.send_count;
  --a.source->offers;
  if (t.due) ctx.cancellations.erase(t);
  const bool ok = status == Status::ok;
  Completion completion;
  completion.status = t.cancelled ? t.status : status;
  completion.bytes = ok && !t.cancelled ? t.length : 0;
  Tally& tally = a.tallies[static_cast<std::size_t>(OperationKind::send)];
  tally.done += ok ? 1 : 0;
  tally.failed += ok ? 0 : 1;
  tally.bytes += ok ? t.length : 0;
  detail::Block* const block = std::exchange(t.block, nullptr);
  const CompletionCallback done = std::exchange(t.done, {});
  ctx.rendezvous->sends.release(t.index);
  if (done) done(completion);
  if (block != nullptr) detail::release(block);
}

Status outcome_of(wire::RendezvousVerdict verdict) noexcept {
  switch (verdict) {
    case wire::RendezvousVerdict::received:
      return Status::ok;
    case wire::RendezvousVerdict::no_room:
      return Status::no_buffer;
    case wire::RendezvousVerdict::closing:
      return Status::flushed;
    case wire::RendezvousVerdict::refused:
      break;
  }
  return Status::refused;
}

/// Opens the message to the peer by a window, whose binding precedes the offer, or else by a
/// registration.
Status open_key(EngineContext& ctx, Agent& a, RendezvousSend& t, const Request& r,
                bool named) noexcept {
  const memory::KeySource keys = ctx.keys();
  const memory::KeyTarget target{r.block, r.data, r.size, Access::remote_read};
  t.key = {};
  if (named) return Status::ok;
  if (a.domain != nullptr || !keys.can_bind(*r.block)) {
    const auto opened = memory::open_key(keys, target, registrations_of(a), t.key);
    if (opened) return Status::ok;
    return opened.error().status == Status::limit ? Status::would_block : opened.error().status;
  }
  Operation* const op = keys.windows.free() != 0 ? ctx.operations.acquire() : nullptr;
  if (op == nullptr) return Status::would_block;
  begin_internal(a, *op, OperationKind::rendezvous_bind);
  memory::bind_window(keys, target, t.key, op->wr);
  append(a, *op);
  return Status::ok;
}

void begin_offer(Agent& a, Operation& op, OperationKind kind, const RendezvousSend& t) noexcept {
  op.kind = kind;
  count_begin(a, kind);
  op.wr.opcode = opcode_of(kind);
  op.wr.num_sge = 1;
  op.block = nullptr;
  op.calls_back = false;
  op.subject = t.id;
}

wire::MessageHeader header_of_offer(Agent& a, wire::MessageKind kind, bool wants_credit) noexcept {
  a.credit.advertised = a.credit.granted;
  return {kind, wants_credit ? wire::message_flag::kWantCredit : std::uint8_t{0},
          static_cast<std::uint16_t>(a.credit.granted),
          static_cast<std::uint32_t>(wire::body_bytes(kind))};
}

/// Fills in the operation of an offer of a message that the peer reads by its local key. False: it
/// is not needed, the offer has been sent without one.
bool make_local_offer(EngineContext& ctx, Agent& a, Operation& op, const RendezvousSend& t,
                      const Request& r, bool has_immediate, bool wants_credit) noexcept {
  const auto body = wire::encode(wire::LocalOffer{reinterpret_cast<std::uint64_t>(r.data), t.length,
                                                  r.block->lkey, t.id,
                                                  has_immediate ? r.immediate : 0, has_immediate});
  const auto header = header_of_offer(a, wire::MessageKind::local_offer, wants_credit);
  // What is deferred can be cancelled, and is never sent then.
  if ((!r.defer || r.is_final) && send_control_direct(ctx, a, header, body)) return false;
  begin_offer(a, op, OperationKind::rendezvous_offer, t);
  build_control(ctx, a, op, header, body);
  return true;
}

void make_offer(EngineContext& ctx, Agent& a, Operation& op, const RendezvousSend& t,
                const Request& r, bool has_immediate, bool wants_credit) noexcept {
  const auto body = wire::encode(wire::RendezvousOffer{
      reinterpret_cast<std::uint64_t>(r.data), t.length, t.key.rkey, t.id, t.key.is_window()});
  begin_offer(a, op,
              has_immediate ? OperationKind::rendezvous_offer_imm : OperationKind::rendezvous_offer,
              t);
  if (has_immediate) op.wr.imm_data = htobe32(r.immediate);
  build_control(ctx, a, op, header_of_offer(a, wire::MessageKind::rendezvous_offer, wants_credit),
                body);
}

}  // namespace

RendezvousSend* find_rendezvous_send(const EngineContext& ctx, const Agent& a,
                                     const Operation& offer) noexcept {
  return find_send(*ctx.rendezvous, a, offer.subject);
}

void complete_rendezvous_send(EngineContext& ctx, Agent& a, RendezvousSend& t,
                              Status status) noexcept {
  end_send(ctx, a, t, status);
  if (a.state == ConnectionState::draining && idle(a)) continue_close(ctx, a);
}

void drop_unposted_offer(EngineContext& ctx, RendezvousSend& t) noexcept {
  if (t.key.is_window()) {
    memory::on_window_unbound(ctx.keys(), t.key);
  } else {
    memory::close_key(ctx.keys(), t.key, t.block);
  }
  t.answered = t.never_posted = true;
}

Status submit_rendezvous(EngineContext& ctx, Agent& a, const Request& r,
                         bool has_immediate) noexcept {
  const bool named = is_named(ctx, a, r);
  const bool may_read = named || allows(a.attributes.access, Access::remote_read);
  if (r.size > a.max_message || !may_read) return Status::message_too_long;
  if (a.rendezvous.direct_pause == kLacksCredit) {
    a.rendezvous.direct_pause = 0;
    return refuse_for_room(ctx, a, Room::rendezvous);
  }
  if (a.send_queue.used + 2 > send_limit_of(a)) return refuse_for_room(ctx, a, Room::rendezvous);
  if (a.credit.sent == a.credit.send_limit && !count_grants(ctx, a))
    return refuse_for_room(ctx, a, Room::rendezvous);
  if (!may_offer(ctx, a, r, named)) return refuse_for_room(ctx, a, Room::rendezvous);
  RendezvousPool& all = *ctx.rendezvous;
  const std::uint32_t index = all.sends.acquire();
  if (index == base::IndexPool<RendezvousSend>::kNone)
    return refuse_for_room(ctx, a, Room::rendezvous);
  Operation* const op = ctx.operations.acquire();
  RendezvousSend& t = all.sends.at(index);
  t.index = index;
  t.id = id_of(all, t);
  t.length = static_cast<std::uint32_t>(r.size);
  t.answered = t.cancelled = t.due = t.never_posted = false;
  t.of_send = true;
  if (op != nullptr) op->kind = OperationKind::rendezvous_offer;
  const Status opened = op == nullptr ? Status::would_block : open_key(ctx, a, t, r, named);
  if (opened != Status::ok) {
    if (op != nullptr) ctx.operations.release(*op);
    all.sends.release(index);
    return opened == Status::would_block ? refuse_for_room(ctx, a, Room::rendezvous) : opened;
  }
  detail::retain(r.block);
  t.block = r.block;
  t.done = r.done;
  if (ctx.is_sample_due()) [[unlikely]]
    begin_long_sample(ctx, a, t.done);
  link(a, t);
  bool wants_credit = false;
  if (++a.credit.sent == a.credit.send_limit) wants_credit = !count_header_grants(a);
  a.activity.last_sent = ctx.now;
  count_begin(a, OperationKind::send);  // the message itself
  t.is_direct = false;
  if (!named) {
    make_offer(ctx, a, *op, t, r, has_immediate, wants_credit);
  } else if (!make_local_offer(ctx, a, *op, t, r, has_immediate, wants_credit)) {
    ctx.operations.release(*op);
    t.is_direct = true;
    t.behind = a.send_queue.posted != nullptr ? a.send_queue.posted_last->wr.wr_id
                                              : RendezvousSend::kNoRequest;
    if (ctx.has_unposted_sample()) [[unlikely]]
      note_posted(ctx, a);
    if (r.defer) return queue_flush(ctx, a), Status::ok;
    publish_direct(ctx);
    return Status::ok;
  }
  append(a, *op);
  return post(ctx, a, r.defer);
}

void on_rendezvous_answer(EngineContext& ctx, Agent& a, const ibv_wc& wc,
                          std::span<const std::byte> body) noexcept {
  wire::RendezvousAnswer answer;
  RendezvousSend* const t =
      wire::decode(body, answer) ? find_send(*ctx.rendezvous, a, answer.id) : nullptr;
  if (t == nullptr || t->answered) {
    return fail_protocol(
        ctx, a,
        {Status::protocol, "handle the answer to a rendezvous message",
         "it is malformed, or answers none that is outstanding", base::kProtocolRemedy});
  }
  t->answered = true;
  a.liveness.stalls.offers.on_progress();
  a.liveness.stalls.replies.on_progress();
  t->verdict = answer.verdict;
  if (!t->key.is_window()) {
    memory::close_key(ctx.keys(), t->key, t->block);
    return complete_rendezvous_send(ctx, a, *t, outcome_of(t->verdict));
  }
  if ((wc.wc_flags & IBV_WC_WITH_INV) != 0 && wc.invalidated_rkey == t->key.rkey) {
    memory::on_window_unbound(ctx.keys(), t->key);
    return complete_rendezvous_send(ctx, a, *t, outcome_of(t->verdict));
  }
  // The peer has not invalidated the key, so this engine unbinds the window.
  ControlMessage unbind;
  unbind.unbind = t;
  queue_control_message(ctx, a, unbind);
}

void on_rendezvous_unbound(EngineContext& ctx, Agent& a, std::uint32_t id, Status status) noexcept {
  if (status != Status::ok) return;  // the connection ends and takes its offers with it
  RendezvousSend* const t = find_send(*ctx.rendezvous, a, id);
  if (t == nullptr) return;
  memory::on_window_unbound(ctx.keys(), t->key);
  complete_rendezvous_send(ctx, a, *t, outcome_of(t->verdict));
}

bool end_rendezvous_sends(EngineContext& ctx, Agent& a) noexcept {
  RendezvousSend* const t = a.rendezvous.sends.front();
  if (t == nullptr) return true;
  if (t->key.state == memory::KeyState::open) memory::close_key(ctx.keys(), t->key, t->block);
  end_send(ctx, a, *t, t->answered ? outcome_of(t->verdict) : Status::flushed);
  return false;
}

}  // namespace spinwire::agent
