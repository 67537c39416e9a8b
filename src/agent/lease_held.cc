// The holder's side of leases: requests or accepts memory of the peer, uses it until shortly before
// the lease ends, and returns it. Cold, except for resolve_leased().
#include <algorithm>
#include <new>
#include <utility>

#include "agent/agent.h"
#include "agent/lease_table.h"
#include "agent/recording.h"
#include "agent/rendezvous.h"
#include "base/internals.h"

namespace spinwire::agent {
namespace {

using wire::LeaseAction;
using wire::LeaseVerdict;

LeaseHeld* find_held(EngineContext& ctx, const Agent& a, std::uint32_t id) noexcept {
  LeaseHeld* const h = find_lease_held(ctx, id);
  return h != nullptr && h->agent == &a ? h : nullptr;
}

LeaseReply make_reply(LeaseVerdict verdict) noexcept {
  LeaseReply reply;
  reply.status = status_of(verdict);
  reply.refusal = refusal_of(verdict);
  return reply;
}

LeaseHeld* make_lease_held(EngineContext& ctx, Agent& a, std::uint64_t bytes) noexcept {
  LeaseHeld* const made = ctx.leases->held.make();
  if (made == nullptr) return nullptr;
  LeaseHeld& h = *made;
  h.timer.kind = kLeaseHeldTimer;
  h.agent = &a;
  h.region.length = bytes;
  h.start = ctx.clock.now();
  a.leases.held.push_front(h);
  ++a.leases.held_count;
  a.leases.held_bytes += bytes;
  return &h;
}

void await_reply(EngineContext& ctx, LeaseHeld& h) noexcept {
  h.call_pending = true;
  await_lease_answer(ctx, h.timer);
}

/// Starts the lease as the owner has granted it.
void start_lease(const EngineContext& ctx, LeaseHeld& h, const wire::LeaseGrant& grant) noexcept {
  h.region = {grant.address, grant.bytes, grant.rkey, static_cast<Access>(grant.access)};
  h.peer_id = grant.lease;
  h.tag = grant.tag;
  h.invalidate = grant.invalidate;
  h.until = last_use_of(ctx, h.start, duration_of(grant.time));
  h.state = LeaseHeld::State::held;
}

/// Ends the pending call, and the lease if that call returns it.
void end_call(EngineContext& ctx, LeaseHeld& h, LeaseReply& reply) noexcept {
  ctx.timers.cancel(h.timer);
  h.call_pending = false;
  const LeaseCallback done = std::exchange(h.done, {});
  if (h.state == LeaseHeld::State::returning) forget_lease_held(ctx, h);
  if (done) done(reply);
}

/// Ends automatic renewal, if there is any. Returns the callback to report that by.
LeaseCallback take_auto_renewal(LeaseHeld& h) noexcept {
  h.auto_time = Nanoseconds{0};
  h.auto_pending = false;
  return std::exchange(h.on_auto_end, {});
}

/// Schedules the next automatic renewal, unless a call is pending, whose end does so.
void schedule_auto_renewal(EngineContext& ctx, LeaseHeld& h) noexcept {
  if (h.auto_time.count() == 0 || h.call_pending) return;
  const std::uint64_t now = ctx.clock.now();
  ctx.timers.reschedule(h.timer, now + (h.until - std::min(now, h.until)) / 2);
}

/// Sends a call about a lease. A call that `ends` the lease waits for the READs and atomics that
/// were started on it.
void send_call(EngineContext& ctx, const LeaseHeld& h, LeaseAction action, bool ends,
               std::uint64_t time = 0, LeaseVerdict verdict = LeaseVerdict::granted) noexcept {
  wire::LeaseCall call;
  call.lease = h.peer_id;
  call.id = h.id;
  call.action = action;
  call.verdict = verdict;
  call.time = time;
  ControlMessage message = make_control_message(wire::MessageKind::lease_call, wire::encode(call));
  message.fence = ends;
  if (ends && h.invalidate) {
    message.invalidate = h.region.rkey;
    message.invalidate_until = h.until;
  }
  queue_control_message(ctx, *h.agent, message);
}

/// Whether a call about the lease may start.
Status check_call(const EngineContext& ctx, const LeaseHeld& h) noexcept {
  if (h.agent->state != ConnectionState::ready) return Status::not_connected;
  if (h.state != LeaseHeld::State::held || ctx.clock.now() >= h.until) return Status::lease_expired;
  return h.call_pending || !can_queue_control(*h.agent) ? Status::would_block : Status::ok;
}

}  // namespace

LeaseHeld* find_lease_held(EngineContext& ctx, std::uint32_t id) noexcept {
  return ctx.leases->held.find(id);
}

void forget_lease_held(EngineContext& ctx, LeaseHeld& h) noexcept {
  Agent& a = *h.agent;
  ctx.timers.cancel(h.timer);
  a.leases.held.erase(h);
  --a.leases.held_count;
  a.leases.held_bytes -= h.region.length;
  h.id = 0;
  ctx.leases->held.release(h.index);
}

RemoteRegion region_of(const LeaseHeld& h) noexcept {
  if (h.state != LeaseHeld::State::held) return {};
  return {h.region.address, h.region.length, 0, h.region.access, h.id};
}

Nanoseconds time_left(const EngineContext& ctx, const LeaseHeld& h) noexcept {
  if (h.state != LeaseHeld::State::held) return {};
  return ctx.clock.duration(h.until - std::min(ctx.clock.now(), h.until));
}

bool detach_lease(EngineContext& ctx, LeaseHeld& h, RemoteRegion& region) noexcept {
  if (h.state != LeaseHeld::State::held || h.call_pending) return false;
  region = h.region;
  forget_lease_held(ctx, h);
  return true;
}

namespace {

/// An operation on a lease that is over.
[[gnu::cold, gnu::noinline]] Status refuse_expired(EngineContext& ctx, const Agent& a) noexcept {
  record(ctx, a, observe::EventKind::lease_end, {"of the peer: an operation came too late"});
  return Status::lease_expired;
}

}  // namespace

Status resolve_leased(EngineContext& ctx, const Agent& a, const RemoteRegion& leased,
                      RemoteRegion& real) noexcept {
  const LeaseHeld* const h = find_lease_held(ctx, leased.lease);
  if (h == nullptr || h->state != LeaseHeld::State::held || ctx.clock.now() >= h->until)
      [[unlikely]]
    return refuse_expired(ctx, a);
  if (h->agent != &a) return Status::invalid_argument;
  const RemoteRegion& whole = h->region;
  // A write with immediate may be empty; check_request() refuses all other empty operations.
  if (leased.address < whole.address || leased.length > whole.length ||
      leased.address - whole.address > whole.length - leased.length)
    return Status::out_of_bounds;
  real = {leased.address, leased.length, whole.rkey, whole.access};
  return Status::ok;
}

Status request_lease(EngineContext& ctx, Agent& a, std::size_t bytes, const LeaseOptions& options,
                     const LeaseCallback& done) noexcept {
  if (a.state != ConnectionState::ready) return Status::not_connected;
  if (a.raw != nullptr) return Status::unsupported;
  const auto access = static_cast<std::uint8_t>(options.access);
  if (bytes == 0 || !wire::is_remote_access(access) || !is_lease_time(ctx, options.duration))
    return Status::invalid_argument;
  if (options.tag != 0 && !a.peer.application_fields) return Status::unsupported;
  if (!can_queue_control(a)) return Status::would_block;
  LeaseHeld* const h = make_lease_held(ctx, a, bytes);
  if (h == nullptr) return Status::would_block;
  h->region.access = options.access;
  h->done = done;
  h->until = last_use_of(ctx, h->start, options.duration);
  await_reply(ctx, *h);
  wire::TaggedLeaseRequest r;
  r.tag = options.tag;
  r.bytes = bytes;
  r.time = static_cast<std::uint64_t>(options.duration.count());
  r.id = h->id;
  r.alignment = options.alignment;
  r.access = access;
  if (r.tag != 0)
    send_control_message(ctx, a, wire::MessageKind::tagged_lease_request, r);
  else
    send_control_message<wire::LeaseRequest>(ctx, a, wire::MessageKind::lease_request, r);
  return Status::ok;
}

void on_lease_denial(EngineContext& ctx, Agent& a, const wire::LeaseDenial& denial) noexcept {
  LeaseHeld* const h = find_held(ctx, a, denial.id);
  if (h == nullptr || h->state != LeaseHeld::State::requested)
    return fail_lease_protocol(ctx, a, "it answers no request");
  LeaseReply reply = make_reply(LeaseVerdict::unwanted);
  reply.code = denial.code;
  const auto end = std::find(denial.text.begin(), denial.text.end(), std::uint8_t{0});
  reply.text = {reinterpret_cast<const char*>(denial.text.data()),
                static_cast<std::size_t>(end - denial.text.begin())};
  h->state = LeaseHeld::State::returning;
  end_call(ctx, *h, reply);
}

void on_lease_grant(EngineContext& ctx, Agent& a, const wire::LeaseGrant& grant) noexcept {
  LeaseHeld* const h = find_held(ctx, a, grant.id);
  if (h == nullptr || h->state != LeaseHeld::State::requested)
    return fail_lease_protocol(ctx, a, "it answers no request");
  LeaseReply reply = make_reply(grant.verdict);
  if (grant.verdict != LeaseVerdict::granted) {
    h->state = LeaseHeld::State::returning;
    return end_call(ctx, *h, reply);
  }
  const Nanoseconds time = duration_of(grant.time);
  if (grant.bytes != h->region.length ||
      !allows(h->region.access, static_cast<Access>(grant.access)) ||
      last_use_of(ctx, h->start, time) > h->until)
    return fail_lease_protocol(ctx, a, "it grants what was not asked for");
  start_lease(ctx, *h, grant);
  reply.duration = time;
  reply.memory = detail::make<RemoteMemory>(ctx.slot, h->id);
  end_call(ctx, *h, reply);
}

void on_lease_push(EngineContext& ctx, Agent& a, const wire::LeaseGrant& grant) noexcept {
  if (grant.verdict != LeaseVerdict::granted)
    return fail_lease_protocol(ctx, a, "it leases nothing");
  LeaseVerdict verdict = LeaseVerdict::granted;
  use_next_handlers(a);
  if (!a.handlers.on_lease) {
    verdict = LeaseVerdict::unwanted;
  } else if (duration_of(grant.time) <= ctx.config.leases.guard) {
    verdict = LeaseVerdict::bad_duration;
  } else if (a.leases.held_count >= a.attributes.leases.count) {
    verdict = LeaseVerdict::too_many;
  }
  LeaseHeld* const h =
      verdict == LeaseVerdict::granted ? make_lease_held(ctx, a, grant.bytes) : nullptr;
  if (h == nullptr) {
    LeaseHeld none;
    none.peer_id = grant.lease;
    none.agent = &a;
    if (verdict == LeaseVerdict::granted) verdict = LeaseVerdict::no_room;
    return send_call(ctx, none, LeaseAction::took, false, 0, verdict);
  }
  start_lease(ctx, *h, grant);
  send_call(ctx, *h, LeaseAction::took, false);
  RemoteMemory memory = detail::make<RemoteMemory>(ctx.slot, h->id);
  a.handlers.on_lease(handle(ctx, a), memory);
}

void on_lease_recall(EngineContext& ctx, Agent& a, const wire::LeaseCall& call) noexcept {
  for (LeaseHeld& h : a.leases.held) {
    if (h.peer_id != call.lease || h.state != LeaseHeld::State::held) continue;
    record(ctx, a, observe::EventKind::lease_end, {"of the peer: recall"});
    if (h.call_pending) {
      LeaseReply reply = make_reply(LeaseVerdict::over);
      const std::uint32_t id = h.id;
      end_call(ctx, h, reply);
      if (h.id != id || h.state != LeaseHeld::State::held) return;  // the callback returned it
    }
    const LeaseCallback auto_ended = take_auto_renewal(h);
    release_lease(ctx, h);
    LeaseReply reply = make_reply(LeaseVerdict::over);
    if (auto_ended) auto_ended(reply);
    return;
  }
  // A recall that crossed the lease's return has no effect.
}

void on_lease_reply(EngineContext& ctx, Agent& a, const wire::LeaseReply& answer) noexcept {
  LeaseHeld* const h = find_held(ctx, a, answer.id);
  if (h == nullptr || !h->call_pending || h->state == LeaseHeld::State::requested) {
    // A recall or a release has ended the call before.
    if (h == nullptr || h->state == LeaseHeld::State::released) return;
    return fail_lease_protocol(ctx, a, "it replies to no call");
  }
  LeaseReply reply = make_reply(answer.verdict);
  if (h->state == LeaseHeld::State::held && answer.verdict == LeaseVerdict::granted) {
    reply.duration = duration_of(answer.time);
    const std::uint64_t until = last_use_of(ctx, h->renewal_start, reply.duration);
    if (until > h->renewal_until)
      return fail_lease_protocol(ctx, a, "it grants what was not asked for");
    h->until = until;
  }
  const std::uint32_t id = h->id;
  const bool is_automatic = std::exchange(h->auto_pending, false);
  end_call(ctx, *h, reply);
  if (h->id != id || h->state != LeaseHeld::State::held) return;
  if (!is_automatic || answer.verdict == LeaseVerdict::granted)
    return schedule_auto_renewal(ctx, *h);
  if (const LeaseCallback ended = take_auto_renewal(*h); ended) ended(reply);
}

Status renew_lease(EngineContext& ctx, LeaseHeld& h, Nanoseconds time,
                   const LeaseCallback& done) noexcept {
  if (!is_lease_time(ctx, time)) return Status::invalid_argument;
  if (const Status status = check_call(ctx, h); status != Status::ok) return status;
  h.renewal_start = ctx.clock.now();
  h.renewal_until = last_use_of(ctx, h.renewal_start, time);
  h.done = done;
  await_reply(ctx, h);
  send_call(ctx, h, LeaseAction::renew, false, static_cast<std::uint64_t>(time.count()));
  return Status::ok;
}

Status auto_renew_lease(EngineContext& ctx, LeaseHeld& h, Nanoseconds time,
                        const LeaseCallback& on_end) noexcept {
  if (!is_lease_time(ctx, time)) return Status::invalid_argument;
  const Status status = check_call(ctx, h);
  if (status != Status::ok && status != Status::would_block) return status;
  h.auto_time = time;
  h.on_auto_end = on_end;
  h.auto_pending = false;  // the answer to a request of an earlier call does not end this one
  schedule_auto_renewal(ctx, h);
  return Status::ok;
}

void stop_auto_renewal(EngineContext& ctx, LeaseHeld& h) noexcept {
  (void)take_auto_renewal(h);
  if (h.state == LeaseHeld::State::held && !h.call_pending) ctx.timers.cancel(h.timer);
}

void on_auto_renewal_due(EngineContext& ctx, LeaseHeld& h) noexcept {
  const Status status = renew_lease(ctx, h, h.auto_time, {});
  if (status == Status::ok) {
    h.auto_pending = true;
  } else if (status == Status::would_block) {
    schedule_auto_renewal(ctx, h);
  } else if (status == Status::lease_expired) {
    record(ctx, *h.agent, observe::EventKind::lease_end, {"of the peer: expiry"});
    LeaseReply reply = make_reply(LeaseVerdict::over);
    if (const LeaseCallback ended = take_auto_renewal(h); ended) ended(reply);
  }
  // Else the connection ends, which ends its leases.
}

Status give_back_lease(EngineContext& ctx, LeaseHeld& h, const LeaseCallback& done) noexcept {
  if (const Status status = check_call(ctx, h); status != Status::ok) return status;
  (void)take_auto_renewal(h);
  h.state = LeaseHeld::State::returning;
  h.done = done;
  await_reply(ctx, h);
  send_call(ctx, h, LeaseAction::give_back, true);
  return Status::ok;
}

void release_lease(EngineContext& ctx, LeaseHeld& h) noexcept {
  if (h.state != LeaseHeld::State::held) return;
  (void)take_auto_renewal(h);
  // The reply to a pending renewal will find no lease.
  if (h.agent->state == ConnectionState::ready) send_call(ctx, h, LeaseAction::release, true);
  if (!h.call_pending || !h.done) return forget_lease_held(ctx, h);
  h.state = LeaseHeld::State::released;
  h.call_pending = false;
  ctx.timers.reschedule(h.timer, ctx.clock.now());
}

void end_leases_held(EngineContext& ctx, Agent& a) noexcept {
  while (!a.leases.held.empty()) {
    LeaseHeld& h = *a.leases.held.front();
    LeaseReply reply = make_reply(LeaseVerdict::closing);
    const LeaseCallback done = std::exchange(h.done, {});
    const LeaseCallback auto_ended = take_auto_renewal(h);
    forget_lease_held(ctx, h);
    if (done) done(reply);
    if (auto_ended) auto_ended(reply);
  }
}

}  // namespace spinwire::agent
