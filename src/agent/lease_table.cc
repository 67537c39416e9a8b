// Leases: what the owner's and the holder's side have in common.
#include "agent/lease_table.h"

#include <algorithm>

#include "agent/agent.h"
#include "agent/rendezvous.h"

namespace spinwire::agent {
namespace {

using wire::MessageKind;

/// Decodes a body and hands it on.
template <typename Body, typename Take>
void take(EngineContext& ctx, Agent& a, std::span<const std::byte> bytes, Take take) noexcept {
  Body body;
  if (!wire::decode(bytes, body)) return fail_lease_protocol(ctx, a, "it is malformed");
  take(body);
}

}  // namespace

void fail_lease_protocol(EngineContext& ctx, Agent& a, const char* found) noexcept {
  fail_bad(
      ctx, a,
      {Status::protocol, "take a message about a lease", found, "the peer is broken or hostile"});
}

Status status_of(wire::LeaseVerdict verdict) noexcept {
  switch (verdict) {
    case wire::LeaseVerdict::granted:
      return Status::ok;
    case wire::LeaseVerdict::no_room:
      return Status::no_buffer;
    case wire::LeaseVerdict::no_right:
      return Status::remote_access;
    case wire::LeaseVerdict::over:
      return Status::lease_expired;
    case wire::LeaseVerdict::unwanted:
      return Status::refused;
    case wire::LeaseVerdict::closing:
      return Status::flushed;
    case wire::LeaseVerdict::too_long:
    case wire::LeaseVerdict::misaligned:
    case wire::LeaseVerdict::too_many:
    case wire::LeaseVerdict::too_much:
    case wire::LeaseVerdict::bad_time:
      break;
  }
  return Status::limit;
}

bool is_lease_time(const EngineContext& ctx, Nanoseconds time) noexcept {
  return time > ctx.config.leases.guard &&
         static_cast<std::uint64_t>(time.count()) <= wire::kLongestLease;
}

// The device repeats for 4.096 us * 2^ack_timeout, up to four times that (InfiniBand specification,
// 9.7.6.1.3), and that retry_count times more. By our settings: both ends are meant to have the
// same.
std::uint64_t max_retry_ticks(const EngineContext& ctx, const Agent& a) noexcept {
  const verbs::RetryOptions& retry = a.attributes.queue_pair.retry;
  const std::uint64_t once = std::uint64_t{4096} << retry.ack_timeout;
  const std::uint64_t all = 4 * once * (std::uint64_t{retry.retry_count} + 1);
  return ctx.clock.ticks(
      Nanoseconds(static_cast<std::int64_t>(std::min(all, wire::kLongestLease))));
}

void on_lease_message(EngineContext& ctx, Agent& a, MessageKind kind,
                      std::span<const std::byte> body, std::uint32_t invalidated) noexcept {
  switch (kind) {
    case MessageKind::lease_request:
      return take<wire::LeaseRequest>(ctx, a, body, [&](const wire::LeaseRequest& request) {
        on_lease_request(ctx, a, request);
      });
    case MessageKind::lease_grant:
      return take<wire::LeaseGrant>(
          ctx, a, body, [&](const wire::LeaseGrant& grant) { on_lease_grant(ctx, a, grant); });
    case MessageKind::lease_push:
      return take<wire::LeaseGrant>(
          ctx, a, body, [&](const wire::LeaseGrant& grant) { on_lease_push(ctx, a, grant); });
    case MessageKind::lease_call:
      return take<wire::LeaseCall>(ctx, a, body, [&](const wire::LeaseCall& call) {
        if (call.action == wire::LeaseAction::recall) return on_lease_recall(ctx, a, call);
        on_lease_call(ctx, a, call, invalidated);
      });
    default:
      return take<wire::LeaseReply>(
          ctx, a, body, [&](const wire::LeaseReply& reply) { on_lease_reply(ctx, a, reply); });
  }
}

void on_lease_timer(EngineContext& ctx, const base::Timer& timer) noexcept {
  if (timer.kind == kLeaseGrantedTimer)
    return on_lease_granted_timer(ctx, ctx.leases->granted.at(timer.index));
  on_lease_held_timer(ctx, ctx.leases->held.at(timer.index));
}

bool end_leases(EngineContext& ctx, Agent& a) noexcept {
  end_leases_held(ctx, a);
  while (!a.leases.granted.empty()) {
    if (!end_lease_granted(ctx, a)) return false;
  }
  return true;
}

}  // namespace spinwire::agent
