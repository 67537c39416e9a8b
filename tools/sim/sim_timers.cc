// Timers of the simulated workload's nodes: each run comes in its time, once, and not after a
// cancel, also while the node drains, and though callbacks start and cancel timers.
#include <algorithm>
#include <utility>

#include "sim/sim_world.h"

namespace spinwire::tools {

namespace {

/// A timer runs in the first control step after its time, at most 1 ms later.
constexpr Nanoseconds kLongestDelay = 2ms;
constexpr std::size_t kMostTimers = 40;  ///< of a node at once

}  // namespace

void SimWorld::start_timer(NodeId node, Nanoseconds delay, bool repeats) {
  if (!sim_.alive(node)) return;
  const auto index = static_cast<std::uint32_t>(timers_.size());
  SimTimer& t = timers_.emplace_back();
  t.node = node;
  t.incarnation = sim_.incarnation(node);
  t.due = sim_.now() + delay;
  if (repeats) t.interval = delay = std::max<Nanoseconds>(delay, 1us);
  // A periodic timer keeps its callback's own state from run to run.
  const TimerCallback run = [this, index, runs = 0u]() mutable { on_timer(index, ++runs); };
  Engine& engine = sim_.engine(node);
  auto started = repeats ? engine.every(delay, run) : engine.after(delay, run);
  if (!started) return fail("node {} starts no timer: {}", node, started.error().message());
  t.due = sim_.now() + delay;
  t.handle = *started;
  actors_[node].timers.push_back(index);
}

/// Some alone, and some that are due together, whose callbacks cancel each other.
void SimWorld::start_timers(NodeId node) {
  if (is_closing_) return;
  std::erase_if(actors_[node].timers, [this](std::uint32_t i) { return timers_[i].is_over; });
  if (actors_[node].timers.size() >= kMostTimers) return;
  const Nanoseconds delay = sim_.chance(0.1) ? 0ns : below(sim_.chance(0.1) ? 50ms : 4 * pace_);
  const std::uint64_t together = 1 + sim_.random(sim_.chance(0.3) ? 6 : 1);
  for (std::uint64_t i = 0; i < together; ++i) start_timer(node, delay, false);
  if (!winding_up_ && sim_.chance(0.2)) start_timer(node, pace_ + below(4 * pace_), true);
}

void SimWorld::act_on_timers(NodeId node) {
  if (!has_timers_ || !sim_.alive(node)) return;
  if (sim_.chance(0.4)) start_timers(node);
  const std::vector<std::uint32_t>& ours = actors_[node].timers;
  if (!ours.empty() && sim_.chance(0.3)) cancel_timer(ours[sim_.random(ours.size())]);
}

/// Also of timers that have run, or that a former incarnation started: these answer
/// not_connected, and no other timer is cancelled instead.
void SimWorld::cancel_timer(std::uint32_t index) {
  SimTimer& t = timers_[index];
  // The engine of a node that is killed in its own callback ends after the poll.
  if (sim_.incarnation(t.node) == t.incarnation && !sim_.alive(t.node)) return;
  const bool is_scheduled = !t.is_over && is_incarnation(t.node, t.incarnation);
  if (t.handle.scheduled() != is_scheduled)
    return fail("timer {} of node {} is {}scheduled", index, t.node, is_scheduled ? "not " : "");
  const Status status = t.handle.cancel();
  if (status != (is_scheduled ? Status::ok : Status::not_connected))
    return fail("timer {} of node {} is cancelled with {}", index, t.node, to_string(status));
  if (!is_scheduled) return;
  t.is_over = t.is_cancelled = true;
  if (!winding_up_) count(SimEvent::cancelled_timers);
}

Nanoseconds SimWorld::latest_run(const SimTimer& t) const {
  return std::max(t.due, hosts_[home(t.node)].paused_until) + kLongestDelay;
}

void SimWorld::on_timer(std::uint32_t index, std::uint32_t runs) {
  SimTimer& t = timers_[index];
  const Nanoseconds now = sim_.now();
  sim_.note(std::uint64_t{index} << 32 | runs);
  if (sim_.incarnation(t.node) != t.incarnation)
    return fail("timer {} of node {} runs in another engine", index, t.node);
  if (!sim_.alive(t.node)) return;
  if (t.is_over)
    return fail("timer {} of node {} runs {}", index, t.node,
                t.is_cancelled ? "after its cancel" : "twice");
  if (now < t.due)
    return fail("timer {} of node {} runs {} ns early", index, t.node, (t.due - now).count());
  if (now > latest_run(t))
    return fail("timer {} of node {} runs {} ns late", index, t.node, (now - t.due).count());
  if (runs != ++t.runs)
    return fail("timer {} of node {} has lost its callback's state", index, t.node);
  count(SimEvent::timers);
  // Times that a node missed are left out.
  t.is_over = t.interval.count() == 0;
  if (!t.is_over) t.due += t.interval * (1 + (now - t.due) / t.interval);
  rouse_inside(t.node);
  const NodeId node = t.node;
  if (sim_.chance(0.2)) start_timers(node);
  const std::vector<std::uint32_t>& ours = actors_[node].timers;
  if (!ours.empty() && sim_.chance(0.4)) cancel_timer(ours[sim_.random(ours.size())]);
  if (sim_.chance(0.2)) cancel_timer(static_cast<std::uint32_t>(sim_.random(timers_.size())));
}

/// The node's engine has ended, or ends with the present poll.
void SimWorld::end_timers(NodeId node) {
  for (const std::uint32_t i : std::exchange(actors_[node].timers, {})) timers_[i].is_over = true;
}

void SimWorld::audit_timers() {
  for (NodeId node = 0; node < actors_.size(); ++node) {
    if (!sim_.alive(node)) continue;
    for (const std::uint32_t i : actors_[node].timers) {
      const SimTimer& t = timers_[i];
      if (t.is_over) continue;
      if (!t.handle.scheduled())
        return fail("timer {} of node {} is lost, {} ns before its time", i, node,
                    (t.due - sim_.now()).count());
      if (sim_.now() > latest_run(t))
        return fail("timer {} of node {} has not run, {} ns after its time", i, node,
                    (sim_.now() - t.due).count());
    }
  }
}

}  // namespace spinwire::tools
