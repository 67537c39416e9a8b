// Ports of the simulated workload's devices, whose links go down or fall silent, and sessions and
// connections that go on through another one.
#include <algorithm>
#include <utility>

#include "sim/sim_world.h"

namespace spinwire::tools {

namespace {

/// A device reports a link that went down in a control step, at most 1 ms later.
constexpr Nanoseconds kLongestReport = 5ms;
/// Until a connection through a silent port is lost: retries, and then connections.peer_timeout.
constexpr Nanoseconds kLongestSilence = 1s;

}  // namespace

/// Three quarters of what reconnects have two local paths, in either order.
void SimWorld::choose_local_paths(SimPath& p) {
  if (!has_local_paths_ || !p.reconnects || probing_ || !sim_.chance(0.75)) return;
  p.local_paths = {LocalPath{1}, LocalPath{2}};
  if (sim_.chance(0.4)) std::swap(p.local_paths[0], p.local_paths[1]);
  if (sim_.chance(0.2)) p.local_paths[0].gid_index = 0;
}

bool SimWorld::is_every_link_down(const SimPath& p) const {
  return has_own_ports(p) &&
         std::all_of(p.local_paths.begin(), p.local_paths.end(), [&](const LocalPath& path) {
           return port_state(home(p.from), path.port) == PortState::down;
         });
}

Nanoseconds SimWorld::port_good_since(NodeId host, const SimPath& p) const {
  const auto good_since = [&](std::uint32_t port) {
    return port_state(host, port) == PortState::up ? hosts_[host].ports_since[port - 1]
                                                   : kNeverGood;
  };
  if (!has_own_ports(p)) return good_since(1);
  return std::min(good_since(1), good_since(2));
}

/// The other end uses the first port of its own engine.
Nanoseconds SimWorld::peers_port_good_since(NodeId host) const {
  return port_state(host, 1) == PortState::up ? hosts_[host].ports_since[0] : kNeverGood;
}

// ---- trouble ----------------------------------------------------------------------------------

void SimWorld::set_port(NodeId at, std::uint8_t port, PortState state) {
  SimHost& host = hosts_[at];
  if (host.ports[port - 1u] == state) return;
  host.ports[port - 1u] = state;
  host.ports_since[port - 1u] = sim_.now();
  mark_port(at, port);
  if (auto set = sim_.set_port(at, port, state); !set) fail("{}", set.error().message());
  if (state != PortState::up) count(SimEvent::port_failures);
}

/// What uses the port may be lost. What is ready through another one may not.
void SimWorld::mark_port(NodeId host, std::uint8_t port) {
  const auto uses = [&](const SimPath& p) {
    if (p.over) return false;
    if (port == 1 && p.may_reach(host)) return true;
    if (home(p.from) != host) return false;
    const bool is_up = p.ready && !p.interrupted;
    return has_own_ports(p) ? !is_up || p.port == port : port == 1;
  };
  // Datagrams pass; connections for long calls do not.
  for (SimSession& s : sessions_) {
    if (!uses(s)) continue;
    s.shaken = true;
    s.troubled = s.troubled || s.connected || has_own_ports(s);
  }
  for (SimLink& l : links_) l.troubled = l.troubled || uses(l);
}

/// Chooses a port, preferably one that is the local path of a session or connection.
std::pair<NodeId, std::uint8_t> SimWorld::pick_port() {
  const auto choose = [this](const auto& paths) {
    return paths.empty() ? nullptr : static_cast<const SimPath*>(&paths[sim_.random(paths.size())]);
  };
  for (int tries = 0; tries < 12; ++tries) {
    const SimPath* const p = tries % 2 == 0 ? choose(links_) : choose(sessions_);
    if (p == nullptr || p->over || !p->ready || p->interrupted || !has_own_ports(*p)) continue;
    return {home(p->from), static_cast<std::uint8_t>(p->port)};
  }
  return {any_host(), static_cast<std::uint8_t>(1 + sim_.random(2))};
}

void SimWorld::plan_port(Nanoseconds within) {
  sim_.at(sim_.now() + below(within), [this] {
    if (winding_up_) return;
    const auto [at, port] = pick_port();
    const NodeId host = at;
    set_port(host, port, sim_.chance(0.7) ? PortState::down : PortState::silent);
    // The last outages end when all calls have: what has two ports must be ready all the same.
    if (sim_.chance(0.4)) return;
    const Nanoseconds time = sim_.chance(0.3) ? below(300us) : 1ms + below(pace_ * 20);
    sim_.at(sim_.now() + time, [this, host, port = port] { set_port(host, port, PortState::up); });
  });
}

void SimWorld::restore_ports() {
  for (NodeId host = 0; host < hosts_.size(); ++host) {
    for (std::uint8_t port = 1; port <= 2; ++port) set_port(host, port, PortState::up);
  }
}

// ---- what must hold ---------------------------------------------------------------------------

/// A session or connection is ready through this local path.
void SimWorld::note_port(SimPath& p, const char* kind, std::uint32_t index, const LocalPath& path) {
  const auto has = [&](const LocalPath& each) { return each.port == path.port; };
  if (!has_own_ports(p)) return;
  if (std::none_of(p.local_paths.begin(), p.local_paths.end(), has))
    return fail("{} {} is ready through port {}, which it may not use", kind, index, path.port);
  if (p.port != 0 && p.port != path.port) count(SimEvent::port_moves);
  p.port = path.port;
}

/// It does not stay on a port that is dead, while another one of the same device works.
void SimWorld::check_port(const SimPath& p, const char* kind, std::size_t index,
                          std::uint32_t port) {
  const SimHost& host = hosts_[home(p.from)];
  const PortState state = host.ports[port - 1];
  if (port != p.port)
    return fail("{} {} was ready through port {}, and names port {}", kind, index, p.port, port);
  if (state == PortState::up) return;
  const Nanoseconds longest = state == PortState::down ? kLongestReport : kLongestSilence;
  const Nanoseconds since = std::max(host.ports_since[port - 1], host.paused_until);
  if (sim_.now() - since > longest)
    fail("{} {} from {} stays on port {}, which is {} for {} us", kind, index, p.from, port,
         state == PortState::down ? "down" : "silent", (sim_.now() - since).count() / 1000);
}

void SimWorld::audit_local_paths() {
  const auto is_bound = [this](const SimPath& p) {
    return has_own_ports(p) && p.ready && !p.interrupted && !p.over && !p.closing &&
           is_incarnation(p.from, p.incarnation) && !is_leaving(p.from);
  };
  for (std::size_t i = 0; i < sessions_.size(); ++i) {
    const SimSession& s = sessions_[i];
    if (!is_bound(s)) continue;
    const std::uint32_t port = s.handle.local_path().port;
    // Datagrams leave by the first port, and pass if it is silent.
    if (port != 1 || port_state(home(s.from), port) != PortState::silent)
      check_port(s, "session", i, port);
  }
  for (std::size_t i = 0; i < links_.size(); ++i) {
    if (is_bound(links_[i]))
      check_port(links_[i], "connection", i, links_[i].handle.local_path().port);
  }
}

}  // namespace spinwire::tools
