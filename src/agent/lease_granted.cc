// The owner's side of leases: memory is opened under a key of its own, granted, and given back to
// its pool when nothing can touch it any more.
#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <utility>

#include "agent/agent.h"
#include "agent/lease_table.h"
#include "agent/rendezvous.h"
#include "agent/submit.h"
#include "base/internals.h"

namespace spinwire::agent {
namespace {

using wire::LeaseAction;
using wire::LeaseVerdict;

constexpr std::uint32_t kBlockAlignment = 64;
/// Zeroed at once, as long as a message may take; the rest a step at a time.
constexpr std::uint64_t kZeroedAtOnce = 64u << 10;
constexpr std::uint64_t kZeroedInStep = 256u << 10;

LeaseGranted* loan_of(EngineContext& ctx, const Agent& a, std::uint32_t id) noexcept {
  LeaseGranted* const loan = find_named(ctx.leases->granted, id);
  return loan != nullptr && loan->agent == &a ? loan : nullptr;
}

/// Out of the line, if it is in it.
void leave_line(EngineContext& ctx, LeaseGranted& loan) noexcept {
  for (LeaseGranted& each : ctx.leases->work_queue) {
    if (&each == &loan) return ctx.leases->work_queue.erase(loan);
  }
}

/// A record for memory that it takes a reference to; null if they are used up.
LeaseGranted* make_loan(EngineContext& ctx, Agent& a, detail::Block* block, std::byte* data,
                        std::uint64_t bytes, Access access) noexcept {
  const std::uint32_t index = ctx.leases->granted.acquire();
  if (index == kNone) return nullptr;
  LeaseGranted& loan = ctx.leases->granted.at(index);
  loan.~LeaseGranted();
  new (&loan) LeaseGranted();
  loan.index = index;
  loan.id = name_of(ctx.leases->granted, index);
  loan.timer.index = index;
  loan.timer.kind = kLeaseGrantedTimer;
  loan.block = block;
  detail::retain(block);
  loan.data = data;
  loan.bytes = bytes;
  loan.access = access;
  loan.agent = &a;
  a.leases.granted.push_front(loan);
  ++a.leases.granted_count;
  a.leases.granted_bytes += bytes;
  return &loan;
}

/// Gives the record back; the reference to the memory is the caller's now.
detail::Block* drop_loan(EngineContext& ctx, LeaseGranted& loan) noexcept {
  Agent& a = *loan.agent;
  ctx.timers.cancel(loan.timer);
  a.leases.granted.erase(loan);
  --a.leases.granted_count;
  a.leases.granted_bytes -= loan.bytes;
  if (loan.requested) a.leases.requested_bytes -= loan.bytes;
  ctx.leases->granted.release(loan.index);
  return loan.block;
}

void tell_grant(EngineContext& ctx, Agent& a, wire::MessageKind kind,
                const wire::LeaseGrant& grant) noexcept {
  queue_control_message(ctx, a, make_control_message(kind, wire::encode(grant)));
}

void refuse_request(EngineContext& ctx, Agent& a, std::uint32_t request,
                    LeaseVerdict why) noexcept {
  wire::LeaseGrant grant;
  grant.id = request;
  grant.verdict = why;
  tell_grant(ctx, a, wire::MessageKind::lease_grant, grant);
}

void reply(EngineContext& ctx, Agent& a, std::uint32_t id, LeaseVerdict verdict,
           std::uint64_t time = 0) noexcept {
  wire::LeaseReply reply;
  reply.id = id;
  reply.verdict = verdict;
  reply.time = time;
  queue_control_message(ctx, a,
                        make_control_message(wire::MessageKind::lease_reply, wire::encode(reply)));
}

/// Tells the application what became of a push; once.
void tell_pushed(LeaseGranted& loan, LeaseVerdict verdict) noexcept {
  if (!loan.done) return;
  const LeaseCallback done = std::exchange(loan.done, {});
  LeaseReply told;
  told.status = status_of(verdict);
  told.refusal = refusal_of(verdict);
  if (verdict == LeaseVerdict::granted) {
    told.lease.value = loan.id;
    told.time = loan.time;
  }
  done(told);
}

/// The peer cannot reach it any more: `memory` is false if it may be in the midst of an access, and
/// somebody else keeps the reference.
void finish_loan(EngineContext& ctx, LeaseGranted& loan, bool memory) noexcept {
  Agent& a = *loan.agent;
  const bool told = loan.opened || !loan.requested;
  const bool replies = loan.reply_pending;
  const std::uint32_t id = loan.reply;
  if (loan.revoked) ctx.registrations->remember_ended(loan.rkey);
  Returned returned;
  returned.lease.value = loan.id;
  returned.how = loan.how;
  returned.requested = loan.requested;
  if (memory) returned.memory = detail::make<BufferSlice>(loan.block, loan.data, loan.bytes);
  tell_pushed(loan,
              loan.how == ReturnedBy::refusal ? LeaseVerdict::unwanted : LeaseVerdict::closing);
  detail::Block* const block = drop_loan(ctx, loan);
  if (replies && a.stage == Stage::up) reply(ctx, a, id, LeaseVerdict::granted);
  if ((a.detour & kReplaced) != 0) replace_handlers(a);
  if (told && a.handlers.on_returned) a.handlers.on_returned(handle(ctx, a), returned);
  if (memory) detail::release(block);
}

enum class Step : std::uint8_t { done, later, used_verb, failed };

/// Whether a window of the engine's can be bound to it.
bool fits_window(const EngineContext& ctx, const LeaseGranted& loan) noexcept {
  const Agent& a = *loan.agent;
  return a.domain == nullptr && a.raw == nullptr && ctx.windows.size() != 0 &&
         loan.block->lkey == ctx.staging_block->lkey;
}

/// A work request for its window; null if there is none to be had now.
Operation* begin_request(EngineContext& ctx, Agent& a, OperationKind kind,
                         const LeaseGranted& loan) noexcept {
  if (a.stage != Stage::up || a.leases.bindings_outstanding >= kLeaseRequests) return nullptr;
  Operation* const op = ctx.operations.acquire_for_agent();
  if (op == nullptr) return nullptr;
  op->kind = kind;
  op->block = nullptr;
  op->length = loan.id;
  op->beside = false;
  op->calls_back = false;
  op->wr.opcode = opcode_of(kind);
  op->wr.num_sge = 0;
  op->wr.send_flags = 0;
  count_begin(a, kind);
  ++a.leases.bindings_outstanding;
  return op;
}

Step bind(EngineContext& ctx, LeaseGranted& loan) noexcept {
  Agent& a = *loan.agent;
  memory::WindowPool& windows = ctx.windows;
  if (windows.free() == 0) return Step::failed;
  Operation* const op = begin_request(ctx, a, OperationKind::lease_bind, loan);
  if (op == nullptr) return Step::later;
  loan.window = windows.take();
  loan.rkey = windows.next_key(loan.window);
  op->wr.bind_mw.mw = windows.at(loan.window);
  op->wr.bind_mw.rkey = loan.rkey;
  const int rights = memory::exposed_access_flags(loan.access) & ~IBV_ACCESS_LOCAL_WRITE;
  op->wr.bind_mw.bind_info = {ctx.device->slab(), reinterpret_cast<std::uint64_t>(loan.data),
                              loan.bytes, static_cast<unsigned>(rights)};
  append(a, *op);
  defer(ctx, a);
  loan.opened = true;
  return Step::done;
}

Step open(EngineContext& ctx, LeaseGranted& loan, bool verb_allowed) noexcept {
  if (fits_window(ctx, loan)) {
    const Step bound = bind(ctx, loan);
    if (bound != Step::failed) return bound;
  }
  if (!verb_allowed) return Step::later;
  try {
    auto region =
        ctx.registrations->expose(detail::make<BufferSlice>(loan.block, loan.data, loan.bytes),
                                  loan.access, registrations_of(*loan.agent));
    if (!region) return Step::failed;
    loan.rkey = region->rkey;
    loan.window = kNoWindow;
    loan.opened = true;
    return Step::used_verb;
  } catch (...) {
    return Step::failed;
  }
}

std::uint64_t after(const EngineContext& ctx, std::uint64_t ticks) noexcept {
  return ctx.clock.now() + ticks;
}

/// From then on nothing of the peer's can be under way, counted from now.
std::uint64_t end_of(const EngineContext& ctx, const LeaseGranted& loan) noexcept {
  return after(ctx, ctx.clock.ticks(loan.time) + max_retry_ticks(ctx, *loan.agent));
}

/// It has a key: the peer is told.
void announce(EngineContext& ctx, LeaseGranted& loan) noexcept {
  Agent& a = *loan.agent;
  wire::LeaseGrant grant;
  grant.address = reinterpret_cast<std::uint64_t>(loan.data);
  grant.bytes = loan.bytes;
  grant.time = static_cast<std::uint64_t>(loan.time.count());
  grant.lease = loan.id;
  grant.rkey = loan.rkey;
  grant.access = static_cast<std::uint8_t>(loan.access);
  grant.invalidate = loan.window != kNoWindow;
  if (loan.requested) {
    grant.id = loan.request;
    loan.state = LeaseGranted::State::open;
    ctx.timers.reschedule(loan.timer, end_of(ctx, loan));
    return tell_grant(ctx, a, wire::MessageKind::lease_grant, grant);
  }
  loan.state = LeaseGranted::State::offered;
  ctx.timers.reschedule(loan.timer,
                        after(ctx, ctx.clock.ticks(ctx.config.connections.peer_timeout)));
  tell_grant(ctx, a, wire::MessageKind::lease_push, grant);
}

/// No key is to be had for it.
void refuse_loan(EngineContext& ctx, LeaseGranted& loan) noexcept {
  Agent& a = *loan.agent;
  if (loan.requested) refuse_request(ctx, a, loan.request, LeaseVerdict::no_room);
  tell_pushed(loan, LeaseVerdict::no_room);
  loan.how = ReturnedBy::refusal;
  finish_loan(ctx, loan, true);
}

/// Zeroes what is to be, as far as may be at once, then opens it.
Step prepare(EngineContext& ctx, LeaseGranted& loan, std::uint64_t most,
             bool verb_allowed) noexcept {
  if (loan.requested && loan.zeroed != loan.bytes) {
    const std::uint64_t part = std::min(loan.bytes - loan.zeroed, most);
    std::memset(loan.data + loan.zeroed, 0, part);
    loan.zeroed += part;
    if (loan.zeroed != loan.bytes) return Step::later;
  }
  const Step step = open(ctx, loan, verb_allowed);
  if (step == Step::failed) {
    refuse_loan(ctx, loan);
  } else if (step != Step::later) {
    announce(ctx, loan);
  }
  return step;
}

/// Ends its key.
Step close_key(EngineContext& ctx, LeaseGranted& loan, bool verb_allowed) noexcept {
  Agent& a = *loan.agent;
  if (loan.window != kNoWindow) {
    Operation* const op = begin_request(ctx, a, OperationKind::lease_unbind, loan);
    if (op == nullptr) return Step::later;
    op->wr.invalidate_rkey = loan.rkey;
    append(a, *op);
    defer(ctx, a);
    loan.state = LeaseGranted::State::unbinding;
    // A peer that keeps the queue from moving shall not keep the memory.
    ctx.timers.reschedule(loan.timer,
                          after(ctx, ctx.clock.ticks(ctx.config.connections.close_timeout)));
    return Step::done;
  }
  if (loan.ending) {
    if (!ctx.registrations->has_ended(loan.rkey)) return Step::later;
    finish_loan(ctx, loan, true);
    return Step::done;
  }
  if (!verb_allowed) return Step::later;
  loan.ending = ctx.registrations->revoke(loan.rkey) != Status::ok;
  if (loan.ending) {
    ctx.leases->work_queue.push_back(loan);
  } else {
    finish_loan(ctx, loan, true);
  }
  return Step::used_verb;
}

/// The lease is over. `dead` is whether its key is already.
void close_loan(EngineContext& ctx, LeaseGranted& loan, ReturnedBy how,
                bool dead = false) noexcept {
  if (loan.state == LeaseGranted::State::closing || loan.state == LeaseGranted::State::unbinding)
    return;
  ctx.timers.cancel(loan.timer);
  loan.how = how;
  if (loan.state == LeaseGranted::State::waiting) leave_line(ctx, loan);
  loan.state = LeaseGranted::State::closing;
  if (!loan.opened) return finish_loan(ctx, loan, true);
  if (dead && loan.window != kNoWindow) {
    ctx.windows.give(loan.window);
    return finish_loan(ctx, loan, true);
  }
  if (close_key(ctx, loan, false) == Step::later) ctx.leases->work_queue.push_back(loan);
}

/// Rights that may be given, of those asked for.
Access common_rights(const EngineContext& ctx, const Agent& a, std::uint8_t asked) noexcept {
  auto rights = static_cast<std::uint8_t>(asked & static_cast<std::uint8_t>(a.attributes.access));
  if (!ctx.device->info().atomics)
    rights &= static_cast<std::uint8_t>(~static_cast<std::uint8_t>(Access::remote_atomic));
  return static_cast<Access>(rights);
}

/// Why not, as far as that does not depend on what there is.
LeaseVerdict judge(const EngineContext& ctx, const Agent& a, const wire::LeaseRequest& r) noexcept {
  const LeaseLimits& most = a.attributes.leases;
  if (r.bytes > most.max_bytes) return LeaseVerdict::too_long;
  if (!std::has_single_bit(r.alignment) || r.alignment > most.max_alignment)
    return LeaseVerdict::misaligned;
  if (r.access > static_cast<std::uint8_t>(Access::remote_all) ||
      common_rights(ctx, a, r.access) == Access::local)
    return LeaseVerdict::no_right;
  if (r.time == 0 || r.time > static_cast<std::uint64_t>(most.max_duration.count()))
    return LeaseVerdict::bad_time;
  if (a.leases.granted_count >= most.count) return LeaseVerdict::too_many;
  if (r.bytes > most.total_bytes - std::min(a.leases.requested_bytes, most.total_bytes))
    return LeaseVerdict::too_much;
  return LeaseVerdict::granted;
}

void take_request(EngineContext& ctx, Agent& a, const wire::LeaseRequest& r) noexcept {
  const LeaseVerdict verdict = judge(ctx, a, r);
  if (verdict != LeaseVerdict::granted) return refuse_request(ctx, a, r.id, verdict);
  const std::uint32_t slack = std::max(r.alignment, kBlockAlignment) - kBlockAlignment;
  detail::Block* const block = ctx.arena->allocate(memory::PoolId::lease, r.bytes + slack);
  if (block == nullptr) return refuse_request(ctx, a, r.id, LeaseVerdict::no_room);
  const auto start = reinterpret_cast<std::uintptr_t>(block->payload);
  std::byte* const data = block->payload + (-start & (r.alignment - 1));
  LeaseGranted* const loan =
      make_loan(ctx, a, block, data, r.bytes, common_rights(ctx, a, r.access));
  detail::release(block);  // the record holds it, or nobody does
  if (loan == nullptr) return refuse_request(ctx, a, r.id, LeaseVerdict::no_room);
  loan->requested = true;
  loan->request = r.id;
  loan->time = Nanoseconds(static_cast<std::int64_t>(r.time));
  a.leases.requested_bytes += r.bytes;
  const bool at_once = r.bytes <= kZeroedAtOnce && ctx.leases->work_queue.empty();
  if (!at_once || prepare(ctx, *loan, kZeroedAtOnce, false) == Step::later)
    ctx.leases->work_queue.push_back(*loan);
}

/// The holder's answer to a push.
void take_took(EngineContext& ctx, Agent& a, LeaseGranted* loan,
               const wire::LeaseCall& call) noexcept {
  if (loan == nullptr || loan->state != LeaseGranted::State::offered)
    return fail_lease_protocol(ctx, a, "it takes what was not leased to it");
  if (call.verdict != LeaseVerdict::granted) {
    tell_pushed(*loan, call.verdict);
    return close_loan(ctx, *loan, ReturnedBy::refusal);
  }
  loan->state = LeaseGranted::State::open;
  ctx.timers.reschedule(loan->timer, end_of(ctx, *loan));
  tell_pushed(*loan, LeaseVerdict::granted);
}

void take_renewal(EngineContext& ctx, Agent& a, LeaseGranted& loan,
                  const wire::LeaseCall& call) noexcept {
  if (call.time == 0 ||
      call.time > static_cast<std::uint64_t>(a.attributes.leases.max_duration.count()))
    return reply(ctx, a, call.id, LeaseVerdict::bad_time);
  if (loan.recalled) return reply(ctx, a, call.id, LeaseVerdict::over);
  loan.time = Nanoseconds(static_cast<std::int64_t>(call.time));
  ctx.timers.reschedule(loan.timer, end_of(ctx, loan));
  reply(ctx, a, call.id, LeaseVerdict::granted, call.time);
}

}  // namespace

void on_lease_request(EngineContext& ctx, Agent& a, const wire::LeaseRequest& request) noexcept {
  take_request(ctx, a, request);
}

void on_lease_call(EngineContext& ctx, Agent& a, const wire::LeaseCall& call,
                   std::uint32_t invalidated) noexcept {
  LeaseGranted* const loan = loan_of(ctx, a, call.lease);
  if (call.action == LeaseAction::took) return take_took(ctx, a, loan, call);
  if (loan != nullptr && (loan->state == LeaseGranted::State::waiting ||
                          loan->state == LeaseGranted::State::offered || loan->manual))
    return fail_lease_protocol(ctx, a, "it calls about a lease that it does not have");
  const bool over = loan == nullptr || loan->state != LeaseGranted::State::open;
  const bool dead = !over && invalidated != 0 && invalidated == loan->rkey;
  switch (call.action) {
    case LeaseAction::release:  // of one that is over: it has crossed that
      if (!over)
        close_loan(ctx, *loan, loan->recalled ? ReturnedBy::recall : ReturnedBy::release, dead);
      return;
    case LeaseAction::give_back:
      if (over) return reply(ctx, a, call.id, LeaseVerdict::over);
      loan->reply_pending = true;
      loan->reply = call.id;
      return close_loan(ctx, *loan, ReturnedBy::give_back, dead);
    default:
      if (over) return reply(ctx, a, call.id, LeaseVerdict::over);
      return take_renewal(ctx, a, *loan, call);
  }
}

Status grant_lease(EngineContext& ctx, Agent& a, const BufferSlice& memory,
                   const LeaseOptions& options, const LeaseCallback& done) noexcept {
  if (a.state != ConnectionState::ready) return Status::not_connected;
  if (a.raw != nullptr) return Status::unsupported;
  if (!memory || memory.size() == 0) return Status::out_of_bounds;
  const auto asked = static_cast<std::uint8_t>(options.access);
  if (!wire::is_remote_access(asked) || common_rights(ctx, a, asked) != options.access ||
      !is_lease_time(ctx, options.time))
    return Status::invalid_argument;
  if (!can_queue_control(a)) return Status::would_block;
  LeaseGranted* const loan =
      make_loan(ctx, a, detail::block_of(memory), memory.data(), memory.size(), options.access);
  if (loan == nullptr) return Status::would_block;
  loan->time = options.time;
  loan->done = done;
  if (!ctx.leases->work_queue.empty() || prepare(ctx, *loan, 0, false) == Step::later)
    ctx.leases->work_queue.push_back(*loan);
  return Status::ok;
}

Status expose_to_peer(EngineContext& ctx, Agent& a, const BufferSlice& memory, Access access,
                      RemoteRegion& region) noexcept {
  LeaseGranted* const loan =
      make_loan(ctx, a, detail::block_of(memory), memory.data(), memory.size(), access);
  if (loan == nullptr) return Status::would_block;
  loan->manual = true;
  const Step step = open(ctx, *loan, true);
  if (step == Step::later || step == Step::failed) {
    detail::release(drop_loan(ctx, *loan));
    return step == Step::later ? Status::would_block : Status::no_memory;
  }
  loan->state = LeaseGranted::State::open;
  region = {reinterpret_cast<std::uint64_t>(loan->data), loan->bytes, loan->rkey, access};
  return Status::ok;
}

Status recall_lease(EngineContext& ctx, Agent& a, LeaseId lease) noexcept {
  LeaseGranted* const loan = loan_of(ctx, a, lease.value);
  if (loan == nullptr || loan->manual || loan->recalled ||
      loan->state == LeaseGranted::State::closing || loan->state == LeaseGranted::State::unbinding)
    return Status::invalid_argument;
  loan->recalled = true;
  if (loan->state == LeaseGranted::State::waiting) return Status::ok;  // advance_leases() ends it
  wire::LeaseCall call;
  call.lease = loan->id;
  call.action = LeaseAction::recall;
  queue_control_message(ctx, a,
                        make_control_message(wire::MessageKind::lease_call, wire::encode(call)));
  if (loan->state == LeaseGranted::State::open) {
    const std::uint64_t most =
        after(ctx, ctx.clock.ticks(ctx.config.connections.close_timeout) + max_retry_ticks(ctx, a));
    if (most < loan->timer.deadline) ctx.timers.reschedule(loan->timer, most);
  }
  return Status::ok;
}

namespace {

/// The exposure to the peer with this key, open or closing; null if there is none.
LeaseGranted* find_exposure(const Agent& a, std::uint32_t rkey) noexcept {
  for (LeaseGranted& lease : a.leases.granted) {
    if (lease.manual && lease.rkey == rkey) return &lease;
  }
  return nullptr;
}

}  // namespace

Status revoke_from_peer(EngineContext& ctx, Agent& a, std::uint32_t rkey) noexcept {
  LeaseGranted* const loan = find_exposure(a, rkey);
  if (loan == nullptr) return Status::invalid_argument;
  close_loan(ctx, *loan, ReturnedBy::recall);  // none if it is closing already
  return Status::ok;
}

Status revoke_exposure(EngineContext& ctx, Agent& a, std::uint32_t rkey) noexcept {
  LeaseGranted* const loan = find_exposure(a, rkey);
  // A key of the engine's or the connection's domain, or one that this function has closed.
  if (loan == nullptr) return ctx.registrations->revoke(rkey);
  loan->revoked = true;
  close_loan(ctx, *loan, ReturnedBy::recall);
  return Status::would_block;
}

bool is_window_key(const Agent& a, std::uint32_t rkey) noexcept {
  const LeaseGranted* const loan = find_exposure(a, rkey);
  return loan != nullptr && loan->state == LeaseGranted::State::open && loan->window != kNoWindow;
}

void on_lease_bound(EngineContext& ctx, Agent& a) noexcept {
  --a.leases.bindings_outstanding;
  (void)advance_leases(ctx, false);  // others may wait for that
}

void on_lease_unbound(EngineContext& ctx, Agent& a, std::uint32_t id, Status status) noexcept {
  on_lease_bound(ctx, a);
  LeaseGranted* const loan = status == Status::ok ? loan_of(ctx, a, id) : nullptr;
  if (loan == nullptr) return;  // the connection ends, and its leases with it
  ctx.windows.give(loan->window);
  finish_loan(ctx, *loan, true);
}

LeaseWork advance_leases(EngineContext& ctx, bool verb_allowed) noexcept {
  if (ctx.leases->work_queue.empty()) return LeaseWork::none;
  LeaseGranted* const loan = &ctx.leases->work_queue.pop_front();
  if (loan->agent->stage != Stage::up) return LeaseWork::some;  // end_loans() will see to it
  const bool waits = loan->state == LeaseGranted::State::waiting;
  if (waits && loan->recalled) {
    close_loan(ctx, *loan, ReturnedBy::recall);
    return LeaseWork::some;
  }
  const std::uint64_t zeroed = loan->zeroed;
  const Step step = waits ? prepare(ctx, *loan, kZeroedInStep, verb_allowed)
                          : close_key(ctx, *loan, verb_allowed);
  if (step != Step::later) return step == Step::used_verb ? LeaseWork::verb : LeaseWork::some;
  const bool zeroing = waits && loan->zeroed != zeroed;
  ctx.leases->work_queue.push_back(*loan);
  return zeroing ? LeaseWork::some : LeaseWork::none;
}

void on_lease_granted_timer(EngineContext& ctx, LeaseGranted& loan) noexcept {
  Agent& a = *loan.agent;
  if (loan.state == LeaseGranted::State::open)
    return close_loan(ctx, loan, loan.recalled ? ReturnedBy::recall : ReturnedBy::expiry);
  fail(ctx, a,
       {Status::peer_lost, "lease memory to the peer",
        loan.state == LeaseGranted::State::offered ? "no answer came in time"
                                                   : "the window that it uses does not end in time",
        "the peer's process hangs, or is hostile"});
}

bool end_lease_granted(EngineContext& ctx, Agent& a) noexcept {
  LeaseGranted* const loan = a.leases.granted.front();
  if (loan == nullptr) return true;
  leave_line(ctx, *loan);
  if (loan->state != LeaseGranted::State::closing && loan->state != LeaseGranted::State::unbinding)
    loan->how = ReturnedBy::end;
  bool memory = true;
  if (loan->opened && loan->window != kNoWindow) {
    // Keeps a reference of its own as long as a peer is in the midst of an access.
    detail::retain(loan->block);
    memory = ctx.windows.discard(loan->window, loan->block);
  } else if (loan->ending) {
    memory = ctx.registrations->has_ended(loan->rkey);
  } else if (loan->opened) {
    memory = ctx.registrations->revoke(loan->rkey) == Status::ok;
  }
  const bool used_verb = loan->opened && !loan->ending;
  detail::Block* const block = loan->block;
  finish_loan(ctx, *loan, memory);
  if (!memory) detail::release(block);
  return !used_verb;
}

}  // namespace spinwire::agent
