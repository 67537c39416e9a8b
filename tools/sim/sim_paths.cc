// Where sessions and connections of the simulated workload go, and how they come back: over a list
// of addresses, not before they may, and soon enough.
#include <algorithm>

#include "sim/sim_world.h"

namespace spinwire::tools {

namespace {

constexpr Nanoseconds kLongestBackoff = 20ms;
/// A session that is opened again waits first for the end of its connection for long calls.
constexpr Nanoseconds kLongestClose = 450ms;

}  // namespace

void SimWorld::choose_targets(SimPath& p, NodeId from, NodeId to) {
  p.from = from;
  p.incarnation = sim_.incarnation(from);
  p.down_since = sim_.now();
  p.targets.emplace_back(to, 0ns);
  if (has_failovers_ && !winding_up_) {
    for (std::uint64_t i = sim_.random(3); i != 0; --i) {
      const NodeId host = any_host();
      if (host != home(from) && !p.may_reach(host)) p.targets.emplace_back(host, 0ns);
    }
  }
  p.troubled = in_trouble(p);
  p.leaving = std::any_of(p.targets.begin(), p.targets.end(),
                          [this](const auto& target) { return has_leaving(target.first); });
}

std::vector<std::string> SimWorld::alternatives(const SimPath& p) {
  std::vector<std::string> addresses;
  for (std::size_t i = 1; i < p.targets.size(); ++i)
    addresses.push_back(Simulation::address(p.targets[i].first));
  return addresses;
}

void SimWorld::on_path_ready(SimPath& p, const char* kind, std::uint32_t index,
                             std::string_view peer) {
  const auto found = std::find_if(p.targets.begin(), p.targets.end(), [peer](const auto& target) {
    return Simulation::address(target.first) == peer;
  });
  if (found == p.targets.end()) return fail("{} {} is ready with {}", kind, index, peer);
  const auto place = static_cast<std::size_t>(found - p.targets.begin());
  if (place != p.place) count(SimEvent::failovers);
  p.place = place;
  const bool has_left = sim_.now() - hosts_[p.to()].left_at < slack_;  // what it sent is under way
  p.leaving = is_leaving(p.from) || has_leaving(p.to()) || has_left;
  Nanoseconds& not_before = found->second;
  if (not_before.count() == 0) return;
  if (sim_.now() < not_before)
    fail("{} {} is back at {}, {} ns before it was asked to", kind, index, peer,
         (not_before - sim_.now()).count());
  not_before = 0ns;
  count(SimEvent::held_off);
}

void SimWorld::on_path_down(SimPath& p, const char* kind, std::uint32_t index, const Error& why) {
  p.down_since = sim_.now();
  if (!why.goodbye.invites_back()) return;
  const SimHost& host = hosts_[p.to()];
  if (!host.has_drained && !host.has_moved)
    fail("{} {} gets a goodbye of host {}, which never left", kind, index, p.to());
  if (why.goodbye.retry_after.count() != 0)
    p.targets[p.place].second = sim_.now() + why.goodbye.retry_after;
}

bool SimWorld::is_cut_off(const SimPath& p) const {
  return std::any_of(actors_.begin(), actors_.end(), [&](const SimActor& actor) {
    return sim_.now() >= actor.cut_off_at &&
           (actor.host == home(p.from) || p.may_reach(actor.host));
  });
}

bool SimWorld::has_reason(const SimPath& p, const Error& why) const {
  return p.troubled || is_cut_off(p) ||
         (p.leaving && why.goodbye.reason == GoodbyeReason::draining);
}

void SimWorld::check_end(const SimPath& p, const char* kind, std::uint32_t index,
                         const Error& why) {
  const bool by_itself = p.closing || is_leaving(p.from);
  if (!p.reconnects || by_itself || !is_retryable(why)) return;
  fail("{} {} from {} to {} does not reconnect any more, but its end is not final: {}", kind, index,
       p.from, p.to(), why.message());
}

// ---- coming back ------------------------------------------------------------------------------

/// Since when one of its targets would have accepted it; kNeverGood: none does.
Nanoseconds SimWorld::reachable_since(NodeId from, const SimPath& p) const {
  const NodeId here = home(from);
  Nanoseconds earliest = kNeverGood;
  for (const auto& [host, not_before] : p.targets) {
    const Nanoseconds ports_good = std::max(port_good_since(here, p), peers_port_good_since(host));
    if (cuts_.contains(std::minmax(here, host)) || ports_good == kNeverGood) continue;
    const auto healed = healed_.find(std::minmax(here, host));
    Nanoseconds since = std::max({p.down_since, not_before, ports_good, hosts_[host].good_since,
                                  hosts_[host].paused_until, hosts_[here].paused_until});
    if (healed != healed_.end()) since = std::max(since, healed->second);
    earliest = std::min(earliest, since);
  }
  return earliest;
}

Nanoseconds SimWorld::longest_absence(const SimPath& p) const {
  const std::size_t paths = std::max<std::size_t>(p.local_paths.size(), 1);
  const auto attempts = static_cast<std::int64_t>(p.targets.size() * paths) + 1;
  return attempts * p.timeout + 2 * kLongestBackoff + kLongestHoldOff + kLongestClose + slack_;
}

/// Whether it should be ready, and is not.
bool SimWorld::is_away(const SimPath& p) const {
  const bool is_up = p.ready && !p.interrupted;
  return p.reconnects && !is_up && !p.over && !p.closing && is_incarnation(p.from, p.incarnation) &&
         !is_leaving(p.from);
}

void SimWorld::check_reconnect(const SimPath& p, const char* kind, std::size_t index) {
  if (!is_away(p)) return;
  const Nanoseconds since = reachable_since(p.from, p);
  if (since == kNeverGood || sim_.now() - since <= longest_absence(p)) return;
  fail("{} {} from {} is not ready for {} us, though one of its {} targets, from {} on, accepts",
       kind, index, p.from, (sim_.now() - since).count() / 1000, p.targets.size(),
       p.targets[0].first);
}

/// Checks again and again that everything comes back in time.
void SimWorld::watch_reconnects() {
  for (std::size_t i = 0; i < sessions_.size(); ++i) {
    const SimSession& s = sessions_[i];
    // The new connection of a session without datagrams may be lost in the same way.
    if (!s.connected || (worst_loss_ <= 0.15 && !is_shaken(s))) check_reconnect(s, "session", i);
  }
  for (std::size_t i = 0; i < links_.size(); ++i) {
    if (worst_loss_ <= 0.15) check_reconnect(links_[i], "connection", i);
  }
  if (!is_closing_) sim_.at(sim_.now() + 20ms, [this] { watch_reconnects(); });
}

/// All nodes live, and no link is cut: everything is ready again that reconnects and has a port.
bool SimWorld::await_reconnects() {
  const auto is_away_now = [this](const SimPath& p) {
    return is_away(p) && reachable_since(p.from, p) != kNeverGood;
  };
  const auto all_back = [&] {
    return failed() || (std::none_of(sessions_.begin(), sessions_.end(), is_away_now) &&
                        std::none_of(links_.begin(), links_.end(), is_away_now));
  };
  if (!sim_.run_until(all_back, 10s))
    fail("a session or connection does not come back in a network without faults");
  return !failed();
}

}  // namespace spinwire::tools
