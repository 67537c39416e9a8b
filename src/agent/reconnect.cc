#include "agent/reconnect.h"

#include <new>
#include <utility>

#include "agent/agent.h"
#include "agent/connecting.h"
#include "base/error.h"
#include "config/local_paths.h"
#include "control/peer_source.h"

namespace spinwire::agent {
namespace {

AttemptEnd end_of(const Agent& a) noexcept {
  return {a.setup.was_ready, !is_retryable(a.cause), a.reconnect->ready_at};
}

/// Resets the agent, except for the parts that belong to the connection rather than to an attempt.
void forget_attempt(Agent& a) noexcept {
  struct {
    std::uint32_t index, generation;
    SourceAccount* source;
    ConnectionHandlers handlers;
    Activity activity;
    decltype(Agent::tallies) tallies;
    Nanoseconds timeout;
    config::ConnectionAttributes attributes;
    std::array<char, 72> peer;
  } const kept{a.index,   a.generation,    a.source,     a.handlers, a.activity,
               a.tallies, a.setup.timeout, a.attributes, a.peer.name};
  std::unique_ptr<ReconnectState> state = std::move(a.reconnect);
  std::unique_ptr<RawQueue> raw = std::move(a.raw);
  std::unique_ptr<PrivateData> ours = std::move(a.private_data);
  if (raw != nullptr) reset_raw(*raw);
  a.~Agent();
  new (&a) Agent();
  a.index = kept.index;
  a.generation = kept.generation;
  a.source = kept.source;
  use_handlers(a, kept.handlers);
  a.activity = kept.activity;
  a.tallies = kept.tallies;
  a.setup.timeout = kept.timeout;
  set_attributes(a, kept.attributes);
  a.peer.name = kept.peer;
  a.setup.outbound = true;
  a.reconnect = std::move(state);
  a.raw = std::move(raw);
  a.private_data = std::move(ours);
  prepare_timers(a);
}

}  // namespace

bool can_reconnect(const EngineContext& ctx, const Agent& a) noexcept {
  const ReconnectState* state = a.reconnect.get();
  const bool comes_back = a.cause.goodbye.invites_back() && !a.goodbyes.by_us;
  if (state == nullptr || (a.closing && !comes_back) || state->is_over) return false;
  return state->plan.has_next(end_of(a), ctx.clock.now());
}

void back_off(EngineContext& ctx, Agent& a) noexcept {
  ReconnectState& state = *a.reconnect;
  const bool interrupted = a.setup.was_ready;
  const std::uint64_t now = ctx.clock.now();
  if (a.cause.goodbye.retry_after.count() != 0)
    state.plan.hold_off(now, a.cause.goodbye.retry_after);
  state.next_attempt = now + state.plan.next(end_of(a), now);
  state.last = std::move(a.cause);
  if (state.first.status == Status::ok || !is_retryable(state.first)) state.first = state.last;
  state.backing_off = true;
  forget_attempt(a);
  enter(ctx, a, ConnectionState::resolving);
  if (interrupted && a.handlers.on_interrupted)
    a.handlers.on_interrupted(handle(ctx, a), state.last);
}

Result<ReconnectWay> start_attempt(EngineContext& ctx, Agent& a) {
  a.reconnect->backing_off = false;
  name_peer(a, a.reconnect->plan.address().text().view());
  set_event_source(a, control::event_source(a.reconnect->plan.address()));
  if (const LocalPath* const path = a.reconnect->plan.local_path(); path != nullptr) {
    auto usable = config::use_local_path(a.attributes.queue_pair, *ctx.device, *path);
    if (!usable) return tl::unexpected(usable.error());
  }
  if (!reserve_first_receive(ctx, a)) {
    return tl::unexpected(no_more_connections(
        ctx, base::format("connect to {} again", peer_name(a)), ErrorFor::caller));
  }
  set_stage(a, Stage::domain);
  enter(ctx, a, ConnectionState::resolving);
  queue_setup(ctx, a);
  return ReconnectWay{a.reconnect->plan.address(), a.reconnect->via, a.setup.timeout};
}

void on_port_down(EngineContext& ctx, std::uint8_t port) noexcept {
  for (Agent& a : ctx.agents) {
    const ReconnectState* const state = a.reconnect.get();
    if (state == nullptr || state->backing_off || is_ending(a) || !state->plan.can_leave(port) ||
        !state->plan.has_next({a.setup.was_ready, false, state->ready_at}, ctx.clock.now()))
      continue;
    fail(ctx, a,
         {Status::local_error, base::format("keep the connection to {}", peer_name(a)),
          base::format("the link of local port {} is down", port), kPortDownRemedy});
  }
}

Error final_cause(Agent& a) noexcept {
  if (a.reconnect == nullptr || a.closing || a.reconnect->first.status == Status::ok)
    return std::move(a.cause);
  return last_error(std::move(a.reconnect->first), std::move(a.cause), a.reconnect->plan);
}

}  // namespace spinwire::agent
