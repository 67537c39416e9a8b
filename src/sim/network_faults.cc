// What a simulated network does to what goes through it.

#include <algorithm>

#include "base/error.h"
#include "base/internals.h"
#include "sim/state.h"

namespace spinwire::sim {
namespace {

constexpr Nanoseconds kLongestDelay = std::chrono::hours(24);
constexpr std::uint32_t kHeldDatagrams = 1024;

Result<void> bad_field(const char* name, std::string value, const char* range) {
  return base::fail(Status::invalid_argument,
                    base::format("set faults of the network: {} = {}", name, value),
                    "it is out of range", base::format("give {}", range));
}

Result<void> check_probability(const char* name, double value) {
  if (value >= 0 && value <= 1) return {};
  return bad_field(name, base::format("{}", value), "a probability between 0 and 1");
}

Result<void> check_count(const char* name, std::uint32_t value) {
  if (value >= 1 && value <= 65536) return {};
  return bad_field(name, base::format("{}", value), "1 to 65536");
}

Result<void> check_delays(const char* name, Nanoseconds least, Nanoseconds most) {
  if (least.count() >= 0 && least <= most && most <= kLongestDelay) return {};
  return bad_field(name, base::format("{} to {} ns", least.count(), most.count()),
                   "delays of 0 to 24 h, the lower first");
}

}  // namespace

Result<void> check(const NetworkFaults& f) {
  for (const auto& done :
       {check_probability("drop", f.drop), check_probability("duplicate", f.duplicate),
        check_probability("reorder", f.reorder), check_probability("not_ready", f.not_ready),
        check_probability("packet_loss", f.packet_loss),
        check_count("reorder_distance", f.reorder_distance),
        check_count("not_ready_in_a_row", f.not_ready_in_a_row),
        check_delays("datagram_delay", f.datagram_delay_min, f.datagram_delay_max),
        check_delays("message_delay", f.message_delay_min, f.message_delay_max),
        check_delays("control_delay", f.control_delay_min, f.control_delay_max)}) {
    if (!done) return done;
  }
  return {};
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

void add(softverbs::FaultStatistics& sum, const softverbs::FaultStatistics& more) noexcept {
  sum.dropped += more.dropped;
  sum.duplicated += more.duplicated;
  sum.reordered += more.reordered;
  sum.datagrams_delayed += more.datagrams_delayed;
  sum.overflowed += more.overflowed;
  sum.cut += more.cut;
  sum.rnr += more.rnr;
  sum.delayed += more.delayed;
  sum.packets_lost += more.packets_lost;
  sum.packets_resent += more.packets_resent;
  sum.timeouts += more.timeouts;
  sum.failed += more.failed;
}

bool Network::open(std::uint32_t from, std::uint32_t to) {
  return from == to || !cuts.contains(both(from, to));
}

const NetworkFaults& Network::faults(NodeId from, NodeId to) const {
  const auto own = ways.find({from, to});
  return own != ways.end() ? own->second : everywhere;
}

std::uint64_t Network::delay(std::uint32_t from, std::uint32_t to) {
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
      sim::plan_of(links.everywhere, base::Random::mix(seed ^ base::Random::mix(place)));
  plan.fail_at = std::exchange(node.fail_at, 0);
  return plan;
}

Result<void> Simulation::State::apply_faults(NodeId number) {
  if (auto set = softverbs::set_faults(nodes[number]->device(), plan_of(number)); !set) return set;
  for (const auto& [way, faults] : links.ways) {
    if (way.first != number && way.second != number) continue;
    if (auto set = apply_faults(way.first, way.second); !set) return set;
  }
  return {};
}

Result<void> Simulation::State::apply_faults(NodeId from, NodeId to) {
  if (!nodes[from]->engine || !nodes[to]->engine) return {};
  ibv_context* const device = nodes[from]->device();
  const ibv_gid& gid = detail::core_of(nodes[to]->engine)->context.device->place().gid;
  return softverbs::set_faults(device, gid, sim::plan_of(links.faults(from, to), 0));
}

void Simulation::State::apply_link(NodeId a, NodeId b) noexcept {
  end_quiet();
  if (!nodes[a]->engine || !nodes[b]->engine) return;
  const auto state = links.open(a, b) ? softverbs::LinkState::up : softverbs::LinkState::down;
  for (const auto& [here, there] : {sim::Way{a, b}, sim::Way{b, a}}) {
    (void)softverbs::set_link(nodes[here]->device(),
                              detail::core_of(nodes[there]->engine)->context.device->place().gid,
                              state);
  }
}

Result<void> Simulation::set_faults(const NetworkFaults& faults) {
  return base::no_throw("set faults of the network", [&]() -> Result<void> {
    if (auto good = sim::check(faults); !good) return good;
    state_->links.everywhere = faults;
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
                    "give two different ones that there are");
}

}  // namespace

Result<void> Simulation::set_faults(NodeId from, NodeId to, const NetworkFaults& faults) {
  constexpr const char* kAsked = "set faults of a way";
  return base::no_throw(kAsked, [&]() -> Result<void> {
    if (auto good = check_pair(*this, from, to, kAsked); !good) return good;
    if (auto good = sim::check(faults); !good) return good;
    state_->links.ways[{from, to}] = faults;
    state_->end_quiet();
    return state_->apply_faults(from, to);
  });
}

Result<void> Simulation::cut(NodeId a, NodeId b) {
  constexpr const char* kAsked = "cut a link";
  return base::no_throw(kAsked, [&]() -> Result<void> {
    if (auto good = check_pair(*this, a, b, kAsked); !good) return good;
    state_->links.cuts.insert(sim::both(a, b));
    state_->apply_link(a, b);
    return {};
  });
}

Result<void> Simulation::heal(NodeId a, NodeId b) {
  if (auto good = check_pair(*this, a, b, "heal a link"); !good) return good;
  state_->links.cuts.erase(sim::both(a, b));
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
    const std::set<sim::Way> cuts = std::exchange(state_->links.cuts, {});
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
