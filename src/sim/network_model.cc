// NetworkModel: checks the faults of the simulated network and applies them.

#include <algorithm>

#include "base/error.h"
#include "base/internals.h"
#include "sim/state.h"
#include "softverbs/faults/field_checks.h"

namespace spinwire::sim {
namespace {

constexpr std::uint32_t kHeldDatagrams = 1024;

}  // namespace

Result<void> check(const NetworkFaults& f) {
  constexpr softverbs::FieldChecks kChecks("set faults of the network");
  constexpr std::uint32_t kMost = 65536;
  return softverbs::first_failed({
      kChecks.probability("drop", f.drop),
      kChecks.probability("duplicate", f.duplicate),
      kChecks.probability("reorder", f.reorder),
      kChecks.probability("not_ready", f.not_ready),
      kChecks.probability("packet_loss", f.packet_loss),
      kChecks.number("reorder_distance", f.reorder_distance, 1, kMost),
      kChecks.number("not_ready_in_a_row", f.not_ready_in_a_row, 1, kMost),
      kChecks.delay("datagram_delay_min", f.datagram_delay_min),
      kChecks.delay("datagram_delay_max", f.datagram_delay_max, f.datagram_delay_min),
      kChecks.delay("message_delay_min", f.message_delay_min),
      kChecks.delay("message_delay_max", f.message_delay_max, f.message_delay_min),
      kChecks.delay("control_delay_min", f.control_delay_min),
      kChecks.delay("control_delay_max", f.control_delay_max, f.control_delay_min),
  });
}

softverbs::FaultPlan plan_of(const NetworkFaults& f, std::uint64_t seed) {
  softverbs::FaultPlan plan;
  plan.seed = seed;
  plan.drop = f.drop;
  plan.duplicate = f.duplicate;
  plan.reorder = f.reorder;
  plan.reorder_distance = f.reorder_distance;
  plan.datagram_delay_min = f.datagram_delay_min;
  plan.datagram_delay_max = f.datagram_delay_max;
  plan.held_datagrams = kHeldDatagrams;
  plan.rnr = f.not_ready;
  plan.rnr_in_a_row = f.not_ready_in_a_row;
  plan.delay_min = f.message_delay_min;
  plan.delay_max = f.message_delay_max;
  plan.packet_loss = f.packet_loss;
  return plan;
}

void add(SimulationStats& sum, const softverbs::FaultStatistics& more) noexcept {
  sum.dropped += more.dropped;
  sum.duplicated += more.duplicated;
  sum.reordered += more.reordered;
  sum.delayed += more.datagrams_delayed;
  sum.cut += more.cut;
  sum.overflowed += more.overflowed;
  sum.not_ready += more.rnr;
  sum.delayed_requests += more.delayed;
  sum.packets_lost += more.packets_lost;
  sum.packets_retransmitted += more.packets_retransmitted;
  sum.unanswered += more.timeouts;
  sum.failed += more.failed;
}

bool NetworkModel::is_up(std::uint32_t from, std::uint32_t to) {
  return from == to || !cuts.contains(both(from, to));
}

const NetworkFaults& NetworkModel::faults(NodeId from, NodeId to) const {
  const auto own = ways.find({from, to});
  return own != ways.end() ? own->second : everywhere;
}

std::uint64_t NetworkModel::draw_control_delay(std::uint32_t from, std::uint32_t to) {
  const NetworkFaults& f = faults(from, to);
  const Nanoseconds span = f.control_delay_max - f.control_delay_min;
  return static_cast<std::uint64_t>(f.control_delay_min.count()) +
         random_.below(static_cast<std::uint64_t>(span.count()) + 1);
}

}  // namespace spinwire::sim

namespace spinwire {

using sim::Node;

softverbs::FaultPlan Simulation::State::plan_of(NodeId number) {
  Node& node = *nodes[number];
  const std::uint64_t place = std::uint64_t{number} << 32 | ++node.plans;
  softverbs::FaultPlan plan =
      sim::plan_of(network_model.everywhere, base::Random::mix(seed ^ base::Random::mix(place)));
  plan.fail_at = std::exchange(node.fail_at, 0);
  return plan;
}

Result<void> Simulation::State::apply_faults(NodeId number) {
  if (auto set = softverbs::set_faults(nodes[number]->device(), plan_of(number)); !set) return set;
  for (const auto& [way, faults] : network_model.ways) {
    if (way.first != number && way.second != number) continue;
    if (auto set = apply_faults(way.first, way.second); !set) return set;
  }
  return {};
}

Result<void> Simulation::State::apply_faults(NodeId from, NodeId to) {
  if (!nodes[from]->engine || !nodes[to]->engine) return {};
  ibv_context* const device = nodes[from]->device();
  const ibv_gid& gid = detail::core_of(nodes[to]->engine)->context.device->place().gid;
  return softverbs::set_faults(device, gid, sim::plan_of(network_model.faults(from, to), 0));
}

void Simulation::State::apply_link(NodeId a, NodeId b) noexcept {
  end_quiet();
  if (!nodes[a]->engine || !nodes[b]->engine) return;
  const auto state =
      network_model.is_up(a, b) ? softverbs::LinkState::up : softverbs::LinkState::down;
  for (const auto& [here, there] : {sim::Way{a, b}, sim::Way{b, a}}) {
    (void)softverbs::set_link(nodes[here]->device(),
                              detail::core_of(nodes[there]->engine)->context.device->place().gid,
                              state);
  }
}

Result<void> Simulation::set_faults(const NetworkFaults& faults) {
  return base::no_throw("set faults of the network", [&]() -> Result<void> {
    if (auto good = sim::check(faults); !good) return good;
    state_->network_model.everywhere = faults;
    state_->end_quiet();
    for (NodeId i = 0; i < size(); ++i) {
      if (!state_->nodes[i]->engine) continue;
      if (auto set = state_->apply_faults(i); !set) return set;
    }
    return {};
  });
}

namespace {

Result<void> check_pair(const Simulation& simulation, NodeId a, NodeId b, const char* asked) {
  if (a < simulation.size() && b < simulation.size() && a != b) return {};
  return base::fail(Status::invalid_argument, asked,
                    base::format("nodes {} and {} of {}", a, b, simulation.size()),
                    "give two different nodes that exist");
}

}  // namespace

Result<void> Simulation::set_faults(NodeId from, NodeId to, const NetworkFaults& faults) {
  constexpr const char* kAsked = "set faults of a way";
  return base::no_throw(kAsked, [&]() -> Result<void> {
    if (auto good = check_pair(*this, from, to, kAsked); !good) return good;
    if (auto good = sim::check(faults); !good) return good;
    state_->network_model.ways[{from, to}] = faults;
    state_->end_quiet();
    return state_->apply_faults(from, to);
  });
}

Result<void> Simulation::cut(NodeId a, NodeId b) {
  constexpr const char* kAsked = "cut a link";
  return base::no_throw(kAsked, [&]() -> Result<void> {
    if (auto good = check_pair(*this, a, b, kAsked); !good) return good;
    state_->network_model.cuts.insert(sim::both(a, b));
    state_->apply_link(a, b);
    return {};
  });
}

Result<void> Simulation::heal(NodeId a, NodeId b) {
  if (auto good = check_pair(*this, a, b, "heal a link"); !good) return good;
  state_->network_model.cuts.erase(sim::both(a, b));
  state_->apply_link(a, b);
  return {};
}

Result<void> Simulation::isolate(NodeId node) {
  if (node >= size()) return check_pair(*this, node, node, "isolate a node");
  for (NodeId other = 0; other < size(); ++other) {
    if (other == node) continue;
    if (auto done = cut(node, other); !done) return done;
  }
  return {};
}

Result<void> Simulation::heal() {
  return base::no_throw("heal the network", [&]() -> Result<void> {
    const std::set<sim::Way> cuts = std::exchange(state_->network_model.cuts, {});
    for (const auto& [a, b] : cuts) state_->apply_link(a, b);
    return {};
  });
}

Result<void> Simulation::fail_request(NodeId node, std::uint64_t n) {
  constexpr const char* kAsked = "fail a work request";
  auto living = state_->living(node, kAsked);
  if (!living) return tl::unexpected(living.error());
  if (n == 0) return base::fail(Status::invalid_argument, kAsked, "number 0", "count them from 1");
  (*living)->fail_at = n;
  return state_->apply_faults(node);
}

}  // namespace spinwire
