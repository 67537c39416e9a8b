// The owner's side of leases: grants memory, and returns it to its pool or to the application when
// no peer can reach it any more.
#include <algorithm>
#include <bit>
#include <new>
#include <utility>

#include "agent/agent.h"
#include "agent/lease_table.h"
#include "agent/recording.h"
#include "base/internals.h"
#include "memory/window_requests.h"

namespace spinwire::agent {
namespace {

using Origin = LeaseGranted::Origin;
using State = LeaseGranted::State;
using wire::LeaseAction;
using wire::LeaseVerdict;

constexpr std::uint32_t kBlockAlignment = 64;
/// Bytes zeroed while a request is handled; control steps zero the rest.
constexpr std::uint64_t kZeroedAtOnce = 64u << 10;

bool is_ending(const LeaseGranted& lease) noexcept {
  return lease.state == State::closing || lease.state == State::unbinding;
}

void refuse_request(EngineContext& ctx, Agent& a, std::uint32_t request,
                    LeaseVerdict verdict) noexcept {
  wire::LeaseGrant grant;
  grant.id = request;
  grant.verdict = verdict;
  send_control_message(ctx, a, wire::MessageKind::lease_grant, grant);
}

/// Answers a request that the application refuses.
void deny_request(EngineContext& ctx, Agent& a, std::uint32_t request, std::uint32_t code,
                  std::string_view text) noexcept {
  if (!a.peer.application_fields) return refuse_request(ctx, a, request, LeaseVerdict::unwanted);
  wire::LeaseDenial denial;
  denial.id = request;
  denial.code = code;
  wire::set_text(denial, text);
  send_control_message(ctx, a, wire::MessageKind::lease_denial, denial);
}

void send_reply(EngineContext& ctx, Agent& a, std::uint32_t id, LeaseVerdict verdict,
                std::uint64_t time = 0) noexcept {
  wire::LeaseReply reply;
  reply.id = id;
  reply.verdict = verdict;
  reply.time = time;
  send_control_message(ctx, a, wire::MessageKind::lease_reply, reply);
}

/// Runs the callback of grant_lease(), once.
void complete_grant(LeaseGranted& lease, LeaseVerdict verdict) noexcept {
  if (!lease.done) return;
  const LeaseCallback done = std::exchange(lease.done, {});
  LeaseReply reply;
  reply.status = status_of(verdict);
  reply.refusal = refusal_of(verdict);
  if (verdict == LeaseVerdict::granted) {
    reply.lease.value = lease.id;
    reply.duration = lease.time;
  }
  done(reply);
}

/// The verdict that the callback of grant_lease() reports if the lease ended before the peer had
/// it.
LeaseVerdict verdict_of(ReturnedBy how) noexcept {
  return how == ReturnedBy::refusal  ? LeaseVerdict::unwanted
         : how == ReturnedBy::recall ? LeaseVerdict::over
                                     : LeaseVerdict::closing;
}

/// The requested rights that the connection and the device allow.
Access allowed_rights(const EngineContext& ctx, const Agent& a, std::uint8_t asked) noexcept {
  auto rights = static_cast<std::uint8_t>(asked & static_cast<std::uint8_t>(a.attributes.access));
  if (!ctx.device->info().atomics)
    rights &= static_cast<std::uint8_t>(~static_cast<std::uint8_t>(Access::remote_atomic));
  return static_cast<Access>(rights);
}

/// Whether the limits of the connection allow the request.
LeaseVerdict check_limits(const EngineContext& ctx, const Agent& a,
                          const wire::LeaseRequest& r) noexcept {
  const LeaseLimits& most = a.attributes.leases;
  if (r.bytes > most.max_bytes) return LeaseVerdict::too_long;
  if (!std::has_single_bit(r.alignment) || r.alignment > most.max_alignment)
    return LeaseVerdict::misaligned;
  if (r.access > static_cast<std::uint8_t>(Access::remote_all) ||
      allowed_rights(ctx, a, r.access) == Access::local)
    return LeaseVerdict::no_right;
  if (r.time == 0 || r.time > static_cast<std::uint64_t>(most.max_duration.count()))
    return LeaseVerdict::bad_duration;
  if (a.leases.granted_count >= most.count) return LeaseVerdict::too_many;
  if (r.bytes > most.total_bytes - std::min(a.leases.requested_bytes, most.total_bytes))
    return LeaseVerdict::too_much;
  return LeaseVerdict::granted;
}

/// Asks the application whether to give memory to the peer, and sets the lease's tag. If it
/// refuses, so is the request.
bool may_grant(EngineContext& ctx, Agent& a, const wire::LeaseRequest& r,
               std::uint64_t& tag) noexcept {
  tag = r.tag;
  use_next_handlers(a);
  if (!a.handlers.on_memory_request) return true;
  const LeaseOptions options{allowed_rights(ctx, a, r.access), duration_of(r.time), r.alignment,
                             r.tag};
  auto request = detail::make<MemoryRequest>(r.bytes, options);
  a.handlers.on_memory_request(handle(ctx, a), request);
  using detail::Internals;
  tag = Internals::lease_tag(request);
  if (!Internals::is_accepted(request)) {
    deny_request(ctx, a, r.id, Internals::refusal_code(request), Internals::refusal_text(request));
    return false;
  }
  // The callback may have leased memory, or closed the connection.
  const LeaseVerdict verdict = is_ready(a) ? check_limits(ctx, a, r) : LeaseVerdict::closing;
  if (verdict != LeaseVerdict::granted) refuse_request(ctx, a, r.id, verdict);
  return verdict == LeaseVerdict::granted;
}

/// With fewer chunks, a share would keep a single peer from memory that nobody else wants.
constexpr std::uint32_t kLeastSharedChunks = 4;

/// Memory for a request; null if the pool has none, or the source has its share of the records or
/// of the pool.
detail::Block* allocate_lease(EngineContext& ctx, const Agent& a, std::uint64_t bytes) noexcept {
  const auto& records = ctx.leases->granted;
  const SourceAccount& s = *a.source;
  if (!has_share(s.leases, records.capacity() - records.size())) return nullptr;
  detail::Block* const block = ctx.arena->allocate(memory::PoolId::lease, bytes);
  if (block == nullptr) return nullptr;
  const std::uint32_t chunks = ctx.arena->stats(memory::PoolId::lease).chunks;
  const std::uint64_t all = chunks * std::uint64_t{memory::kChunkBytes};
  const std::uint64_t free = all - std::min(ctx.sources.lease_bytes, all);
  if (chunks < kLeastSharedChunks || has_share(s.lease_bytes, free, lease_charge(*block)))
    return block;
  detail::release(block);
  return nullptr;
}

/// Counts a lease that the peer has requested, or its end.
void count_requested(EngineContext& ctx, Agent& a, const LeaseGranted& lease,
                     bool begins) noexcept {
  const std::uint64_t charge = lease_charge(*lease.target.block);
  a.leases.requested_bytes += begins ? lease.target.bytes : -lease.target.bytes;
  a.source->lease_bytes += begins ? charge : -charge;
  ctx.sources.lease_bytes += begins ? charge : -charge;
  a.source->leases += begins ? 1u : ~0u;
}

/// Opens the lease now, or lists it. Other leases of its source come first.
void prepare_or_queue(EngineContext& ctx, LeaseGranted& lease, std::uint64_t most_zeroed) noexcept {
  const bool others_wait = !lease.agent->source->lease_work.empty();
  list_lease(ctx, lease,
             others_wait ? KeyStep::later : prepare_lease(ctx, lease, most_zeroed, false));
}

/// The holder's answer to a push.
void on_push_answered(EngineContext& ctx, Agent& a, LeaseGranted* lease,
                      const wire::LeaseCall& call) noexcept {
  if (lease == nullptr || lease->state != State::offered)
    return fail_lease_protocol(ctx, a, "it accepts what was not leased to it");
  if (call.verdict != LeaseVerdict::granted) {
    complete_grant(*lease, call.verdict);
    return close_lease(ctx, *lease, ReturnedBy::refusal);
  }
  lease->state = State::open;
  ctx.timers.reschedule(lease->timer, expiry_of(ctx, *lease));
  if (lease->recalled) expire_recalled(ctx, *lease);
  complete_grant(*lease, LeaseVerdict::granted);
}

void renew(EngineContext& ctx, Agent& a, LeaseGranted& lease,
           const wire::LeaseCall& call) noexcept {
  if (call.time == 0 ||
      call.time > static_cast<std::uint64_t>(a.attributes.leases.max_duration.count()))
    return send_reply(ctx, a, call.id, LeaseVerdict::bad_duration);
  if (lease.recalled) return send_reply(ctx, a, call.id, LeaseVerdict::over);
  lease.time = duration_of(call.time);
  ctx.timers.reschedule(lease.timer, expiry_of(ctx, lease));
  send_reply(ctx, a, call.id, LeaseVerdict::granted, call.time);
}

}  // namespace

LeaseGranted* find_lease_granted(EngineContext& ctx, const Agent& a, std::uint32_t id) noexcept {
  LeaseGranted* const lease = ctx.leases->granted.find(id);
  return lease != nullptr && lease->agent == &a ? lease : nullptr;
}

LeaseGranted* make_lease_granted(EngineContext& ctx, Agent& a, const memory::KeyTarget& target,
                                 Origin origin) noexcept {
  LeaseGranted* const made = ctx.leases->granted.make();
  if (made == nullptr) return nullptr;
  LeaseGranted& lease = *made;
  lease.timer.kind = kLeaseGrantedTimer;
  lease.target = target;
  detail::retain(target.block);
  lease.origin = origin;
  lease.agent = &a;
  a.leases.granted.push_front(lease);
  ++a.leases.granted_count;
  a.leases.granted_bytes += target.bytes;
  if (origin == Origin::requested) count_requested(ctx, a, lease, true);
  return &lease;
}

void drop_lease_granted(EngineContext& ctx, LeaseGranted& lease) noexcept {
  LeaseTable& leases = lease.agent->leases;
  if (lease.origin == Origin::requested) count_requested(ctx, *lease.agent, lease, false);
  ctx.timers.cancel(lease.timer);
  leases.granted.erase(lease);
  --leases.granted_count;
  leases.granted_bytes -= lease.target.bytes;
  ctx.leases->granted.release(lease.index);
  detail::release(lease.target.block);
}

namespace {

void send_grant(EngineContext& ctx, Agent& a, const wire::TaggedLeaseGrant& grant,
                bool requested) noexcept {
  using wire::MessageKind;
  if (grant.tag != 0 && a.peer.application_fields) {
    return send_control_message(
        ctx, a, requested ? MessageKind::tagged_lease_grant : MessageKind::tagged_lease_push,
        grant);
  }
  send_control_message<wire::LeaseGrant>(
      ctx, a, requested ? MessageKind::lease_grant : MessageKind::lease_push, grant);
}

}  // namespace

void announce_lease(EngineContext& ctx, LeaseGranted& lease) noexcept {
  Agent& a = *lease.agent;
  wire::TaggedLeaseGrant grant;
  grant.tag = lease.tag;
  grant.address = reinterpret_cast<std::uint64_t>(lease.target.data);
  grant.bytes = lease.target.bytes;
  grant.time = static_cast<std::uint64_t>(lease.time.count());
  grant.lease = lease.id;
  grant.rkey = lease.key.rkey;
  grant.access = static_cast<std::uint8_t>(lease.target.access);
  grant.invalidate = lease.key.is_window();
  if (lease.origin == Origin::requested) {
    grant.id = lease.request;
    lease.state = State::open;
    ctx.timers.reschedule(lease.timer, expiry_of(ctx, lease));
    return send_grant(ctx, a, grant, true);
  }
  lease.state = State::offered;
  await_lease_answer(ctx, lease.timer);
  send_grant(ctx, a, grant, false);
}

void refuse_lease(EngineContext& ctx, LeaseGranted& lease) noexcept {
  if (lease.origin == Origin::requested)
    refuse_request(ctx, *lease.agent, lease.request, LeaseVerdict::no_room);
  complete_grant(lease, LeaseVerdict::no_room);
  lease.how = ReturnedBy::refusal;
  finish_lease(ctx, lease);
}

void close_lease(EngineContext& ctx, LeaseGranted& lease, ReturnedBy how,
                 bool invalidated) noexcept {
  if (is_ending(lease)) return;
  ctx.timers.cancel(lease.timer);
  lease.how = how;
  lease.state = State::closing;
  if (lease.key.state == memory::KeyState::none) return finish_lease(ctx, lease);
  if (invalidated && lease.key.is_window()) {
    memory::on_window_unbound(ctx.keys(), lease.key);
    return finish_lease(ctx, lease);
  }
  list_lease(ctx, lease, close_lease_key(ctx, lease, false));
}

void finish_lease(EngineContext& ctx, LeaseGranted& lease) noexcept {
  Agent& a = *lease.agent;
  const memory::KeyTarget& target = lease.target;
  const bool was_granted = lease.key.state != memory::KeyState::none;
  const bool reports_return = was_granted || lease.origin != Origin::requested;
  const std::optional<std::uint32_t> reply_to = lease.reply_to;
  // The key of a long call, and one that expose() made, end by their owner's wish.
  const bool is_usual = lease.how == ReturnedBy::release || lease.how == ReturnedBy::give_back ||
                        lease.how == ReturnedBy::end || lease.origin == Origin::exposed;
  if (was_granted && !is_usual)
    record(ctx, a, observe::EventKind::lease_end, {"granted to the peer: ", to_string(lease.how)});
  if (lease.revoked) ctx.registrations->remember_ended(lease.key.rkey, owner_of(a));
  Returned returned;
  returned.lease.value = lease.id;
  returned.how = lease.how;
  returned.tag = lease.tag;
  returned.requested = lease.origin == Origin::requested;
  if (lease.key.state != memory::KeyState::closing)
    returned.memory = detail::make<BufferSlice>(target.block, target.data, target.bytes);
  complete_grant(lease, verdict_of(lease.how));
  drop_lease_granted(ctx, lease);
  if (reply_to && a.stage == Stage::up) send_reply(ctx, a, *reply_to, LeaseVerdict::granted);
  use_next_handlers(a);
  if (reports_return && a.handlers.on_returned) a.handlers.on_returned(handle(ctx, a), returned);
}

void on_lease_request(EngineContext& ctx, Agent& a, const wire::LeaseRequest& r) noexcept {
  const LeaseVerdict verdict = check_limits(ctx, a, r);
  if (verdict != LeaseVerdict::granted) return refuse_request(ctx, a, r.id, verdict);
  std::uint64_t tag = 0;
  if (!may_grant(ctx, a, r, tag)) return;
  const std::uint32_t slack = std::max(r.alignment, kBlockAlignment) - kBlockAlignment;
  detail::Block* const block = allocate_lease(ctx, a, r.bytes + slack);
  if (block == nullptr) return refuse_request(ctx, a, r.id, LeaseVerdict::no_room);
  const auto start = reinterpret_cast<std::uintptr_t>(block->payload);
  std::byte* const data = block->payload + (-start & (r.alignment - 1));
  LeaseGranted* const lease = make_lease_granted(
      ctx, a, {block, data, r.bytes, allowed_rights(ctx, a, r.access)}, Origin::requested);
  detail::release(block);  // the record holds a reference
  if (lease == nullptr) return refuse_request(ctx, a, r.id, LeaseVerdict::no_room);
  lease->request = r.id;
  lease->tag = tag;
  lease->time = duration_of(r.time);
  if (r.bytes > kZeroedAtOnce) return list_lease(ctx, *lease, KeyStep::later);
  prepare_or_queue(ctx, *lease, kZeroedAtOnce);
}

void on_lease_call(EngineContext& ctx, Agent& a, const wire::LeaseCall& call,
                   std::uint32_t invalidated) noexcept {
  LeaseGranted* const lease = find_lease_granted(ctx, a, call.lease);
  if (call.action == LeaseAction::took) return on_push_answered(ctx, a, lease, call);
  if (lease != nullptr && (lease->state == State::waiting || lease->state == State::offered ||
                           lease->origin == Origin::exposed))
    return fail_lease_protocol(ctx, a, "it calls about a lease that it does not have");
  if (lease == nullptr || lease->state != State::open) {
    // A release that crossed the lease's end needs no reply.
    if (call.action == LeaseAction::release) return;
    return send_reply(ctx, a, call.id, LeaseVerdict::over);
  }
  const bool key_dead = invalidated != 0 && invalidated == lease->key.rkey;
  switch (call.action) {
    case LeaseAction::release:
      return close_lease(ctx, *lease, lease->recalled ? ReturnedBy::recall : ReturnedBy::release,
                         key_dead);
    case LeaseAction::give_back:
      lease->reply_to = call.id;
      return close_lease(ctx, *lease, ReturnedBy::give_back, key_dead);
    default:
      return renew(ctx, a, *lease, call);
  }
}

Status grant_lease(EngineContext& ctx, Agent& a, const BufferSlice& memory,
                   const LeaseOptions& options, const LeaseCallback& done, LeaseId* id) noexcept {
  if (a.state != ConnectionState::ready) return Status::not_connected;
  if (a.raw != nullptr) return Status::unsupported;
  if (!memory || memory.size() == 0) return Status::out_of_bounds;
  const auto asked = static_cast<std::uint8_t>(options.access);
  if (!wire::is_remote_access(asked) || allowed_rights(ctx, a, asked) != options.access ||
      !is_lease_time(ctx, options.duration))
    return Status::invalid_argument;
  if (options.tag != 0 && !a.peer.application_fields) return Status::unsupported;
  if (!can_queue_control(a)) return Status::would_block;
  LeaseGranted* const lease = make_lease_granted(
      ctx, a, {detail::block_of(memory), memory.data(), memory.size(), options.access},
      Origin::pushed);
  if (lease == nullptr) return Status::would_block;
  lease->time = options.duration;
  lease->tag = options.tag;
  lease->done = done;
  if (id != nullptr) id->value = lease->id;
  prepare_or_queue(ctx, *lease, 0);
  return Status::ok;
}

Status recall_lease(EngineContext& ctx, Agent& a, LeaseId id) noexcept {
  LeaseGranted* const lease = find_lease_granted(ctx, a, id.value);
  if (lease == nullptr || lease->origin == Origin::exposed || lease->recalled || is_ending(*lease))
    return Status::invalid_argument;
  lease->recalled = true;
  if (lease->state == State::waiting) {
    list_recalled(ctx, *lease);
    return Status::ok;
  }
  wire::LeaseCall call;
  call.lease = lease->id;
  call.action = LeaseAction::recall;
  send_control_message(ctx, a, wire::MessageKind::lease_call, call);
  if (lease->state == State::open) expire_recalled(ctx, *lease);
  return Status::ok;
}

}  // namespace spinwire::agent
