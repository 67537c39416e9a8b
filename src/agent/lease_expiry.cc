// The end of leases. The owner counts from the grant and adds the time for which a device may
// repeat an operation. The holder counts from its request and stops leases.guard early. Cold.
#include <algorithm>
#include <utility>

#include "agent/agent.h"
#include "agent/lease_table.h"
#include "base/error.h"

namespace spinwire::agent {
namespace {

std::uint64_t after(const EngineContext& ctx, std::uint64_t ticks) noexcept {
  return ctx.clock.now() + ticks;
}

/// Longest time for which a posted operation may still be under way, in ticks. A device repeats it
/// for 4.096 us * 2^ack_timeout, up to four times that (InfiniBand specification, 9.7.6.1.3), and
/// retry_count times more. Assumes that both ends have equal settings.
std::uint64_t max_retry_ticks(const EngineContext& ctx, const Agent& a) noexcept {
  const verbs::RetryOptions& retry = a.attributes.queue_pair.retry;
  const std::uint64_t once = std::uint64_t{4096} << retry.ack_timeout;
  const std::uint64_t all = 4 * once * (std::uint64_t{retry.retry_count} + 1);
  return ctx.clock.ticks(
      Nanoseconds(static_cast<std::int64_t>(std::min(all, wire::kLongestLease))));
}

void on_granted_timer(EngineContext& ctx, LeaseGranted& lease) noexcept {
  using State = LeaseGranted::State;
  if (lease.state == State::open)
    return close_lease(ctx, lease, lease.recalled ? ReturnedBy::recall : ReturnedBy::expiry);
  if (lease.state != State::offered) {
    // Many leases may end at once, and their windows are unbound one after the other.
    const std::uint64_t due = ctx.leases->bindings[lease.agent->index].last_ended +
                              ctx.clock.ticks(ctx.config.connections.close_timeout);
    if (due > ctx.clock.now()) return ctx.timers.reschedule(lease.timer, due);
  }
  fail(ctx, *lease.agent,
       {Status::peer_lost, "lease memory to the peer",
        lease.state == State::offered ? "no answer came in time"
                                      : "the window that it uses does not end in time",
        base::kHangingPeerRemedy});
}

void on_held_timer(EngineContext& ctx, LeaseHeld& lease) noexcept {
  if (lease.state == LeaseHeld::State::held && !lease.call_pending)
    return on_auto_renewal_due(ctx, lease);
  if (lease.state != LeaseHeld::State::released) {
    return fail(ctx, *lease.agent,
                {Status::peer_lost, "ask the peer about a lease", "no answer came in time",
                 base::kHangingPeerRemedy});
  }
  LeaseReply reply;
  reply.status = Status::cancelled;
  const LeaseCallback done = std::exchange(lease.done, {});
  forget_lease_held(ctx, lease);
  done(reply);
}

}  // namespace

bool is_lease_time(const EngineContext& ctx, Nanoseconds time) noexcept {
  return time > ctx.config.leases.guard &&
         static_cast<std::uint64_t>(time.count()) <= wire::kLongestLease;
}

std::uint64_t expiry_of(const EngineContext& ctx, const LeaseGranted& lease) noexcept {
  return after(ctx, ctx.clock.ticks(lease.time) + max_retry_ticks(ctx, *lease.agent));
}

void expire_recalled(EngineContext& ctx, LeaseGranted& lease) noexcept {
  const std::uint64_t deadline = after(ctx, ctx.clock.ticks(ctx.config.connections.close_timeout) +
                                                max_retry_ticks(ctx, *lease.agent));
  if (deadline < lease.timer.deadline) ctx.timers.reschedule(lease.timer, deadline);
}

std::uint64_t last_use_of(const EngineContext& ctx, std::uint64_t start,
                          Nanoseconds time) noexcept {
  const Nanoseconds guard = ctx.config.leases.guard;
  return start + (time > guard ? ctx.clock.ticks(time - guard) : 0);
}

void await_lease_answer(EngineContext& ctx, base::Timer& timer) noexcept {
  ctx.timers.reschedule(timer, after(ctx, ctx.clock.ticks(ctx.config.connections.peer_timeout)));
}

void on_lease_timer(EngineContext& ctx, const base::Timer& timer) noexcept {
  if (timer.kind == kLeaseGrantedTimer)
    return on_granted_timer(ctx, ctx.leases->granted.at(timer.index));
  on_held_timer(ctx, ctx.leases->held.at(timer.index));
}

}  // namespace spinwire::agent
