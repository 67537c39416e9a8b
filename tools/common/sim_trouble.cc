// What goes wrong in the simulations' workload, and what it excuses.
#include <algorithm>
#include <utility>

#include "common/sim_world.h"

namespace spinwire::tools {

NetworkFaults SimWorld::draw_faults(double worst) {
  const auto some = [&](double most) {
    return sim_.chance(0.7) ? most * static_cast<double>(sim_.random(1001)) / 1000 : 0;
  };
  NetworkFaults f;
  f.drop = some(worst);
  f.duplicate = some(worst);
  f.reorder = some(2 * worst);
  f.reorder_distance = static_cast<std::uint32_t>(1 + sim_.random(8));
  if (sim_.chance(0.7)) f.datagram_delay_max = 1us + below(100us);
  f.not_ready = some(worst / 3);
  f.not_ready_in_a_row = static_cast<std::uint32_t>(1 + sim_.random(3));
  if (sim_.chance(0.5)) f.message_delay_max = 1us + below(100us);
  f.packet_loss = some(worst / 30);
  if (sim_.chance(0.7)) f.control_delay_max = 1us + below(2ms);
  // Now and then a datagram comes very late: in another life of its slot, or of its sender.
  if (sim_.chance(0.2)) f.datagram_delay_max = 1ms + below(20ms);
  return f;
}

void SimWorld::choose_faults() {
  constexpr double kWorst[] = {0, 0.02, 0.1, 0.15, 0.4};
  worst_loss_ = kWorst[sim_.random(std::size(kWorst))];
  const auto good = [this](const Result<void>& set) {
    if (!set) fail("{}", set.error().message());
  };
  if (worst_loss_ == 0) return;
  good(sim_.set_faults(draw_faults(worst_loss_)));
  for (std::uint64_t i = sim_.random(4); i != 0; --i) {
    const auto from = static_cast<NodeId>(sim_.random(sim_.size()));
    const auto to = static_cast<NodeId>(sim_.random(sim_.size()));
    if (from != to) good(sim_.set_faults(from, to, draw_faults(worst_loss_)));
  }
}

// ---- deaths and cuts --------------------------------------------------------------------------

void SimWorld::plan_trouble() {
  if (sim_.chance(0.25)) return;        // some runs have none
  const Nanoseconds span = pace_ * 18;  // about as long as calls are begun
  const auto any = [this] { return static_cast<NodeId>(sim_.random(sim_.size())); };
  for (std::uint64_t i = sim_.random(5); i != 0; --i) {
    sim_.at(below(span), [this, node = any(), inside = sim_.chance(0.3)] {
      if (inside) {
        actors_[node].dies_in_handler = !winding_up_;
      } else {
        kill(node);
      }
    });
  }
  for (std::uint64_t i = sim_.random(4); i != 0; --i) {
    const Nanoseconds from = below(span);
    const Nanoseconds until = from + (sim_.chance(0.3) ? below(600ms) : below(pace_ * 10));
    const NodeId a = any(), b = any();
    if (a == b) continue;
    sim_.at(from, [this, a, b] { cut(a, b); });
    sim_.at(until, [this, a, b] { heal(a, b); });
  }
  for (std::uint64_t i = sim_.random(3); i != 0; --i) {
    sim_.at(below(span),
            [this, node = any(), time = below(20ms)] { (void)sim_.pause(node, time); });
  }
  if (sim_.chance(0.4)) {
    sim_.at(below(span), [this, node = any(), n = 1 + sim_.random(100)] {
      if (!sim_.alive(node) || winding_up_) return;
      actors_[node].shaky = true;
      mark(node);
      (void)sim_.fail_request(node, n);
    });
  }
}

void SimWorld::mark(NodeId a, NodeId b) {
  const auto between = [a, b](const SimPath& p) {
    return (p.from == a && p.to == b) || (p.from == b && p.to == a);
  };
  for (SimSession& s : sessions_) s.troubled = s.troubled || (!s.over && between(s));
  for (SimLink& l : links_) l.troubled = l.troubled || (!l.over && between(l));
}

/// Its connections, which share a fate that datagrams do not.
void SimWorld::mark(NodeId node) {
  for (SimLink& l : links_) l.troubled = l.troubled || l.from == node || l.to == node;
}

bool SimWorld::in_trouble(NodeId a, NodeId b) const {
  return !sim_.alive(a) || !sim_.alive(b) || cuts_.contains(std::minmax(a, b));
}

void SimWorld::kill(NodeId node) {
  if (winding_up_ || !sim_.alive(node)) return;
  for (NodeId other = 0; other < sim_.size(); ++other) mark(node, other);
  for (SimSession& s : sessions_) s.over = s.over || s.from == node;
  for (SimLink& l : links_) l.over = l.over || l.from == node;
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
  // From inside its own callback it is about to go; what was kept outlives it in either case.
  sim_.at(sim_.now() + below(1ms), [this, node] { drop_kept(actors_[node], 0); });
  sim_.at(sim_.now() + 1ms + below(sim_.chance(0.5) ? 3ms : 300ms), [this, node] { revive(node); });
}

void SimWorld::revive(NodeId node) {
  if (sim_.alive(node)) return;
  drop_kept(actors_[node], 0);
  actors_[node].shaky = false;
  if (auto begun = sim_.restart(node); !begun) return fail("{}", begun.error().message());
  serve(node);
  listen(node);
  start_actor(node);
}

void SimWorld::cut(NodeId a, NodeId b) {
  if (winding_up_) return;
  cuts_.insert(std::minmax(a, b));
  mark(a, b);
  (void)sim_.cut(a, b);
}

void SimWorld::heal(NodeId a, NodeId b) {
  mark(a, b);
  cuts_.erase(std::minmax(a, b));
  (void)sim_.heal(a, b);
}

void SimWorld::end_trouble() {
  while (!cuts_.empty()) heal(cuts_.begin()->first, cuts_.begin()->second);
  (void)sim_.set_faults({});
  for (NodeId from = 0; from < sim_.size(); ++from) {
    for (NodeId to = 0; to < sim_.size(); ++to) {
      if (from != to) (void)sim_.set_faults(from, to, {});
    }
  }
  for (NodeId node = 0; node < sim_.size(); ++node) actors_[node].dies_in_handler = false;
}

}  // namespace spinwire::tools
