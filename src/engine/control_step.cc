// The control step: sockets, liveness, timers, at most one control verb. Never blocks.
#include <algorithm>

#include "base/log.h"
#include "engine/engine_core.h"

namespace spinwire::detail {

using agent::Agent;
using agent::kNone;

int EngineCore::poll_control() noexcept {
  if (!guard.enter()) [[unlikely]]
    return -static_cast<int>(guard.diagnose());
  context.now = context.clock.now();
  const std::uint32_t events = control_step(context.now);
  if (calls != nullptr) {
    rpc::finish_poll(*calls);
    if (calls->queue_first != nullptr) wake_soon();
  }
  guard.leave();
  return static_cast<int>(events);
}

/// Takes what lies in the completion queue, as much as a busy one may have. Devices forget the
/// completions of a queue pair that is destroyed, those of our receives included.
void EngineCore::drain() noexcept {
  constexpr int kRounds = 8;
  for (int round = 0; round < kRounds && drain_completions() != 0; ++round) {
  }
}

/// Lets the first agents in line take their next step, until one of them has used a control verb.
bool EngineCore::take_setup_step() noexcept {
  constexpr int kTriesPerStep = 16;
  for (int i = 0; i < kTriesPerStep && context.setup_first != kNone; ++i) {
    Agent& a = context.agents.at(context.setup_first);
    context.setup_first = a.setup.next;
    if (context.setup_first == kNone) context.setup_last = kNone;
    a.setup.in_queue = false;
    if (a.stage == agent::Stage::destroy) drain();
    const agent::Stage before = a.stage;
    const bool verb = agent::advance(context, a);
    if (a.setup.exchange != kNone) {
      progress(handshakes.at(a.setup.exchange));
    } else if (a.setup.out_of_band) {
      progress_by_hand(a);
    } else if (a.setup.cm != nullptr) {
      progress_through_cm(a);
    }
    if (a.stage == agent::Stage::over && a.state == ConnectionState::draining) {
      // If it has got into the line again meanwhile, at its next turn.
      if (!a.setup.in_queue) agent::finish(context, a);
    } else if (verb || a.stage != before) {
      // More to come, unless it waits for somebody else: then its next step does nothing.
      agent::list_setup(context, a);
    }
    if (verb) return true;
  }
  return false;
}

void EngineCore::take_timer(base::Timer& timer) noexcept {
  if (timer.kind == engine::kHandshakeTimer) {
    engine::Handshake& h = handshakes.at(timer.index);
    if (h.serves != 0 || h.asks != 0) return drop(h);  // the session may be in use
    Agent* a = agent_of(h);
    if (a == nullptr || h.refusing) {
      if (!h.refusing) {
        ++context.stats.handshakes_refused;
        base::log(LogLevel::info, "{} said nothing valid within the handshake time-out",
                  h.exchange.peer_address());
      }
      drop(h);
    }
    return;  // else the agent's own deadline ends it
  }
  // Of a session that is being opened: the time is over.
  if (timer.kind == rpc::kClientTimer) stop_opening(calls->clients.at(timer.index));
  if (timer.kind >= rpc::kClientTimer && timer.kind <= rpc::kRetransmissionTimer)
    return rpc::on_timer(*calls, timer);
  if (timer.kind == agent::kLeaseGrantedTimer || timer.kind == agent::kLeaseHeldTimer)
    return agent::on_lease_timer(context, timer);
  Agent& a = context.agents.at(timer.index);
  if (a.reconnect != nullptr && a.reconnect->resting && timer.kind == agent::kDeadlineTimer)
    return reconnect(a);
  agent::on_timer(context, a, static_cast<agent::TimerKind>(timer.kind));
}

std::uint32_t EngineCore::control_step(std::uint64_t now) noexcept {
  constexpr std::size_t kTimersPerStep = 64;
  ++context.stats.control_steps;
  if (context.device->provider().control != nullptr)
    context.device->provider().control(context.device->context());
  look_at_sockets();
  if (!device_watched) take_async_events();
  if (now >= next_device_look) look_for_device();
  if (context.receive_shortage != 0) agent::finish_poll(context);
  bool verb = take_setup_step();
  const agent::LeaseWork leases = agent::advance_leases(context, !verb);
  verb = verb || leases == agent::LeaseWork::verb;
  // In turn: what cannot go yet, because a peer is in the midst of an access, stops nothing else.
  memory::WindowPool& windows = context.windows;
  const bool windows_turn = windows.pending() && context.stats.control_steps % 2 == 0;
  if (!verb && windows_turn) (void)windows.poll();
  if (!verb && !windows_turn && !context.registrations->poll_revocations())
    (void)context.device->poll_leaving();
  agent::expire_buffer_waiters(context);
  if (calls != nullptr) rpc::upkeep(*calls);
  if (calls != nullptr && calls->connections_wanted != 0) connect_sessions();
  if (calls != nullptr && calls->has_silent_peers) ask_silent();
  const std::size_t fired = context.timers.advance(
      now, kTimersPerStep, [this](base::Timer& timer) { take_timer(timer); });
  // What callbacks have deferred goes out with this very poll.
  if (agent::has_work(context) || context.queued_agents != 0) agent::finish_poll(context);
  // While such work goes on, every poll takes a step.
  const bool more = context.setup_first != kNone ||
                    (leases != agent::LeaseWork::none && !context.leases->work_queue.empty());
  if (next_control != ~std::uint64_t{0}) next_control = more ? now : now + control_interval;
  return static_cast<std::uint32_t>(fired) + (verb ? 1u : 0u);
}

}  // namespace spinwire::detail
