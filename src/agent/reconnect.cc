#include "agent/reconnect.h"

#include <algorithm>
#include <new>
#include <utility>

#include "agent/agent.h"
#include "agent/connecting.h"
#include "base/error.h"

namespace spinwire::agent {
namespace {

/// Doubles with each attempt up to the maximum. A random part of up to a half keeps clients of one
/// peer from connecting at the same time.
Nanoseconds next_delay(ReconnectState& state) noexcept {
  constexpr std::uint32_t kMostDoublings = 30;
  const std::uint32_t doublings = std::min(state.attempts, kMostDoublings);
  const auto first = static_cast<std::uint64_t>(state.options.first_delay.count());
  const auto most = static_cast<std::uint64_t>(state.options.max_delay.count());
  const std::uint64_t longest = first > most >> doublings ? most : first << doublings;
  return Nanoseconds(static_cast<std::int64_t>(longest - state.random.below(longest / 2 + 1)));
}

bool is_permanent(Status status) noexcept {
  return status == Status::protocol || status == Status::unsupported ||
         status == Status::invalid_argument || status == Status::remote_access;
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
  prepare_timers(a);
}

}  // namespace

bool can_reconnect(const Agent& a) noexcept {
  const ReconnectState* state = a.reconnect.get();
  if (state == nullptr || a.closing) return false;
  return !state->permanent && !is_permanent(a.cause.status) &&
         state->attempts < state->options.attempts;
}

void back_off(EngineContext& ctx, Agent& a) noexcept {
  ReconnectState& state = *a.reconnect;
  const bool interrupted = a.setup.was_ready;
  // A connection that is soon lost again does not reset the backoff.
  const bool lasted =
      interrupted && ctx.clock.now() - state.ready_at >= ctx.clock.ticks(state.options.max_delay);
  if (lasted) state.attempts = 0;
  state.last = std::move(a.cause);
  if (state.first.status == Status::ok) state.first = state.last;
  state.delay = next_delay(state);
  ++state.attempts;
  state.backing_off = true;
  forget_attempt(a);
  enter(ctx, a, ConnectionState::resolving);
  if (interrupted && a.handlers.on_interrupted)
    a.handlers.on_interrupted(handle(ctx, a), state.last);
}

Result<ReconnectWay> start_attempt(EngineContext& ctx, Agent& a) {
  a.reconnect->backing_off = false;
  if (!reserve_first_receive(ctx, a)) {
    return tl::unexpected(no_more_connections(
        ctx, base::format("connect to {} again", peer_name(a)), ErrorFor::caller));
  }
  set_stage(a, Stage::domain);
  enter(ctx, a, ConnectionState::resolving);
  queue_setup(ctx, a);
  return ReconnectWay{a.reconnect->address, a.reconnect->via, a.setup.timeout};
}

Error final_cause(Agent& a) noexcept {
  if (a.reconnect == nullptr || a.closing || a.reconnect->first.status == Status::ok)
    return std::move(a.cause);
  Error first = std::move(a.reconnect->first);
  try {
    first.found += base::format("; {} attempts to reconnect failed, the last one: {}",
                                a.reconnect->attempts, a.cause.message());
  } catch (...) {  // without memory, the first cause alone
  }
  return first;
}

}  // namespace spinwire::agent
