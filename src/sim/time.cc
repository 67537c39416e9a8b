// Polls the nodes, advances virtual time, traces and audits.

#include <algorithm>

#include "base/error.h"
#include "base/internals.h"
#include "sim/state.h"

namespace spinwire {

using sim::Node;

namespace {

/// Steps without an event before time jumps; by then all sent packets were received.
constexpr std::uint32_t kQuietSteps = 2;
constexpr std::uint64_t kLongestStride = 1'000'000'000;

/// Marks the step that is under way, until the scope ends: also by an exception of an action.
class Stepping {
 public:
  explicit Stepping(bool& flag) noexcept : flag_(flag) { flag_ = true; }
  Stepping(const Stepping&) = delete;
  Stepping& operator=(const Stepping&) = delete;
  ~Stepping() { flag_ = false; }

 private:
  bool& flag_;
};

}  // namespace

void Simulation::State::advance_time(std::uint64_t least, std::uint64_t most) noexcept {
  now += least + order.below(most - least + 1);
}

Status Simulation::State::step() {
  if (stepping) return Status::reentrant;
  const Stepping mark(stepping);
  ++stats.steps;
  run_due_actions();
  const std::uint64_t before = trace;
  for (std::size_t i = turns.size(); i > 1; --i) std::swap(turns[i - 1], turns[order.below(i)]);
  const auto passed_over = static_cast<std::uint32_t>(options.skip_probability * 1e6);
  for (const NodeId number : turns) {
    Node& node = *nodes[number];
    // No node is left out before a jump: its pending work would be late by the whole jump.
    const bool late = order.chance(passed_over) && quiet + 1 < kQuietSteps;
    if (node.engine && now >= node.paused_until && !late && !sleeps_on(node)) poll(node, number);
  }
  control_network.run(now);
  if (trace != before) {
    end_quiet();
  } else if (++quiet >= kQuietSteps) {
    jump();
  }
  return Status::ok;
}

void Simulation::State::poll(Node& node, NodeId number) {
  advance_time(static_cast<std::uint64_t>(options.poll_time_min.count()),
               static_cast<std::uint64_t>(options.poll_time_max.count()));
  ++stats.polls;
  polling = number;
  node.polled_at = now;
  const std::uint64_t due = next_of(node);
  const bool may_sleep = node.sleeps_after != 0 && node.idle_polls >= node.sleeps_after;
  int events = may_sleep ? fall_asleep(node) : node.engine.poll();
  if (node.config.engine.control == ControlMode::manual && !node.ends_after_poll && !node.is_asleep)
    events += node.engine.poll_control();
  polling.reset();
  if (events != 0) {
    note(std::uint64_t{number} << 32 | static_cast<std::uint32_t>(events));
    note(now);
    node.idle_polls = 0;
  } else if (node.idle_polls < node.sleeps_after) {
    ++node.idle_polls;
  }
  // The device released a held packet, but the receiver may already have been polled in this step.
  if (due <= node.polled_at && next_of(node) != due) end_quiet();
  if (node.ends_after_poll) end_node(node);
}

void Simulation::State::run_due_actions() {
  while (!actions.empty() && actions.top().when <= now) {
    // Moved out first: the action may schedule others.
    const auto what = std::move(const_cast<sim::ScheduledAction&>(actions.top()).what);
    actions.pop();
    note(now);
    what();
  }
}

/// Tick at which a node's device has work; for a paused node, the end of the pause, and for one
/// that sleeps, that of the sleep.
std::uint64_t Simulation::State::next_of(const Node& node) const {
  if (!node.engine) return sim::kNever;
  if (node.paused_until > now) return node.paused_until;
  return node.is_asleep ? node.wakes_at : softverbs::next_due(node.device());
}

/// Next tick at which something becomes due. Entries that a poll has already seen are skipped: they
/// wait for another event.
std::uint64_t Simulation::State::next_due() const {
  std::uint64_t due = control_network.next();
  if (due <= now) due = sim::kNever;
  if (!actions.empty()) due = std::min(due, actions.top().when);
  for (const auto& node : nodes) {
    if (const std::uint64_t next = next_of(*node); next > node->polled_at)
      due = std::min(due, next);
  }
  return due;
}

/// Tick of the control step that serves the engine's next timer.
std::uint64_t Simulation::State::next_timer(const Node& node) const {
  if (!node.engine || node.is_asleep) return sim::kNever;  // a sleep ends for the timers
  const std::uint64_t due = detail::core_of(node.engine)->next_timer_step();
  return due == sim::kNever ? due : std::max(due, node.paused_until);
}

/// Whether control steps have work that no timer announces.
bool Simulation::State::has_pending_work(const Node& node) noexcept {
  return node.engine && detail::core_of(node.engine)->has_set_up_work();
}

void Simulation::State::end_quiet() noexcept {
  quiet = 0;
  stride = first_stride;
}

void Simulation::State::jump() {
  const auto wakes = [this](const auto& n) {
    return n->is_asleep && !n->has_missed && n->paused_until <= now && has_come(*n);
  };
  if (std::any_of(nodes.begin(), nodes.end(), wakes)) return;  // the next step polls the node
  if (std::any_of(nodes.begin(), nodes.end(), [](const auto& n) { return has_pending_work(*n); }))
    stride = first_stride;
  const std::uint64_t due = next_due();
  if (due <= now) return;  // due since this step began: the next step handles it
  std::uint64_t next = std::min(due, now + stride);
  for (const auto& node : nodes) next = std::min(next, next_timer(*node));
  // Work without a due time, such as the device's periodic work, is found by limiting jumps. The
  // limit doubles with each jump and starts again when something was due, which may have
  // consequences.
  stride = next == due ? first_stride : std::min(2 * stride, kLongestStride);
  if (next <= now) return;
  ++stats.jumps;
  now = next;
}

void Simulation::State::note(std::uint64_t value) noexcept {
  trace = base::Random::mix(trace ^ base::Random::mix(value + 0x9e3779b97f4a7c15u));
}

std::uint64_t Simulation::State::trace_hash() const noexcept {
  std::uint64_t sum = trace ^ now;
  const auto add = [&sum](std::uint64_t value) { sum = base::Random::mix(sum) ^ value; };
  for (const auto& node : nodes) {
    if (!node->engine) continue;
    const EngineStats s = node->engine.stats();
    const RpcStats r = node->engine.rpc_stats();
    const AuthenticationStats& a = s.authentication;
    for (const std::uint64_t value : {a.authenticated,
                                      a.no_proof,
                                      a.unknown_key,
                                      a.wrong_proof,
                                      a.unconfirmed_proof,
                                      a.unproven_servers,
                                      a.altered_frames,
                                      s.polls,
                                      s.completions,
                                      s.control_steps,
                                      s.messages_sent,
                                      s.messages_received,
                                      s.unkept_messages,
                                      s.doorbells,
                                      s.receives_posted,
                                      r.calls,
                                      r.replies,
                                      r.retransmitted_requests,
                                      r.served,
                                      r.retransmitted_replies,
                                      r.dropped_replies,
                                      r.duplicates,
                                      r.late_replies,
                                      r.bad_datagrams,
                                      r.send_queue_full})
      add(value);
  }
  return base::Random::mix(sum);
}

std::uint32_t sim::datagram_receives(const detail::EngineCore& core) noexcept {
  return softverbs::unreported_receives(*rpc::datagram_port(*core.calls)->queue_pair(),
                                        agent::is_receive);
}

Result<void> Simulation::State::audit() const {
  for (NodeId i = 0; i < nodes.size(); ++i) {
    if (!nodes[i]->engine) continue;
    const auto fails = [i](Error error) {
      error.asked = base::format("{} of node {}", error.asked, i);
      return tl::make_unexpected(std::move(error));
    };
    if (auto good = nodes[i]->engine.audit(); !good) return fails(std::move(good.error()));
    const detail::EngineCore& core = *detail::core_of(nodes[i]->engine);
    if (core.calls == nullptr || rpc::datagram_port(*core.calls) == nullptr) continue;
    const rpc::DatagramPort& port = *rpc::datagram_port(*core.calls);
    const std::uint32_t have =
        sim::datagram_receives(core) + port.receives_waiting() + port.receive_shortage();
    if (have != port.posted_receives())
      return fails({Status::system, "audit the receives of remote calls",
                    base::format("{} are posted, taken, waiting or missing, of {}", have,
                                 port.posted_receives()),
                    "report this as a defect, with the seed"});
  }
  return {};
}

}  // namespace spinwire
