// Starts, kills and restarts nodes; the public API.

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/internals.h"
#include "base/memory_store.h"
#include "base/owner_guard.h"
#include "sim/state.h"
#include "softverbs/softverbs_device.h"

namespace spinwire {

using sim::Node;

namespace {

/// Independent streams of random numbers.
enum class Stream : std::uint64_t { engines = 1, order, chances, network, faults };

constexpr std::uint64_t seed_of(std::uint64_t seed, Stream stream) noexcept {
  return base::Random::mix(seed + static_cast<std::uint64_t>(stream) * 0x9e3779b97f4a7c15u);
}

/// First tick of virtual time; above 0, so that differences to earlier times do not underflow.
constexpr std::uint64_t kBeginning = 3'600'000'000'000;

/// Reusable memory of dead nodes of this thread's simulations.
const std::shared_ptr<base::MemoryStore>& old_memory() {
  constexpr std::size_t kPieces = 64;
  thread_local const auto store = std::make_shared<base::MemoryStore>(kPieces);
  return store;
}

Result<void> check_options(const SimulationOptions& o) {
  const auto bad = [](const char* name, const char* range) {
    return base::fail(Status::invalid_argument, "make a simulation",
                      base::format("{} is out of range", name), base::format("give {}", range));
  };
  if (o.poll_time_min.count() < 0 || o.poll_time_max < o.poll_time_min ||
      o.poll_time_max > std::chrono::milliseconds(1) || o.poll_time_max.count() == 0)
    return bad("the time of a poll (poll_time_min, poll_time_max)", "0 to 1 ms, the lower first");
  if (!(o.skip_probability >= 0 && o.skip_probability <= 0.99))
    return bad("skip_probability", "a probability up to 0.99");
  return {};
}

Result<void> no_such_node(const char* asked, NodeId node, const char* found) {
  return base::fail(Status::invalid_argument, asked, base::format("node {} {}", node, found),
                    "see Simulation::size() and alive()");
}

Result<void> check_config(const Config& config) {
  if (config.device.name != "softverbs" && config.device.name != "softverbs:softverbs")
    return base::fail(Status::invalid_argument, "add a node to a simulation",
                      base::format("device.name = {}", config.device.name),
                      "only the embedded device, softverbs, can be simulated");
  if (config.memory.hugepages == HugepagePolicy::require ||
      config.memory.lock == LockPolicy::require)
    return base::fail(Status::invalid_argument, "add a node to a simulation",
                      "memory.hugepages or memory.lock is \"require\"",
                      "nodes have ordinary pages that come when touched: set both to \"off\"");
  return {};
}

}  // namespace

// ---- starting and ending nodes --------------------------------------------------------------
// ---------------------------------------------------------------------

Simulation::State::State(std::uint64_t of_seed, const SimulationOptions& given)
    : seed(seed_of(of_seed, Stream::faults)),
      options(given),
      source(seed_of(of_seed, Stream::engines)),
      order(seed_of(of_seed, Stream::order)),
      chances(seed_of(of_seed, Stream::chances)),
      network_model(seed_of(of_seed, Stream::network)),
      control_network(network_model),
      now(kBeginning),
      trace(seed) {}

Simulation::State::~State() {
  for (auto& node : nodes) {
    if (node->engine) end_node(*node);
  }
}

Result<NodeId> Simulation::State::add(const Config& config, const Node* neighbour) {
  if (nodes.size() == sim::kMostNodes)
    return base::fail(Status::limit, "add a node to a simulation",
                      base::format("it has {}", nodes.size()), "use fewer nodes");
  if (auto good = check_config(config); !good) return tl::unexpected(good.error());
  auto node = std::make_unique<Node>();
  node->config = config;
  node->config.memory.hugepages = HugepagePolicy::off;
  node->config.memory.lock = LockPolicy::off;
  // Each node has a host of its own number, so that the numbers agree; a neighbour's goes unused.
  node->host = &control_network.add_host();
  if (neighbour != nullptr) node->host = neighbour->host;
  nodes.push_back(std::move(node));
  const Nanoseconds interval =
      std::max<Nanoseconds>(config.engine.control_interval, std::chrono::microseconds(1));
  first_stride = std::min(first_stride, static_cast<std::uint64_t>(interval.count()));
  const auto number = static_cast<NodeId>(nodes.size() - 1);
  if (auto begun = start_node(number); !begun) {
    // The host and the dead node stay, so that their numbers still agree.
    return tl::unexpected(begun.error());
  }
  turns.push_back(number);
  return number;
}

Result<void> Simulation::State::start_node(NodeId number) {
  Node& node = *nodes[number];
  if (auto good = node.config.check(); !good) return good;
  auto guard = base::OwnerGuard::create();
  if (!guard) return tl::unexpected(guard.error());
  auto core =
      std::make_unique<detail::EngineCore>(node.config, Clock::manual(&now), std::move(*guard));
  const base::MemoryStore::Scope scope(old_memory());
  if (auto opened = core->open({.network = node.host, .sparse = true, .registrations = 1024});
      !opened)
    return opened;
  softverbs::keep_to_thread(core->context.device->context());
  end_quiet();
  node.engine = detail::make<Engine>(std::move(core));
  ++node.incarnation;
  if (auto set = apply_faults(number); !set) return set;
  for (const auto& other : nodes) {
    if (!network_model.is_up(node.home(), other->home())) apply_link(node.home(), other->home());
  }
  for (std::uint8_t port = 1; port <= sim::kPorts; ++port) apply_port(node.home(), port);
  return {};
}

void Simulation::State::end_node(Node& node) noexcept {
  detail::EngineCore& core = *detail::core_of(node.engine);
  end_quiet();
  note(core.context.stats.polls ^ base::Random::mix(core.context.stats.completions));
  core.abort();
  // Neither held-back packets nor messages of the destructor may leave.
  (void)softverbs::set_links(node.device(), softverbs::LinkState::down);
  sim::add(stats, softverbs::fault_statistics(node.device()));
  node.engine = Engine();
  node.ends_after_poll = false;
  wake(node);
}

Result<Node*> Simulation::State::living(NodeId node, const char* asked) {
  if (node >= nodes.size())
    return tl::unexpected(no_such_node(asked, node, "does not exist").error());
  if (!nodes[node]->alive()) return tl::unexpected(no_such_node(asked, node, "is dead").error());
  return nodes[node].get();
}

// ---- the public API --------------------------------------------------------------------------

Simulation::Simulation(std::unique_ptr<State> state) noexcept : state_(std::move(state)) {}
Simulation::Simulation(Simulation&&) noexcept = default;
Simulation& Simulation::operator=(Simulation&&) noexcept = default;
Simulation::~Simulation() = default;

Result<Simulation> Simulation::create(std::uint64_t seed, const SimulationOptions& options) {
  return base::no_throw("make a simulation", [&]() -> Result<Simulation> {
    if (auto good = check_options(options); !good) return tl::unexpected(good.error());
    if (base::SeedSource::there())
      return base::fail(Status::in_use, "make a simulation", "this thread has one already",
                        "destroy that one first, or use another thread");
    auto state = std::make_unique<State>(seed, options);
    if (auto opened = state->control_network.open(); !opened) return tl::unexpected(opened.error());
    return Simulation(std::move(state));
  });
}

Config Simulation::config() {
  Config c;
  c.memory.hugepages = HugepagePolicy::off;
  c.memory.send_bytes = 32u << 20;  // untouched memory costs nothing
  c.memory.receive_bytes = 8u << 20;
  c.memory.lease_bytes = 8u << 20;
  c.memory.rendezvous_bytes = 16u << 20;
  c.memory.windows = 16;
  c.queues.send_depth = 64;
  c.queues.receive_depth = 64;
  c.queues.operations = 256;
  c.queues.completion_depth = 2048;
  c.connections.maximum = 32;
  c.connections.handshakes = 32;
  c.connections.eager_bytes = 2048;
  c.connections.max_message_bytes = 1u << 20;
  c.connections.credits = 16;
  c.leases.maximum = 16;
  c.leases.count = 16;
  c.rpc.sessions = 64;
  c.rpc.send_depth = 128;
  c.rpc.receive_depth = 128;
  return c;
}

Result<NodeId> Simulation::add(const Config& config) {
  return base::no_throw("add a node to a simulation", [&] { return state_->add(config); });
}

Result<NodeId> Simulation::add_beside(NodeId neighbour, const Config& config) {
  constexpr const char* kAsked = "add a node beside another";
  if (neighbour >= size())
    return tl::unexpected(no_such_node(kAsked, neighbour, "does not exist").error());
  return base::no_throw(kAsked,
                        [&] { return state_->add(config, state_->nodes[neighbour].get()); });
}

Result<void> Simulation::sleep_when_idle(NodeId number, std::uint32_t polls) {
  if (number >= size()) return no_such_node("let a node sleep", number, "does not exist");
  state_->nodes[number]->sleeps_after = polls;
  return {};
}

std::uint32_t Simulation::size() const noexcept {
  return static_cast<std::uint32_t>(state_->nodes.size());
}
bool Simulation::alive(NodeId node) const noexcept {
  return node < size() && state_->nodes[node]->alive();
}
std::uint32_t Simulation::incarnation(NodeId node) const noexcept {
  return node < size() ? state_->nodes[node]->incarnation : 0;
}
Engine& Simulation::engine(NodeId node) noexcept { return state_->nodes[node]->engine; }

std::string Simulation::address(NodeId node, std::uint16_t port) {
  const std::uint32_t host = node + 1;
  return base::format("10.{}.{}.{}:{}", host >> 16 & 0xff, host >> 8 & 0xff, host & 0xff, port);
}

Result<void> Simulation::kill(NodeId number) {
  auto node = state_->living(number, "kill a node");
  if (!node) return tl::unexpected(node.error());
  ++state_->stats.kills;
  if (state_->polling == number) {
    // A callback of this node is running, so only its links go down now.
    (*node)->ends_after_poll = true;
    (void)softverbs::set_links((*node)->device(), softverbs::LinkState::down);
  } else {
    state_->end_node(**node);
  }
  return {};
}

Result<void> Simulation::restart(NodeId number) {
  constexpr const char* kAsked = "restart a node";
  if (number >= size()) return no_such_node(kAsked, number, "does not exist");
  Node& node = *state_->nodes[number];
  if (node.engine) return no_such_node(kAsked, number, "is alive");
  return base::no_throw(kAsked, [&]() -> Result<void> {
    if (auto begun = state_->start_node(number); !begun) return begun;
    ++state_->stats.restarts;
    return {};
  });
}

Result<void> Simulation::pause(NodeId number, Nanoseconds how_long) {
  constexpr const char* kAsked = "pause a node";
  auto node = state_->living(number, kAsked);
  if (!node) return tl::unexpected(node.error());
  if (how_long.count() < 0 || how_long > std::chrono::hours(1))
    return base::fail(Status::invalid_argument, kAsked, base::format("for {} ns", how_long.count()),
                      "give up to an hour");
  (*node)->paused_until = state_->now + static_cast<std::uint64_t>(how_long.count());
  return {};
}

Nanoseconds Simulation::now() const noexcept {
  return Nanoseconds(static_cast<std::int64_t>(state_->now - kBeginning));
}
Status Simulation::step() { return state_->step(); }

void Simulation::at(Nanoseconds when, std::function<void()> what) {
  const auto tick = kBeginning + static_cast<std::uint64_t>(std::max(when, now()).count());
  state_->actions.push({tick, ++state_->action, std::move(what)});
}

std::uint64_t Simulation::random(std::uint64_t bound) noexcept {
  return state_->chances.below(bound);
}
bool Simulation::chance(double probability) noexcept {
  constexpr double kUnit = 1.0 / (std::uint64_t{1} << 53);
  return static_cast<double>(state_->chances.next() >> 11) * kUnit < probability;
}
void Simulation::note(std::uint64_t value) noexcept { state_->note(value); }
void Simulation::note(std::string_view text) noexcept {
  std::uint64_t sum = text.size();
  for (const char c : text) sum = base::Random::mix(sum + static_cast<unsigned char>(c));
  state_->note(sum);
}
std::uint64_t Simulation::trace_hash() const noexcept { return state_->trace_hash(); }

Result<void> Simulation::audit() const {
  return base::no_throw("audit a simulation", [&] { return state_->audit(); });
}

SimulationStats Simulation::stats() const noexcept {
  SimulationStats stats = state_->stats;
  for (const auto& node : state_->nodes) {
    if (node->engine) sim::add(stats, softverbs::fault_statistics(node->device()));
  }
  return stats;
}

}  // namespace spinwire
