// One run of the simulated workload, and its audit.
#include "sim/sim_workload.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "sim/sim_world.h"

namespace spinwire::tools {

namespace {

constexpr Nanoseconds kLongest = 60s;  ///< virtual time, of each part

Config config_of(Simulation& sim) {
  Config c = Simulation::config();
  c.rpc.sessions = 32;
  c.rpc.receive_depth = 64;
  c.rpc.send_depth = 64;
  c.rpc.window = 4;
  c.rpc.backlog = static_cast<std::uint32_t>(1 + sim.random(16));
  c.connections.maximum = 64;
  c.connections.keepalive_interval = 20ms;
  c.connections.peer_timeout = 400ms;
  c.connections.connect_timeout = 500ms;
  c.connections.handshake_timeout = 300ms;
  c.connections.close_timeout = 200ms;
  c.connections.credit_idle_timeout = 10ms;
  c.engine.control_interval = sim.chance(0.25) ? 100us : 1ms;
  c.queue_pair.ack_timeout = 10;  // 4 ms
  c.queue_pair.min_rnr_timer = 8;
  return c;
}

}  // namespace

const char* name_of(SimEvent event) noexcept {
  switch (event) {
    case SimEvent::dropped:
      return "datagrams dropped";
    case SimEvent::duplicated:
      return "datagrams duplicated";
    case SimEvent::reordered:
      return "datagrams reordered";
    case SimEvent::delayed:
      return "datagrams delayed";
    case SimEvent::cut_off:
      return "datagrams lost on cut links";
    case SimEvent::not_ready:
      return "messages to receivers that were not ready";
    case SimEvent::lost:
      return "packets of connections lost";
    case SimEvent::delayed_requests:
      return "requests of connections held up";
    case SimEvent::failed:
      return "work requests failed";
    case SimEvent::cuts:
      return "links cut";
    case SimEvent::kills:
      return "nodes killed";
    case SimEvent::restarts:
      return "nodes restarted";
    case SimEvent::pauses:
      return "nodes paused";
    case SimEvent::inline_calls:
      return "inline calls answered";
    case SimEvent::long_calls:
      return "long calls answered";
    case SimEvent::cancelled:
      return "calls cancelled";
    case SimEvent::timed_out:
      return "calls whose deadlines passed";
    case SimEvent::messages:
      return "messages delivered";
    case SimEvent::closed:
      return "sessions closed";
    case SimEvent::reopened:
      return "sessions opened again";
    case SimEvent::drains:
      return "engines drained";
    case SimEvent::whole_drains:
      return "engines drained within their time";
    case SimEvent::handovers:
      return "listeners handed over";
    case SimEvent::failovers:
      return "sessions and connections that went to another address";
    case SimEvent::held_off:
      return "sessions and connections that came back when they were asked to";
    case SimEvent::strangers:
      return "strangers refused";
    case SimEvent::rotations:
      return "nodes started with newer keys";
    case SimEvent::wakeups:
      return "sleeps ended by what came";
    case SimEvent::lapses:
      return "listeners away for a while";
    case SimEvent::port_failures:
      return "ports down or silent";
    case SimEvent::port_moves:
      return "sessions and connections that went to another port";
    case SimEvent::timers:
      return "runs of timers";
    case SimEvent::cancelled_timers:
      return "timers cancelled";
    case SimEvent::renewals:
      return "leases renewed beyond their time";
    case SimEvent::expiries:
      return "leases ended by their time";
    case SimEvent::refused_accesses:
      return "accesses refused after a lease";
  }
  return "";
}

SimWorld::SimWorld(Simulation simulation, std::uint64_t seed, const SimWorkload& workload)
    : workload_(workload), seed_(seed), sim_(std::move(simulation)) {}

/// Whether runs of this seed have a feature. Takes no random number, so that the other runs stay as
/// they are.
bool SimWorld::has_by_seed(std::uint64_t feature, std::uint64_t percent) const noexcept {
  std::uint64_t mixed = (seed_ + feature * 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
  mixed = (mixed ^ mixed >> 29) * 0x94d049bb133111ebu;
  return (mixed >> 32) % 100 < percent;
}

/// A run has each of these features by chance.
void SimWorld::choose_features() {
  has_keys_ = sim_.chance(0.15);
  first_key_stage_ = static_cast<std::uint32_t>(sim_.random(3));
  has_drains_ = sim_.chance(0.4);
  has_handovers_ = sim_.chance(0.3);
  has_failovers_ = sim_.chance(0.4);
  has_sleepers_ = sim_.chance(0.3);
  // Takes no random number, so that the other runs stay as they are.
  has_lapses_ = has_failovers_ && !has_drains_ && !has_keys_;
  // With these numbers, the seeds that seeded_run_test.cc names have none of the three.
  has_local_paths_ = has_by_seed(26, 30);
  has_timers_ = has_by_seed(27, 30);
  has_leases_ = has_by_seed(28, 25);
}

void SimWorld::build() {
  const std::array<Nanoseconds, 4> paces = {30us, 200us, 1ms, 5ms};
  pace_ = paces[sim_.random(paces.size())];
  slack_ = 50ms;  // two pauses, and timers
  Config config = config_of(sim_);
  const auto nodes = static_cast<NodeId>(8 + sim_.random(3));
  const double without = sim_.chance(0.3) ? 0.4 : 0;  // datagrams
  choose_features();
  for (NodeId node = 0; node < nodes; ++node) {
    SimHost& host = hosts_.emplace_back();
    host.current = node;
    host.connects = sim_.chance(without);
    config.rpc.direct_datagrams = sim_.chance(0.3) ? DirectPath::off : DirectPath::automatic;
    config.rpc.transport = host.connects ? RpcTransport::connection : RpcTransport::automatic;
    if (has_keys_) config.security.key_file = add_key_file(host);
    host.config = config;
    if (auto added = sim_.add(config); !added) return fail("{}", added.error().message());
    add_actor(node);  // its own host
  }
  outcome_.nodes = nodes;
  if (has_keys_) add_strangers(config);
  long_calls_ = 0.02 + 0.02 * static_cast<double>(sim_.random(10));
  choose_faults();
  plan_trouble();
  plan_departures();
  watch_reconnects();
  for (NodeId node = 0; node < nodes; ++node) {
    serve(node);
    listen(node);
  }
  for (NodeId node = 0; node < nodes; ++node) start_actor(node);
}

/// Starts the sessions and connections of a node.
void SimWorld::start_actor(NodeId node) {
  const auto other = [&] { return other_host(home(node)); };
  if (winding_up_) return;
  for (std::uint64_t i = 1 + sim_.random(3); i != 0; --i) open_session(node, other());
  if (sim_.chance(0.6)) connect(node, other());
  if (has_timers_) start_timers(node);
  plan_act(node);
}

void SimWorld::plan_act(NodeId node) {
  sim_.at(sim_.now() + below(2 * pace_),
          [this, node, incarnation = sim_.incarnation(node)] { act(node, incarnation); });
}

void SimWorld::act(NodeId node, std::uint32_t incarnation) {
  if (!is_incarnation(node, incarnation) || winding_up_) return;
  if (is_leaving(node)) return plan_act(node);
  const auto usable = [](std::vector<std::uint32_t>& ours, const auto& paths) {
    std::erase_if(ours, [&](std::uint32_t i) { return paths[i].over || paths[i].closing; });
    std::vector<std::uint32_t> found;
    std::copy_if(ours.begin(), ours.end(), std::back_inserter(found),
                 [&](std::uint32_t i) { return paths[i].ready && paths[i].handle.ready(); });
    return found;
  };
  auto sessions = usable(actors_[node].sessions, sessions_);
  for (const std::uint32_t i : actors_[node].sessions) {
    const SimSession& s = sessions_[i];
    if (s.waits && s.handle.state() == SessionState::opening) sessions.push_back(i);
  }
  const auto links = usable(actors_[node].links, links_);
  act_on_timers(node);
  if (has_leases_ && !links.empty()) act_on_leases(links[sim_.random(links.size())]);
  const std::uint64_t what = sim_.random(100);
  if (what < 70 && !sessions.empty()) {
    const std::uint32_t session = sessions[sim_.random(sessions.size())];
    for (std::uint64_t i = 1 + sim_.random(sim_.chance(0.2) ? 24 : 4); i != 0; --i)
      choose_call(session);
  } else if (what < 82 && !links.empty()) {
    const std::uint32_t link = links[sim_.random(links.size())];
    for (std::uint64_t i = 1 + sim_.random(4); i != 0; --i) send_message(link);
  } else if (what < 92) {
    cancel_one(node);
  } else if (what < 95 && !sessions.empty()) {
    close_session(sessions[sim_.random(sessions.size())]);
  } else if (what < 97 && !links.empty()) {
    SimLink& l = links_[links[sim_.random(links.size())]];
    l.closing = true;
    (void)l.handle.close();
  } else {
    drop_kept(actors_[node], 0);
  }
  rouse(node);
  plan_act(node);
}

// ---- the end ----------------------------------------------------------------------------------

/// Ends all trouble and waits until everything that was begun has ended.
bool SimWorld::settle() {
  winding_up_ = true;
  end_trouble();
  for (std::uint32_t i = 0; i < timers_.size(); ++i) {
    if (timers_[i].interval.count() != 0) cancel_timer(i);
  }
  const auto at_rest = [this] { return is_everyone_back() && unended_ == 0 && unsent_ == 0; };
  if (sim_.run_until([&] { return failed() || at_rest(); }, kLongest)) {
    if (failed() || !await_reconnects()) return false;
    restore_ports();
    return await_reconnects() && (!has_leases_ || prove_leases()) && await_reconnects();
  }
  fail("{} calls and {} messages do not end", unended_, unsent_);
  for (std::uint64_t i = 0; i < calls_.size(); ++i) {
    const SimCall& c = calls_[i];
    if (c.accepted && c.ended == 0 && !c.orphan)
      fail("call {} from {} to {} does not end", i, sessions_[c.session].from,
           sessions_[c.session].to());
  }
  return false;
}

/// Now no network has faults: every node must serve, whatever happened before.
bool SimWorld::probe() {
  probing_ = true;
  worst_loss_ = 0;
  const auto first = static_cast<std::uint32_t>(sessions_.size());
  const auto hosts = static_cast<NodeId>(hosts_.size());
  for (NodeId host = 0; host < hosts; ++host)
    open_session(hosts_[host].current, (host + 1) % hosts);
  const auto opened = [&] {
    return failed() || std::all_of(sessions_.begin() + first, sessions_.end(),
                                   [](const SimSession& s) { return s.ready; });
  };
  if (!sim_.run_until(opened, 2s)) fail("a session cannot be opened in a network without faults");
  if (failed()) return false;
  const std::uint64_t begun = calls_.size();
  for (std::uint32_t i = first; i < sessions_.size(); ++i) {
    for (int k = 0; k < 3; ++k) (void)begin_call(i, k == 2 ? kSimTiny : kSimEcho, 2s);
  }
  if (!sim_.run_until([&] { return failed() || unended_ == 0; }, kLongest))
    fail("{} calls do not end in a network without faults", unended_);
  for (std::uint64_t i = begun; i < calls_.size(); ++i) {
    if (calls_[i].accepted && calls_[i].status != Status::ok)
      fail("call {} ends with {} in a network without faults", i, to_string(calls_[i].status));
  }
  return !failed();
}

bool SimWorld::close_all() {
  is_closing_ = true;
  for (std::uint32_t i = 0; i < timers_.size(); ++i) cancel_timer(i);
  for (std::uint32_t i = 0; i < sessions_.size(); ++i) {
    if (!sessions_[i].over) close_session(i);
  }
  for (SimLink& l : links_) {
    if (l.over) continue;
    l.closing = true;
    (void)l.handle.close();
  }
  for (NodeId node = 0; node < sim_.size(); ++node) {
    drop_kept(actors_[node], 0);
    rouse(node);
  }
  const auto quiet = [this] {
    for (NodeId node = 0; node < sim_.size(); ++node) {
      if (!sim_.alive(node)) continue;
      const RpcStats r = sim_.engine(node).rpc_stats();
      if (r.sessions != 0 || r.served_sessions != 0 || sim_.engine(node).stats().connections != 0)
        return false;
    }
    return true;
  };
  if (sim_.run_until([&] { return failed() || quiet(); }, kLongest)) return !failed();
  fail("sessions or connections do not end");
  return false;
}

void SimWorld::audit() {
  if (auto good = sim_.audit(); !good) fail("{}", good.error().message());
  if (const std::uint64_t missed = sim_.stats().missed_wakeups; missed != 0)
    fail("{} sleeping nodes were not woken for what came", missed);
  audit_departures();
  if (has_local_paths_) audit_local_paths();
  if (has_timers_) audit_timers();
  if (has_leases_) audit_leases();
}

/// The final account.
void SimWorld::judge() {
  sim_.run_for(5ms);  // lets the last packets arrive
  for (SimActor& actor : actors_) drop_kept(actor, 0);
  audit();
  for (NodeId node = 0; node < sim_.size(); ++node) {
    if (!sim_.alive(node)) continue;
    for (const Pool pool : {Pool::send, Pool::lease, Pool::rendezvous}) {
      const MemoryStats memory = sim_.engine(node).memory_stats(pool);
      if (memory.blocks_used != 0)
        fail("node {} still uses {} blocks of pool {}", node, memory.blocks_used,
             static_cast<int>(pool));
    }
    const EngineStats stats = sim_.engine(node).stats();
    if (stats.operations != 0) fail("node {} still has {} operations", node, stats.operations);
    if (stats.bad_messages != 0) fail("node {} counts bad messages", node);
  }
  for (std::uint64_t i = 0; i < calls_.size(); ++i) {
    const SimCall& c = calls_[i];
    const std::uint32_t due = c.accepted && !c.orphan ? 1 : 0;
    if (c.ended != due && !(c.orphan && c.ended <= 1))
      fail("call {} has ended {} times", i, c.ended);
    if (!c.accepted && c.runs != 0) fail("call {} was refused and has run", i);
  }
  judge_leases();
  if (tiny_runs_ > tiny_begun_)
    fail("{} calls without a number have run {} times", tiny_begun_, tiny_runs_);
  for (std::uint64_t i = 0; i < messages_.size(); ++i) {
    const SimMessage& m = messages_[i];
    const SimLink& l = links_[m.link];
    if (m.status == Status::ok && m.delivered != 1 && !l.troubled)
      fail("message {} was sent but not delivered", i);
  }
}

/// Raises the number of calls if an event has not occurred yet; false ends the run.
bool SimWorld::goes_on() {
  copy_statistics();
  bool complete = true;
  for (std::size_t i = 0; i < kSimEvents; ++i) {
    const auto event = static_cast<SimEvent>(i);
    // A killed node always restarts later.
    complete =
        complete && (happened(event) || event == SimEvent::restarts || event >= kFirstRareEvent);
  }
  if (complete || goal_ >= std::uint64_t{2} * workload_.calls) return false;
  goal_ += 1 + workload_.calls / 10;
  hurry();
  return true;
}

SimOutcome SimWorld::run() {
  build();
  goal_ = workload_.calls;
  const auto enough = [this] { return failed() || outcome_.calls >= goal_; };
  // Audits the engines now and then during the run.
  while (!failed() && (!enough() || goes_on())) {
    const std::uint64_t steps = 500 + sim_.random(3000);
    for (std::uint64_t i = 0; i < steps && !enough(); ++i) (void)sim_.step();
    if (sim_.now() > kLongest) fail("{} calls were begun, then no more", outcome_.calls);
    if (!failed()) audit();
  }
  if (!failed() && settle() && probe() && close_all()) judge();
  outcome_.trace = sim_.trace_hash();
  outcome_.time = sim_.now();
  outcome_.stats = sim_.stats();
  copy_statistics();
  for (SimActor& actor : actors_) actor.kept.clear();
  for (SimLease& lease : leases_) lease.memory.release();
  close_descriptors();
  return std::move(outcome_);
}

SimOutcome run_sim_workload(std::uint64_t seed, const SimWorkload& workload) {
  auto made = Simulation::create(seed);
  if (made) return SimWorld(std::move(*made), seed, workload).run();
  SimOutcome none;
  none.failures.push_back(made.error().message());
  return none;
}

}  // namespace spinwire::tools
