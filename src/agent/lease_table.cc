// Parts of leases that the owner and the holder share. Cold.
#include "agent/lease_table.h"

#include <algorithm>

#include "agent/agent.h"
#include "agent/rendezvous.h"
#include "base/error.h"

namespace spinwire::agent {
namespace {

using wire::MessageKind;

/// Decodes a body and gives it to `handle`.
template <typename Body, typename Handle>
void with_body(EngineContext& ctx, Agent& a, std::span<const std::byte> bytes,
               Handle handle) noexcept {
  Body body;
  if (!wire::decode(bytes, body)) return fail_lease_protocol(ctx, a, "it is malformed");
  handle(ctx, a, body);
}

}  // namespace

namespace {

const char* name_of(LeaseGranted::State state) noexcept {
  switch (state) {
    case LeaseGranted::State::waiting:
      return "being opened";
    case LeaseGranted::State::offered:
      return "offered";
    case LeaseGranted::State::open:
      return "open";
    case LeaseGranted::State::closing:
      return "being closed";
    case LeaseGranted::State::unbinding:
      return "being unbound";
  }
  return "unknown";
}

const char* name_of(LeaseHeld::State state) noexcept {
  switch (state) {
    case LeaseHeld::State::requested:
      return "requested";
    case LeaseHeld::State::held:
      return "held";
    case LeaseHeld::State::returning:
      return "being returned";
    case LeaseHeld::State::released:
      return "released";
  }
  return "unknown";
}

/// "1.250 s left", or that there is no end. The engine may not have polled for long.
std::string time_left_text(const EngineContext& ctx, bool ends, std::uint64_t tick) {
  if (!ends) return "no end";
  const auto left = ctx.clock.duration(tick - std::min(ctx.clock.now(), tick));
  return base::format("{:.3f} s left", std::chrono::duration<double>(left).count());
}

}  // namespace

void visit_lease_lines(const EngineContext& ctx, std::size_t most,
                       const std::function<void(std::string_view)>& visit) {
  if (ctx.leases == nullptr) return;
  LeasePool& pool = *ctx.leases;
  std::size_t count = 0;
  for (std::uint32_t i = 0; i < pool.granted.capacity(); ++i) {
    if (!pool.granted.in_use(i)) continue;
    if (count++ >= most) {
      visit({});
      continue;
    }
    const LeaseGranted& lease = pool.granted.at(i);
    visit(base::format("lease granted {} to connection {}-{}: {} bytes, {}{}, {}", lease.id,
                       lease.agent->index, lease.agent->generation, lease.target.bytes,
                       name_of(lease.state), lease.recalled ? ", recalled" : "",
                       time_left_text(ctx, lease.timer.scheduled(), lease.timer.deadline)));
  }
  for (std::uint32_t i = 0; i < pool.held.capacity(); ++i) {
    if (!pool.held.in_use(i)) continue;
    if (count++ >= most) {
      visit({});
      continue;
    }
    const LeaseHeld& lease = pool.held.at(i);
    visit(base::format("lease held {} of connection {}-{}: {} bytes, {}, {}", lease.id,
                       lease.agent->index, lease.agent->generation, lease.region.length,
                       name_of(lease.state),
                       time_left_text(ctx, lease.state == LeaseHeld::State::held, lease.until)));
  }
}

void fail_lease_protocol(EngineContext& ctx, Agent& a, const char* found) noexcept {
  fail_protocol(ctx, a,
                {Status::protocol, "handle a message about a lease", found, base::kProtocolRemedy});
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
    case wire::LeaseVerdict::bad_duration:
      break;
  }
  return Status::limit;
}

void on_lease_message(EngineContext& ctx, Agent& a, MessageKind kind,
                      std::span<const std::byte> body, std::uint32_t invalidated) noexcept {
  switch (kind) {
    case MessageKind::lease_request:
      return with_body<wire::LeaseRequest>(ctx, a, body, on_lease_request);
    case MessageKind::tagged_lease_request:
      return with_body<wire::TaggedLeaseRequest>(ctx, a, body, on_lease_request);
    case MessageKind::lease_grant:
      return with_body<wire::LeaseGrant>(ctx, a, body, on_lease_grant);
    case MessageKind::tagged_lease_grant:
      return with_body<wire::TaggedLeaseGrant>(ctx, a, body, on_lease_grant);
    case MessageKind::lease_denial:
      return with_body<wire::LeaseDenial>(ctx, a, body, on_lease_denial);
    case MessageKind::lease_push:
      return with_body<wire::LeaseGrant>(ctx, a, body, on_lease_push);
    case MessageKind::tagged_lease_push:
      return with_body<wire::TaggedLeaseGrant>(ctx, a, body, on_lease_push);
    case MessageKind::lease_call:
      return with_body<wire::LeaseCall>(
          ctx, a, body, [invalidated](EngineContext& c, Agent& of, const wire::LeaseCall& call) {
            if (call.action == wire::LeaseAction::recall) return on_lease_recall(c, of, call);
            on_lease_call(c, of, call, invalidated);
          });
    default:
      return with_body<wire::LeaseReply>(ctx, a, body, on_lease_reply);
  }
}

bool end_leases(EngineContext& ctx, Agent& a) noexcept {
  end_leases_held(ctx, a);
  while (!a.leases.granted.empty()) {
    if (!end_lease_granted(ctx, a)) return false;
  }
  return true;
}

}  // namespace spinwire::agent
