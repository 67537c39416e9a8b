// The control step: sockets, liveness, timers, at most one control verb. Never blocks.
#include "engine/engine_core.h"

namespace spinwire::detail {

using agent::Agent;
using agent::kNone;

int EngineCore::poll_control() noexcept {
  if (!guard.enter()) [[unlikely]]
    return -static_cast<int>(guard.diagnose());
  context.now = context.clock.now_from(context.now);
  const std::uint32_t events = control_step(context.now);
  if (calls != nullptr && rpc::finish_poll(*calls)) schedule.wake_soon();
  guard.leave();
  return static_cast<int>(events);
}

void EngineCore::drain() noexcept {
  constexpr int kRounds = 8;
  for (int round = 0; round < kRounds && poll_completions() != 0; ++round) {
  }
}

/// Lets the first agents of the set-up queue take their next step, until one of them has used a
/// control verb.
bool EngineCore::advance_agents() noexcept {
  constexpr int kTriesPerStep = 16;
  for (int i = 0; i < kTriesPerStep && context.setup_first != kNone; ++i) {
    Agent& a = context.agents.at(context.setup_first);
    context.setup_first = a.setup.next;
    if (context.setup_first == kNone) context.setup_last = kNone;
    a.setup.in_queue = false;
    // Devices forget the completions of a queue pair that is destroyed.
    if (a.stage == agent::Stage::destroy) drain();
    const agent::Stage before = a.stage;
    const bool verb = agent::run_setup_step(context, a);
    connector.on_setup_step(a);
    if (a.stage == agent::Stage::over && a.state == ConnectionState::draining) {
      // If it is in the queue again by now, at its next turn.
      if (!a.setup.in_queue) agent::finish(context, a);
    } else if (verb || a.stage != before) {
      // There is more to do, unless it waits for a peer: then its next step does nothing.
      agent::queue_setup(context, a);
    }
    if (verb) return true;
  }
  return false;
}

void EngineCore::on_timer(base::Timer& timer) noexcept {
  if (timer.kind == control::kHandshakeTimer) return control.on_timer(timer);
  if (timer.kind >= rpc::kClientTimer && timer.kind <= rpc::kRetransmissionTimer)
    return rpc::on_timer(*calls, timer);
  if (timer.kind == agent::kLeaseGrantedTimer || timer.kind == agent::kLeaseHeldTimer)
    return agent::on_lease_timer(context, timer);
  Agent& a = context.agents.at(timer.index);
  if (a.reconnect != nullptr && a.reconnect->backing_off && timer.kind == agent::kDeadlineTimer)
    return connector.reconnect(a);
  agent::on_timer(context, a, static_cast<agent::TimerKind>(timer.kind));
}

std::uint32_t EngineCore::control_step(std::uint64_t now) noexcept {
  constexpr std::size_t kTimersPerStep = 64;
  ++context.stats.control_steps;
  if (context.device->provider().control != nullptr)
    context.device->provider().control(context.device->context());
  control.poll();
  device_watch.step(now);
  if (context.receive_shortage != 0) agent::finish_poll(context);
  bool verb = advance_agents();
  const agent::LeaseWork leases = agent::advance_leases(context, !verb);
  verb = verb || leases == agent::LeaseWork::verb;
  // Windows and registrations take turns: one that waits for a peer's access stops nothing else.
  memory::WindowPool& windows = context.windows;
  const bool windows_turn = windows.pending() && context.stats.control_steps % 2 == 0;
  if (!verb && windows_turn) (void)windows.poll();
  if (!verb && !windows_turn && !context.registrations->poll_revocations())
    (void)context.device->poll_leaving();
  agent::expire_buffer_waiters(context);
  if (calls != nullptr) rpc::upkeep(*calls);
  const std::size_t fired =
      context.timers.advance(now, kTimersPerStep, [this](base::Timer& timer) { on_timer(timer); });
  // What callbacks have deferred goes out with this poll.
  if (agent::has_work(context) || context.queued_agents != 0) agent::finish_poll(context);
  // While there is more to do, every poll takes a control step.
  const bool more = context.setup_first != kNone ||
                    (leases != agent::LeaseWork::none && !context.leases->work_queue.empty());
  if (schedule.next_control != engine::PollSchedule::kNever)
    schedule.next_control = more ? now : now + schedule.control_interval;
  return static_cast<std::uint32_t>(fired) + (verb ? 1u : 0u);
}

}  // namespace spinwire::detail
