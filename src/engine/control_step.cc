// The control step: sockets, liveness, timers, at most one control verb. Never blocks.
#include <algorithm>

#include "engine/engine_core.h"

namespace spinwire::detail {

using agent::Agent;

int EngineCore::poll_control() noexcept {
  if (!guard.enter()) [[unlikely]]
    return -static_cast<int>(guard.diagnose());
  const std::uint64_t now = context.clock.now_from(context.now);
  if (now - context.now >= schedule.reported_gap && !schedule.is_armed) stalls.on_gap(*this, now);
  context.now = now;
  const std::uint32_t events = control_step(context.now);
  if (calls != nullptr) {
    if (rpc::finish_poll(*calls)) schedule.wake_soon();
    if (!destroyed) rpc::flush(*calls);
  }
  if (destroyed) return finish_destruction(events);
  guard.leave();
  return static_cast<int>(events);
}

void EngineCore::process_all_completions() noexcept {
  constexpr int kRounds = 8;
  for (int round = 0; round < kRounds && poll_completions() != 0; ++round) {
  }
}

/// Advances the first agents of the set-up queue, until one of them has used a control verb.
bool EngineCore::advance_agents() noexcept {
  constexpr int kTriesPerStep = 16;
  for (int i = 0; i < kTriesPerStep; ++i) {
    Agent* const a = agent::pop_setup_queue(context);
    if (a == nullptr) return false;
    if (agent::destroys_next(*a)) process_all_completions();
    const bool verb = agent::continue_setup(context, *a);
    connector.on_setup_step(*a);
    if (agent::is_over(*a) && !loss_probes.holds(*a)) finish(*a);
    if (verb) return true;
  }
  return false;
}

void EngineCore::on_timer(base::Timer& timer) noexcept {
  if (timer.kind == control::kHandshakeTimer) return control.on_timer(timer);
  if (rpc::is_session_timer(timer)) return rpc::on_timer(*calls, timer);
  if (timer.kind == engine::kApplicationTimer)
    return application_timers.on_timer(timer, context.now);
  if (timer.kind == engine::kDrainTimer) return drain.step(context.now);
  if (Agent* const again = agent::on_timer(context, timer); again != nullptr)
    connector.reconnect(*again);
}

std::uint32_t EngineCore::control_step(std::uint64_t now) noexcept {
  constexpr std::size_t kTimersPerStep = 64;
  ++context.stats.control_steps;
  const std::uint64_t begin = context.clock.now();
  if (end_sleep()) agent::on_awake(context);  // the application has slept by itself
  if (schedule.polls_after_sleep != 0) --schedule.polls_after_sleep;
  if (context.device->provider().control != nullptr)
    context.device->provider().control(context.device->context());
  control.poll();
  device_watch.step(now);
  std::uint32_t ended = agent::run_upkeep(context);
  bool verb = advance_agents();
  const agent::LeaseWork leases = agent::advance_leases(context, !verb);
  verb = verb || leases == agent::LeaseWork::verb;
  // Windows and registrations take turns, so that a peer's access that delays one does not block
  // the other.
  memory::WindowPool& windows = context.windows;
  const bool windows_turn = windows.pending() && context.stats.control_steps % 2 == 0;
  bool has_progress = leases != agent::LeaseWork::none;
  // A window may be refused again and again.
  if (!verb && windows_turn && windows.poll()) schedule.brief_sleep = 0;
  if (!verb && !windows_turn) {
    const bool revoked = context.registrations->poll_revocations();
    if (!revoked) (void)context.device->poll_retired_domains();
    has_progress = has_progress || revoked;
  }
  agent::expire_buffer_waiters(context);
  if (calls != nullptr) rpc::upkeep(*calls);
  const std::size_t fired =
      context.timers.advance(now, kTimersPerStep, [this](base::Timer& timer) { on_timer(timer); });
  drain.step(now);
  publisher.step(*this);
  // Operations that callbacks have deferred are posted with this poll.
  if (agent::has_deferred_work(context)) ended += agent::run_deferred_work(context);
  schedule.has_more_work =
      control.can_go_on() ||
      (has_progress && (agent::has_lease_work(context) || context.registrations->pending() != 0));
  // While work is left, every poll takes a control step.
  const bool more = agent::has_setup_work(context) || fired == kTimersPerStep ||
                    schedule.polls_after_sleep != 0 ||
                    (leases != agent::LeaseWork::none && agent::has_lease_work(context));
  if (schedule.next_control != engine::PollSchedule::kNever)
    schedule.next_control = more ? now : now + schedule.control_interval;
  stalls.on_control_step(*this, begin, context.clock.now());
  return static_cast<std::uint32_t>(fired) + (verb ? 1u : 0u) + ended;
}

std::uint64_t EngineCore::next_timer_step() const noexcept {
  const std::uint64_t due = context.timers.next_deadline();
  const bool manual = schedule.next_control == engine::PollSchedule::kNever;
  if (due == base::TimerWheel::kNever || manual) return due;
  return std::max(due, schedule.next_control);
}

bool EngineCore::has_set_up_work() const noexcept {
  return agent::has_setup_work(context) || (calls != nullptr && rpc::wants_connections(*calls));
}

}  // namespace spinwire::detail
