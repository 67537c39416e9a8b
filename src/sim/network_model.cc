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
  wake(*nodes[number]);
  const NodeId home = nodes[number]->home();
  for (const auto& [way, faults] : network_model.ways) {
    if (way.first != home && way.second != home) continue;
    if (auto set = apply_way_faults(way.first, way.second); !set) return set;
  }
  return {};
}

namespace {

/// Calls `visit(here, there)` for each living node of one host and each of another.
template <typename Visit>
void for_each_pair(const std::vector<std::unique_ptr<Node>>& nodes, NodeId from, NodeId to,
                   Visit&& visit) {
  for (const auto& here : nodes) {
    if (here->home() != from || !here->engine) continue;
    for (const auto& there : nodes) {
      if (there->home() == to && there->engine) visit(*here, *there);
    }
  }
}

const ibv_gid& gid_of(const Node& node) noexcept {
  return detail::core_of(node.engine)->context.device->place().gid;
}

}  // namespace

Result<void> Simulation::State::apply_way_faults(NodeId from, NodeId to) {
  Result<void> done;
  for_each_pair(nodes, from, to, [&](Node& here, const Node& there) {
    if (!done) return;
    done = softverbs::set_faults(here.device(), gid_of(there),
                                 sim::plan_of(network_model.faults(from, to), 0));
    wake(here);
  });
  return done;
}

void Simulation::State::apply_link(NodeId a, NodeId b) noexcept {
  end_quiet();
  const auto state =
      network_model.is_up(a, b) ? softverbs::LinkState::up : softverbs::LinkState::down;
  for (const auto& [from, to] : {sim::Way{a, b}, sim::Way{b, a}}) {
    for_each_pair(nodes, from, to, [&](Node& here, const Node& there) {
      (void)softverbs::set_link(here.device(), gid_of(there), state);
      wake(here);
    });
  }
}

void Simulation::State::apply_port(NodeId home, std::uint8_t port) noexcept {
  const auto found = network_model.ports.find(home);
  if (found == network_model.ports.end()) return;
  const PortState state = found->second[port - 1u];
  using softverbs::LinkState;
  end_quiet();
  for (const auto& node : nodes) {
    if (node->home() != home || !node->engine) continue;
    (void)softverbs::set_port(node->device(), port,
                              state == PortState::down ? LinkState::down : LinkState::up);
    (void)softverbs::set_port_silence(node->device(), port, state == PortState::silent);
    // An adapter's event makes its descriptor readable; softverbs has none. So silence wakes, too,
    // and the audit for missed wake-ups sees nothing of that moment.
    wake(*node);
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

using Nodes = std::vector<std::unique_ptr<Node>>;

Result<void> check_pair(const Nodes& nodes, NodeId a, NodeId b, const char* asked) {
  if (a < nodes.size() && b < nodes.size() && nodes[a]->home() != nodes[b]->home()) return {};
  return base::fail(Status::invalid_argument, asked,
                    base::format("nodes {} and {} of {}", a, b, nodes.size()),
                    "give two nodes that exist, on different hosts");
}

sim::Way way_of(const Nodes& nodes, NodeId from, NodeId to) {
  return {nodes[from]->home(), nodes[to]->home()};
}

}  // namespace

Result<void> Simulation::set_faults(NodeId from, NodeId to, const NetworkFaults& faults) {
  constexpr const char* kAsked = "set faults of a way";
  return base::no_throw(kAsked, [&]() -> Result<void> {
    if (auto good = check_pair(state_->nodes, from, to, kAsked); !good) return good;
    if (auto good = sim::check(faults); !good) return good;
    const sim::Way way = way_of(state_->nodes, from, to);
    state_->network_model.ways[way] = faults;
    state_->end_quiet();
    return state_->apply_way_faults(way.first, way.second);
  });
}

Result<void> Simulation::cut(NodeId a, NodeId b) {
  constexpr const char* kAsked = "cut a link";
  return base::no_throw(kAsked, [&]() -> Result<void> {
    if (auto good = check_pair(state_->nodes, a, b, kAsked); !good) return good;
    const auto [from, to] = way_of(state_->nodes, a, b);
    state_->network_model.cuts.insert(sim::both(from, to));
    state_->apply_link(from, to);
    return {};
  });
}

Result<void> Simulation::heal(NodeId a, NodeId b) {
  if (auto good = check_pair(state_->nodes, a, b, "heal a link"); !good) return good;
  const auto [from, to] = way_of(state_->nodes, a, b);
  state_->network_model.cuts.erase(sim::both(from, to));
  state_->apply_link(from, to);
  return {};
}

Result<void> Simulation::isolate(NodeId node) {
  const auto& nodes = state_->nodes;
  if (node >= size()) return check_pair(nodes, node, node, "isolate a node");
  for (NodeId other = 0; other < size(); ++other) {
    if (nodes[other]->home() == nodes[node]->home()) continue;
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

Result<void> Simulation::set_port(NodeId node, std::uint8_t port, PortState state) {
  constexpr const char* kAsked = "set the state of a port";
  return base::no_throw(kAsked, [&]() -> Result<void> {
    if (node >= size() || port == 0 || port > sim::kPorts)
      return base::fail(Status::invalid_argument, kAsked,
                        base::format("port {} of node {} of {}", port, node, size()),
                        "give a node that exists, and port 1 or 2");
    const NodeId home = state_->nodes[node]->home();
    state_->network_model.ports[home][port - 1u] = state;
    state_->apply_port(home, port);
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
