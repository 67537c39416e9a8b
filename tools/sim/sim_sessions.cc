// Sessions of the simulations' workload: how they are opened, interrupted and closed.
#include <utility>

#include "sim/sim_world.h"

namespace spinwire::tools {

void SimWorld::open_session(NodeId from, NodeId to) {
  if (is_leaving(from)) return;
  const auto index = static_cast<std::uint32_t>(sessions_.size());
  SimSession& s = sessions_.emplace_back();
  choose_targets(s, from, to);
  s.connected = hosts_[home(from)].connects ||
                std::any_of(s.targets.begin(), s.targets.end(),
                            [this](const auto& target) { return hosts_[target.first].connects; });
  SessionOptions options;
  options.window = 1u << sim_.random(5);
  options.on_ready = [this, index](Session) { on_session_ready(index); };
  options.on_closed = [this, index](Session, const Error& why) { on_session_closed(index, why); };
  // Half of the sessions reconnect; in half of these, calls wait meanwhile.
  s.reconnects = index % 2 == 1;
  s.waits = index % 4 == 1;
  if (s.reconnects) options.reconnect = {10'000, 1ms, 20ms};
  choose_local_paths(s);
  s.connected = s.connected || has_own_ports(s);  // datagrams leave by the first port only
  s.timeout = s.reconnects && (!s.connected || has_own_ports(s)) ? 100ms : 500ms;
  options.local_paths = s.local_paths;
  options.timeout = s.timeout;
  options.alternatives = alternatives(s);
  if (s.waits) options.when_not_ready = WhenNotReady::wait;
  options.on_interrupted = [this, index](Session, const Error& why) {
    on_session_interrupted(index, why);
  };
  const auto opened = sim_.engine(from).open_session(Simulation::address(to), options);
  rouse(from);
  if (!opened) {
    s.over = true;
    if (is_every_link_down(s) && opened.error().status == Status::system) return open_later(s);
    return fail("session {}: {}", index, opened.error().message());
  }
  s.handle = *opened;
  actors_[from].sessions.push_back(index);
  ++outcome_.sessions;
}

void SimWorld::on_session_ready(std::uint32_t index) {
  SimSession& s = sessions_[index];
  if (s.ready && !s.interrupted) fail("session {} is ready twice", index);
  if (std::exchange(s.interrupted, false)) count(SimEvent::reopened);
  s.ready = true;
  on_path_ready(s, "session", index, s.handle.peer());
  note_port(s, "session", index, s.handle.local_path());
  // A node that has given its listener away meanwhile, and may have died since, may serve it.
  s.moved = has_former(s.to()) || s.down_since <= hosts_[s.to()].released_at;
}

/// Whether the successor of its server has told the session to leave.
bool SimWorld::is_told_to_move(const SimSession& s, const Error& why) {
  return s.moved && why.goodbye.reason == GoodbyeReason::draining;
}

void SimWorld::on_session_interrupted(std::uint32_t index, const Error& why) {
  SimSession& s = sessions_[index];
  if (!sim_.alive(s.from)) return;
  sim_.note(static_cast<std::uint64_t>(why.status) << 32 | index);
  if (!s.reconnects || std::exchange(s.interrupted, true))
    fail("session {} is interrupted twice", index);
  const bool lost = s.connected && is_shaken(s);  // its connection
  if (!has_reason(s, why) && !is_told_to_move(s, why) && worst_loss_ <= 0.15 && !lost)
    fail("session {} from {} to {} is interrupted without a reason: {}", index, s.from, s.to(),
         why.message());
  on_path_down(s, "session", index, why);
}

void SimWorld::on_session_closed(std::uint32_t index, const Error& why) {
  SimSession& s = sessions_[index];
  if (!sim_.alive(s.from)) return;
  sim_.note(static_cast<std::uint64_t>(why.status) << 32 | index);
  if (std::exchange(s.over, true)) fail("session {} is closed twice", index);
  check_end(s, "session", index, why);
  const bool good = why.status == Status::ok;
  if (good && !s.closing && !s.leaving && !is_told_to_move(s, why))
    fail("session {} from {} to {} closed without a request (goodbye {})", index, s.from, s.to(),
         static_cast<int>(why.goodbye.reason));
  const bool lost = s.connected && (is_shaken(s) || s.leaving);  // its connection
  if (!good && !has_reason(s, why) && !is_told_to_move(s, why) && worst_loss_ <= 0.15 && !lost &&
      !(s.closing && !s.ready))
    fail("session {} from {} to {} ends without a reason: {}", index, s.from, s.to(),
         why.message());
  open_later(s);
}

/// Another session takes the place of one that is over.
void SimWorld::open_later(const SimSession& s) {
  if (winding_up_) return;
  const auto again = [this, from = s.from, to = s.to(), incarnation = s.incarnation] {
    if (is_incarnation(from, incarnation) && !winding_up_) open_session(from, to);
  };
  sim_.at(sim_.now() + below(pace_ * 8), again);
}

void SimWorld::close_session(std::uint32_t index) {
  SimSession& s = sessions_[index];
  if (s.over || s.closing) return;
  s.closing = true;
  const Status status = s.handle.close();
  if (status == Status::not_connected && (s.leaving || s.moved)) return;  // it ends already
  if (status != Status::ok)
    return fail("session {} cannot be closed: {}", index, to_string(status));
  if (!winding_up_) count(SimEvent::closed);
}

}  // namespace spinwire::tools
