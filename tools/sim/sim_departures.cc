// Nodes of the simulated workload that leave in order: they drain and come again, or hand their
// listener to a successor.
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "sim/sim_world.h"

namespace spinwire::tools {

namespace {

constexpr std::uint64_t kMostRetryMilliseconds =
    std::chrono::duration_cast<std::chrono::milliseconds>(kLongestRetryAfter).count();

bool is_whole(const DrainReport& report) noexcept {
  return report.served_sessions == 0 && report.served_calls == 0 && report.sessions == 0 &&
         report.connections == 0;
}

/// The host of an address of the simulated network, "10.x.y.z:port".
NodeId host_of(std::string_view address) noexcept {
  std::uint32_t number = 0, part = 0;
  for (const char c : address.substr(0, address.find(':'))) {
    if (c != '.') {
      part = part * 10 + static_cast<std::uint32_t>(c - '0');
      continue;
    }
    number = (number << 8) | part;
    part = 0;
  }
  return ((number << 8 | part) & 0xffffff) - 1;
}

}  // namespace

void SimWorld::add_actor(NodeId host) {
  const auto node = static_cast<NodeId>(actors_.size());
  actors_.emplace_back().host = host;
  if (!has_sleepers_ || !sim_.chance(0.5)) return;
  const auto polls = static_cast<std::uint32_t>(2 + sim_.random(20));
  if (auto set = sim_.sleep_when_idle(node, polls); !set) fail("{}", set.error().message());
}

void SimWorld::renew(SimActor& actor) {
  actor.is_retired = actor.is_drained = false;
  actor.drained_by = 0ns;
  actor.cut_off_at = kNeverGood;
}

void SimWorld::rouse_inside(NodeId node) {
  if (!has_sleepers_ || !sim_.chance(0.2)) return;
  rouse(node);
  const std::uint64_t polls = sim_.engine(node).stats().polls;
  sim_.at(sim_.now() + 30us, [this, node, polls, incarnation = sim_.incarnation(node)] {
    const bool is_paused = sim_.now() < hosts_[home(node)].paused_until + 30us;
    if (is_incarnation(node, incarnation) && !is_paused && sim_.engine(node).stats().polls == polls)
      fail("node {} sleeps, though a callback has woken it", node);
  });
}

bool SimWorld::has_leaving(NodeId host) const {
  for (NodeId node = 0; node < actors_.size(); ++node) {
    if (home(node) == host && is_leaving(node) && sim_.alive(node)) return true;
  }
  return false;
}

bool SimWorld::has_former(NodeId host) const {
  for (NodeId node = 0; node < actors_.size(); ++node) {
    if (home(node) == host && actors_[node].is_retired && sim_.alive(node)) return true;
  }
  return false;
}

/// Whether all hosts accept, and no former node is left there.
bool SimWorld::is_everyone_back() const {
  const bool all_listen = std::all_of(hosts_.begin(), hosts_.end(), [this](const SimHost& host) {
    return sim_.alive(host.current) && !is_leaving(host.current) &&
           !actors_[host.current].is_retired && !host.has_no_listener;
  });
  if (!all_listen) return false;
  for (NodeId node = 0; node < actors_.size(); ++node) {
    if (actors_[node].is_retired && sim_.alive(node)) return false;
  }
  return true;
}

void SimWorld::plan_departures() {
  const Nanoseconds span = pace_ * 18;
  const auto plan = [&](std::uint64_t times, auto&& what) {
    for (; times != 0; --times) sim_.at(sim_.now() + below(span), what);
  };
  if (has_drains_) plan(1 + sim_.random(3), [this] { drain(hosts_[any_host()].current); });
  if (has_handovers_) plan(1 + sim_.random(2), [this] { hand_over(any_host()); });
  // Down for so long that sessions and connections have to go elsewhere.
  if (has_failovers_ && sim_.chance(0.4))
    plan(1, [this] { kill(hosts_[any_host()].current, 1s + below(300ms)); });
  if (has_lapses_) {
    for (std::uint64_t i = 4 + sim_.random(5); i != 0; --i) plan_lapse(any_host(), span);
  }
}

// ---- draining ---------------------------------------------------------------------------------

void SimWorld::drain(NodeId node) {
  SimActor& actor = actors_[node];
  if (!sim_.alive(node) || is_leaving(node) || (winding_up_ && !actor.is_retired)) return;
  SimHost& host = hosts_[actor.host];
  const Nanoseconds timeout = sim_.chance(0.3) ? below(2ms) : 20ms + below(300ms);
  DrainOptions options;
  if (sim_.chance(0.7))
    options.retry_after = std::chrono::milliseconds(1 + sim_.random(kMostRetryMilliseconds));
  options.on_drained = [this, node](const DrainReport& report) { on_drained(node, report); };
  if (auto begun = sim_.engine(node).drain(timeout, options); !begun)
    return fail("node {} does not drain: {}", node, begun.error().message());
  rouse(node);
  actor.drained_by = sim_.now() + timeout + slack_;
  actor.served_limit = sim_.engine(node).rpc_stats().served_sessions;
  host.has_drained = true;
  actor.cut_off_at = sim_.now() + timeout;
  if (host.current == node) host.good_since = kNeverGood;
  const auto leaves = [&](SimPath& p) {
    p.leaving = p.leaving || (!p.over && (p.from == node || p.may_reach(actor.host)));
  };
  std::for_each(sessions_.begin(), sessions_.end(), leaves);
  std::for_each(links_.begin(), links_.end(), leaves);
}

void SimWorld::on_drained(NodeId node, const DrainReport& report) {
  if (!sim_.alive(node)) return;
  SimActor& actor = actors_[node];
  if (std::exchange(actor.is_drained, true)) return fail("node {} is drained twice", node);
  if (sim_.now() > actor.drained_by) fail("node {} is drained too late", node);
  count(SimEvent::drains);
  audit_timers();  // they run on
  sim_.at(sim_.now() + below(2ms),
          [this, node, incarnation = sim_.incarnation(node)] { leave(node, incarnation); });
  if (!is_whole(report)) {
    for (NodeId other = 0; other < hosts_.size(); ++other) mark(actor.host, other);
    return;
  }
  count(SimEvent::whole_drains);
  const auto lives = [node](const SimPath& p) { return p.from == node && !p.over; };
  if (std::any_of(sessions_.begin(), sessions_.end(), lives) ||
      std::any_of(links_.begin(), links_.end(), lives))
    fail("node {} is drained, but its sessions and connections are not over", node);
  if (std::any_of(calls_.begin(), calls_.end(), [&](const SimCall& c) {
        return sessions_[c.session].from == node && c.accepted && c.ended == 0 && !c.orphan;
      }))
    fail("node {} is drained, but its calls have not ended", node);
}

/// The process of a drained node ends.
void SimWorld::leave(NodeId node, std::uint32_t incarnation) {
  if (!is_incarnation(node, incarnation)) return;
  audit_timers();
  SimActor& actor = actors_[node];
  actor.cut_off_at = kNeverGood;
  // Peers that were about to be refused find no listener, or the end of their half handshake. A
  // successor accepts those that came after the listener.
  const auto loses = [&](SimPath& p) {
    const bool is_up = p.ready && !p.interrupted;
    const bool is_known = !actor.is_retired || p.down_since <= hosts_[actor.host].released_at;
    p.troubled = p.troubled || (!p.over && !is_up && is_known && p.may_reach(actor.host));
  };
  std::for_each(sessions_.begin(), sessions_.end(), loses);
  std::for_each(links_.begin(), links_.end(), loses);
  end_actor(node);
  sim_.at(sim_.now() + 1ms + below(sim_.chance(0.7) ? 3ms : 100ms),
          [this, node] { restart_later(node); });
}

void SimWorld::audit_departures() {
  for (NodeId node = 0; node < actors_.size(); ++node) {
    SimActor& actor = actors_[node];
    if (!is_leaving(node) || !sim_.alive(node)) continue;
    const std::uint32_t served = sim_.engine(node).rpc_stats().served_sessions;
    if (served > actor.served_limit)
      fail("node {} drains, and serves {} sessions after {}", node, served, actor.served_limit);
    actor.served_limit = served;
    if (!actor.is_drained && sim_.now() > actor.drained_by + 20ms)  // and a pause
      fail("node {} does not drain", node);
  }
}

/// A peer asks for a session or connection.
void SimWorld::on_peer_request(NodeId node, PeerRequest& request) {
  request.accept();
  if (!sim_.alive(node)) return;
  if (host_of(request.peer().address) >= hosts_.size())
    fail("node {} hears of a stranger, {}", node, request.peer().address);
  if (request.peer().key.empty() == has_keys_)
    fail("node {} gets a peer with the key '{}'", node, request.peer().key);
  if (is_leaving(node)) fail("node {} drains, and asks whether to accept a peer", node);
}

// ---- listeners that go away and come back -----------------------------------------------------

void SimWorld::plan_lapse(NodeId host, Nanoseconds within) {
  sim_.at(sim_.now() + below(within), [this, host] { lapse(host); });
}

/// The node closes its listener and serves on. Handshakes under way are refused, and so is each
/// attempt until it listens again.
void SimWorld::lapse(NodeId at) {
  SimHost& host = hosts_[at];
  const NodeId node = host.current;
  SimActor& actor = actors_[node];
  if (winding_up_ || !sim_.alive(node) || is_leaving(node) || actor.is_retired ||
      host.has_no_listener)
    return;
  actor.listener = Listener();
  rouse(node);
  host.has_no_listener = true;
  host.good_since = kNeverGood;
  for (NodeId other = 0; other < hosts_.size(); ++other) mark(at, other);
  count(SimEvent::lapses);
  sim_.at(sim_.now() + below(4ms), [this, at, node, incarnation = sim_.incarnation(node)] {
    if (!is_incarnation(node, incarnation)) return;  // what has started there since listens
    hosts_[at].has_no_listener = false;
    if (is_leaving(node)) return;
    listen(node);
    rouse(node);
  });
}

// ---- handing over -----------------------------------------------------------------------------

/// The node gives its listener away, serves on, and drains once its successor accepts.
void SimWorld::hand_over(NodeId at) {
  SimHost& host = hosts_[at];
  SimActor& actor = actors_[host.current];
  if (winding_up_ || !sim_.alive(host.current) || is_leaving(host.current) || actor.is_retired ||
      host.has_no_listener)
    return;
  auto socket = actor.listener.release();
  if (!socket) return fail("host {}: {}", at, socket.error().message());
  rouse(host.current);
  host.listener = *socket;
  host.good_since = kNeverGood;
  actor.is_retired = host.has_moved = true;
  host.released_at = sim_.now();
  for (SimSession& s : sessions_) s.moved = s.moved || (!s.over && s.may_reach(at));
  sim_.at(sim_.now() + below(2ms), [this, at] { start_successor(at); });
}

void SimWorld::start_successor(NodeId at) {
  SimHost& host = hosts_[at];
  const NodeId former = host.current;
  if (has_keys_) rotate_keys(at);
  if (host.spare) {
    host.current = *std::exchange(host.spare, std::nullopt);
    renew(actors_[host.current]);
    if (auto begun = sim_.restart(host.current); !begun) return fail("{}", begun.error().message());
  } else {
    auto added = sim_.add_beside(at, host.config);
    if (!added) return fail("{}", added.error().message());
    host.current = *added;
    add_actor(at);
  }
  if (!sim_.alive(former)) host.spare = former;
  serve(host.current);
  listen(host.current);
  start_actor(host.current);
  count(SimEvent::handovers);
  sim_.at(sim_.now() + below(3ms), [this, former, incarnation = sim_.incarnation(former)] {
    if (is_incarnation(former, incarnation)) drain(former);
  });
}

void SimWorld::close_descriptors() noexcept {
  for (const SimHost& host : hosts_) {
    if (host.listener >= 0) ::close(host.listener);
  }
  for (const int file : key_files_) ::close(file);
}

}  // namespace spinwire::tools
