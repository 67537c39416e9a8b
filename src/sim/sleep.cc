// Nodes that sleep by Engine::arm() while they are idle, and the check that nothing comes without
// waking them.

#include <poll.h>

#include <algorithm>

#include "base/internals.h"
#include "sim/state.h"

namespace spinwire {

using sim::Node;

namespace {

/// The descriptors of nodes that sleep are read in one of so many steps, besides when something is
/// known to have come: to read them in each step would take most of a run.
constexpr std::uint64_t kStepsBetweenReads = 8;
/// A timer may run late by so many ticks: by a control step, and by the polls of other nodes.
constexpr std::uint64_t kTimerTolerance = 200'000;

bool is_readable(int fd) noexcept {
  pollfd set{fd, POLLIN, 0};
  return ::poll(&set, 1, 0) > 0;
}

}  // namespace

int Simulation::State::fall_asleep(Node& node) {
  const auto fd = node.engine.fd();
  if (!fd) return node.engine.poll();
  const detail::EngineCore& core = *detail::core_of(node.engine);
  const std::uint64_t before = core.context.stats.completions;
  const bool is_armed = node.engine.arm();
  const auto events = static_cast<int>(core.context.stats.completions - before);
  if (node.ends_after_poll) return events;
  if (!is_armed) return events + node.engine.poll();
  ++stats.sleeps;
  node.is_asleep = true;
  node.has_missed = false;
  node.sleeps_on = *fd;
  node.host_changes = *node.host->change_count();
  node.wakes_at = now + static_cast<std::uint64_t>(node.engine.next_deadline().count());
  if (const std::uint64_t due = softverbs::next_due(node.device()); due > now)
    node.wakes_at = std::min(node.wakes_at, due);
  return events;
}

void Simulation::State::wake(Node& node) noexcept {
  node.is_asleep = false;
  node.idle_polls = 0;
}

bool Simulation::State::has_come(const Node& node) {
  const detail::EngineCore& core = *detail::core_of(node.engine);
  if (core.wake_set.is_woken() || softverbs::has_waiting_packet(node.device())) return true;
  // Another engine on this host may have caused the change.
  return *node.host->change_count() != node.host_changes && is_readable(core.control.descriptor());
}

bool Simulation::State::sleeps_on(Node& node) {
  if (!node.is_asleep) return false;
  const bool is_due = now >= node.wakes_at;
  const bool should_wake = has_come(node);
  node.host_changes = *node.host->change_count();
  if (!should_wake && !is_due && stats.steps % kStepsBetweenReads != 0) return true;
  const detail::EngineCore& core = *detail::core_of(node.engine);
  if (is_readable(node.sleeps_on)) {
    ++stats.wakeups;
    wake(node);
    return false;
  }
  const std::uint64_t timer = core.context.timers.next_fire(core.context.timers.size());
  const bool overslept =
      is_due && timer < now && now - timer > kTimerTolerance && node.paused_until <= timer;
  if ((should_wake || overslept) && !std::exchange(node.has_missed, true)) ++stats.missed_wakeups;
  if (!is_due) return true;
  wake(node);
  return false;
}

}  // namespace spinwire
