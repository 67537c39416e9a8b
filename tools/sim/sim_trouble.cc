// The faults of the simulated workload, and the failures that they excuse.
#include <algorithm>
#include <utility>

#include "sim/sim_world.h"

namespace spinwire::tools {

/// Draws probabilities up to about `worst`. With `of_each`, each is high enough to occur in a run.
NetworkFaults SimWorld::draw_faults(double worst, bool of_each) {
  const auto some = [&](double most) {
    const double part = static_cast<double>(sim_.random(1001)) / 1000;
    if (of_each) return most * (0.2 + 0.8 * part);
    return sim_.chance(0.7) ? most * part : 0;
  };
  const auto sometimes = [&](double probability) { return of_each || sim_.chance(probability); };
  NetworkFaults f;
  f.drop = some(worst);
  f.duplicate = some(worst);
  f.reorder = some(2 * worst);
  f.reorder_distance = static_cast<std::uint32_t>(1 + sim_.random(8));
  if (sometimes(0.7)) f.datagram_delay_max = 1us + below(100us);
  f.not_ready = some(std::max(worst / 3, 0.1));
  f.not_ready_in_a_row = static_cast<std::uint32_t>(1 + sim_.random(3));
  if (sometimes(0.5)) f.message_delay_max = 1us + below(100us);
  if (sometimes(0.5)) f.packet_loss = some(std::max(worst / 10, 0.02));
  if (sometimes(0.7)) f.control_delay_max = 1us + below(2ms);
  // Some datagrams come very late: after their slot was reused, or their sender restarted.
  if (sim_.chance(0.2)) f.datagram_delay_max = 1ms + below(20ms);
  return f;
}

void SimWorld::choose_faults() {
  constexpr double kWorst[] = {0.02, 0.05, 0.1, 0.15, 0.4};
  worst_loss_ = kWorst[sim_.random(std::size(kWorst))];
  const auto good = [this](const Result<void>& set) {
    if (!set) fail("{}", set.error().message());
  };
  good(sim_.set_faults(draw_faults(worst_loss_, true)));
  for (std::uint64_t i = sim_.random(4); i != 0; --i) {
    const NodeId from = any_host();
    const NodeId to = any_host();
    if (from != to) good(sim_.set_faults(from, to, draw_faults(worst_loss_, false)));
  }
}

// ---- deaths and cuts --------------------------------------------------------------------------

NodeId SimWorld::any_host() { return static_cast<NodeId>(sim_.random(hosts_.size())); }

NodeId SimWorld::other_host(NodeId host) {
  return (host + 1 + static_cast<NodeId>(sim_.random(hosts_.size() - 1))) %
         static_cast<NodeId>(hosts_.size());
}

/// Plans at least one of each kind, while calls are begun.
void SimWorld::plan_trouble() {
  const Nanoseconds span = pace_ * 18;  // about as long as calls are begun
  for (std::uint64_t i = 1 + sim_.random(sim_.random(5)); i != 0; --i) plan_kill(span);
  for (std::uint64_t i = 1 + sim_.random(sim_.random(4)); i != 0; --i) plan_cut(span);
  for (std::uint64_t i = 1 + sim_.random(2); i != 0; --i) plan_pause(span);
  plan_failure(span);
  if (!has_local_paths_) return;
  for (std::uint64_t i = 2 + sim_.random(4); i != 0; --i) plan_port(span);
}

void SimWorld::plan_kill(Nanoseconds within) {
  sim_.at(sim_.now() + below(within), [this, host = any_host(), inside = sim_.chance(0.3)] {
    const NodeId node = hosts_[host].current;
    if (inside) {
      actors_[node].dies_in_handler = !winding_up_;
    } else {
      kill(node);
    }
  });
}

/// Cuts the link between two nodes, preferably two that have a session.
void SimWorld::plan_cut(Nanoseconds within) {
  const Nanoseconds time = pace_ + (sim_.chance(0.2) ? below(600ms) : below(pace_ * 10));
  sim_.at(sim_.now() + below(within), [this, time] {
    NodeId a = any_host();
    NodeId b = other_host(a);
    for (int tries = 0; tries < 8 && !sessions_.empty(); ++tries) {
      const SimSession& s = sessions_[sim_.random(sessions_.size())];
      if (s.over || !s.ready) continue;
      a = home(s.from);
      b = s.to();
      break;
    }
    cut(a, b);
    sim_.at(sim_.now() + time, [this, a, b] { heal(a, b); });
  });
}

void SimWorld::plan_pause(Nanoseconds within) {
  sim_.at(sim_.now() + below(within), [this, host = any_host(), time = below(20ms)] {
    if (!sim_.pause(hosts_[host].current, time)) return;
    hosts_[host].paused_until = sim_.now() + time;
    count(SimEvent::pauses);
  });
}

void SimWorld::plan_failure(Nanoseconds within) {
  sim_.at(sim_.now() + below(within), [this, host = any_host(), n = 1 + sim_.random(40)] {
    const NodeId node = hosts_[host].current;
    if (!sim_.alive(node) || winding_up_) return;
    hosts_[host].shaky = true;
    mark(host);
    (void)sim_.fail_request(node, n);
  });
}

/// Causes the events that have not occurred yet, as far as the workload causes them itself.
void SimWorld::hurry() {
  const Nanoseconds soon = pace_ * 2;
  if (!happened(SimEvent::kills)) kill(hosts_[any_host()].current);
  if (!happened(SimEvent::cuts) || !happened(SimEvent::cut_off)) plan_cut(soon);
  if (!happened(SimEvent::pauses)) plan_pause(soon);
  if (!happened(SimEvent::failed)) plan_failure(soon);
}

/// Copies the simulation's counts.
void SimWorld::copy_statistics() {
  const SimulationStats s = sim_.stats();
  const std::pair<SimEvent, std::uint64_t> counted[] = {
      {SimEvent::dropped, s.dropped},
      {SimEvent::duplicated, s.duplicated},
      {SimEvent::reordered, s.reordered},
      {SimEvent::delayed, s.delayed},
      {SimEvent::cut_off, s.cut},
      {SimEvent::not_ready, s.not_ready},
      {SimEvent::delayed_requests, s.delayed_requests},
      {SimEvent::lost, s.packets_lost},
      {SimEvent::failed, s.failed},
      {SimEvent::kills, s.kills},
      {SimEvent::restarts, s.restarts},
      {SimEvent::wakeups, s.wakeups}};
  for (const auto& [event, times] : counted)
    outcome_.happened[static_cast<std::size_t>(event)] = times;
}

void SimWorld::mark(NodeId a, NodeId b) {
  const auto between = [this, a, b](const SimPath& p) {
    return (home(p.from) == a && p.may_reach(b)) || (home(p.from) == b && p.may_reach(a));
  };
  for (SimSession& s : sessions_) s.troubled = s.troubled || (!s.over && between(s));
  for (SimLink& l : links_) l.troubled = l.troubled || (!l.over && between(l));
}

/// Marks the host's connections: a failed work request ends them, but no datagram session.
void SimWorld::mark(NodeId host) {
  for (SimLink& l : links_) l.troubled = l.troubled || home(l.from) == host || l.may_reach(host);
}

bool SimWorld::in_trouble(const SimPath& p) const {
  return !sim_.alive(p.from) || hosts_[home(p.from)].ports != kPortsUp ||
         std::any_of(p.targets.begin(), p.targets.end(), [&](const auto& target) {
           return !sim_.alive(hosts_[target.first].current) ||
                  hosts_[target.first].has_no_listener || hosts_[target.first].ports != kPortsUp ||
                  cuts_.contains(std::minmax(home(p.from), target.first));
         });
}

void SimWorld::kill(NodeId node, std::optional<Nanoseconds> down) {
  if (winding_up_ || !sim_.alive(node)) return;
  for (NodeId other = 0; other < hosts_.size(); ++other) mark(home(node), other);
  end_actor(node);
  if (!actors_[node].is_retired) hosts_[home(node)].good_since = kNeverGood;
  if (!down) down = 1ms + below(sim_.chance(0.7) ? 3ms : 300ms);
  sim_.at(sim_.now() + *down, [this, node] { restart_later(node); });
}

/// Kills a node, and takes it out of the accounts.
void SimWorld::end_actor(NodeId node) {
  // Its goodbyes may still be under way, whether its drain was over or not.
  if (is_leaving(node)) hosts_[home(node)].left_at = sim_.now();
  for (SimSession& s : sessions_) s.over = s.over || s.from == node;
  for (SimLink& l : links_) l.over = l.over || l.from == node;
  end_timers(node);
  orphan_leases(node);
  for (SimCall& c : calls_) {
    if (sessions_[c.session].from != node || !c.accepted || c.ended != 0 || c.orphan) continue;
    c.orphan = true;
    c.into = {};
    ++outcome_.orphans;
    --unended_;
  }
  for (SimMessage& m : messages_) {
    if (links_[m.link].from != node || m.ended != 0) continue;
    m.ended = 1;
    m.status = Status::flushed;
    --unsent_;
  }
  if (auto killed = sim_.kill(node); !killed) return fail("{}", killed.error().message());
  // The callback may belong to a node that is about to go; kept bytes outlive it in either case.
  sim_.at(sim_.now() + below(1ms), [this, node] { drop_kept(actors_[node], 0); });
}

void SimWorld::restart_later(NodeId node) {
  if (sim_.alive(node)) return;
  drop_kept(actors_[node], 0);
  SimActor& actor = actors_[node];
  SimHost& host = hosts_[actor.host];
  if (actor.is_retired) {
    if (host.current != node) host.spare = node;
    return;
  }
  host.shaky = host.has_no_listener = false;
  renew(actor);
  if (has_keys_) rotate_keys(actor.host);
  if (auto begun = sim_.restart(node); !begun) return fail("{}", begun.error().message());
  serve(node);
  listen(node);
  start_actor(node);
  // While those that have lost the node open their sessions again.
  if (has_lapses_) {
    for (std::uint64_t i = sim_.random(4); i != 0; --i) plan_lapse(actor.host, 30ms);
  }
}

void SimWorld::cut(NodeId a, NodeId b) {
  if (winding_up_) return;
  cuts_.insert(std::minmax(a, b));
  mark(a, b);
  if (sim_.cut(a, b)) count(SimEvent::cuts);
}

void SimWorld::heal(NodeId a, NodeId b) {
  mark(a, b);
  healed_[std::minmax(a, b)] = sim_.now();
  cuts_.erase(std::minmax(a, b));
  (void)sim_.heal(a, b);
}

void SimWorld::end_trouble() {
  while (!cuts_.empty()) heal(cuts_.begin()->first, cuts_.begin()->second);
  (void)sim_.set_faults({});
  for (NodeId from = 0; from < hosts_.size(); ++from) {
    for (NodeId to = 0; to < hosts_.size(); ++to) {
      if (from != to) (void)sim_.set_faults(from, to, {});
    }
  }
  for (NodeId node = 0; node < sim_.size(); ++node) actors_[node].dies_in_handler = false;
}

}  // namespace spinwire::tools
