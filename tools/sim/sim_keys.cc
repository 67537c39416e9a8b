// Keys of the simulated workload: those of its nodes, which are replaced while it runs, and
// strangers with others or none, with whom nobody gets a session or connection.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "sim/sim_world.h"

namespace spinwire::tools {

namespace {

constexpr std::uint32_t kLastStage = 3;

std::string key(std::string_view name, char digit) {
  return fmt::format("{} {}\n", name, std::string(64, digit));
}

/// The keys of a node in a rotation. Nodes one stage apart understand each other.
std::string keys_at(std::uint32_t stage) {
  const std::string old = key("2025", 'a'), next = key("2026", 'b');
  switch (stage) {
    case 0:
      return old;
    case 1:
      return old + next;
    case 2:
      return next + old;
    default:
      return next;
  }
}

void write_file(int file, std::string_view text) noexcept {
  (void)!::ftruncate(file, 0);
  (void)!::pwrite(file, text.data(), text.size(), 0);
}

std::string path_of(int file) { return fmt::format("/proc/self/fd/{}", file); }

}  // namespace

/// A file without a name, so that none is left when the program is killed.
int SimWorld::make_key_file(std::string_view text) {
  const int file = ::memfd_create("spinwire-sim-keys", MFD_CLOEXEC);
  if (file < 0 || ::fchmod(file, 0600) != 0) {
    fail("no file for keys");
    return file;
  }
  key_files_.push_back(file);
  write_file(file, text);
  return file;
}

std::string SimWorld::add_key_file(SimHost& host) {
  host.key_stage = first_key_stage_ + (sim_.chance(0.5) ? 1 : 0);
  host.key_file = make_key_file(keys_at(host.key_stage));
  return path_of(host.key_file);
}

/// Gives a node that is about to start newer keys, unless another is too far behind. One that has
/// handed its listener over still has those of before.
void SimWorld::rotate_keys(NodeId at) {
  SimHost& host = hosts_[at];
  if (host.key_stage == kLastStage) return;
  for (NodeId node = 0; node < actors_.size(); ++node) {
    const bool is_former = actors_[node].is_retired && sim_.alive(node);
    if (is_former && (home(node) != at || has_leaving(at))) return;
  }
  const bool is_last = std::all_of(hosts_.begin(), hosts_.end(), [&](const SimHost& other) {
    return other.key_stage >= host.key_stage;
  });
  if (!is_last) return;
  write_file(host.key_file, keys_at(++host.key_stage));
  count(SimEvent::rotations);
}

// ---- strangers --------------------------------------------------------------------------------

void SimWorld::add_strangers(Config config) {
  for (std::uint64_t i = 1 + sim_.random(2); i != 0; --i) {
    config.security.key_file.clear();
    switch (sim_.random(3)) {
      case 0:  // other keys of the same names
        config.security.key_file = path_of(make_key_file(key("2025", 'c') + key("2026", 'd')));
        break;
      case 1:
        config.security.key_file = path_of(make_key_file(key("stranger", 'e')));
        break;
      default:
        break;
    }
    auto added = sim_.add(config);
    if (!added) return fail("{}", added.error().message());
    const NodeId stranger = *added;
    add_actor(stranger);
    ListenOptions options;
    options.on_connect_request = [this](PeerRequest&) { fail("a stranger is asked to connect"); };
    options.on_session_request = [this](PeerRequest&) { fail("a stranger is asked to serve"); };
    auto listener = sim_.engine(stranger).listen(Simulation::address(stranger), options);
    if (!listener) return fail("{}", listener.error().message());
    actors_[stranger].listener = std::move(*listener);
    serve(stranger);
    plan_stranger(stranger);
  }
}

/// The stranger asks nodes, and nodes ask the stranger.
void SimWorld::plan_stranger(NodeId stranger) {
  for (std::uint64_t i = 2 + sim_.random(3); i != 0; --i) {
    sim_.at(sim_.now() + below(pace_ * 18), [this, stranger, host = any_host()] {
      if (sim_.chance(0.7)) {
        meet_stranger(stranger, Simulation::address(host));
      } else {
        meet_stranger(hosts_[host].current, Simulation::address(stranger));
      }
    });
  }
}

void SimWorld::meet_stranger(NodeId from, const std::string& address) {
  if (!sim_.alive(from) || is_leaving(from) || winding_up_) return;
  rouse(from);
  const bool reconnects = sim_.chance(0.3);
  if (sim_.chance(0.5)) {
    SessionOptions options;
    options.timeout = 100ms;
    if (reconnects) options.reconnect = {2, 1ms, 5ms};
    options.on_ready = [this](Session) { fail("a stranger has a session"); };
    options.on_closed = [this, from](Session, const Error& why) { on_stranger_refused(from, why); };
    const auto opened = sim_.engine(from).open_session(address, options);
    if (!opened) fail("{}", opened.error().message());
    return;
  }
  ConnectOptions options;
  options.timeout = 100ms;
  if (reconnects) options.reconnect = {2, 1ms, 5ms};
  options.handlers.on_ready = [this](Connection) { fail("a stranger has a connection"); };
  options.handlers.on_closed = [this, from](Connection, const Error& why) {
    on_stranger_refused(from, why);
  };
  const auto made = sim_.engine(from).connect(address, options);
  if (!made) fail("{}", made.error().message());
}

void SimWorld::on_stranger_refused(NodeId from, const Error& why) {
  if (!sim_.alive(from)) return;
  sim_.note(static_cast<std::uint64_t>(why.status));
  if (why.status == Status::unauthenticated) count(SimEvent::strangers);
}

}  // namespace spinwire::tools
