// State of a simulation: nodes, the network between them, and time. Cold.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/internals.h"
#include "base/random.h"
#include "engine/engine_core.h"
#include "sim/control_network.h"
#include "softverbs/faults/fault_plan.h"
#include "spinwire/sim.h"

namespace spinwire::sim {

inline constexpr std::uint64_t kNever = ~std::uint64_t{0};
inline constexpr std::uint32_t kMostNodes = 1024;
inline constexpr std::uint8_t kPorts = 2;  ///< of each device

struct Node {
  Config config;
  Engine engine;  ///< empty while the node is dead
  SimulatedHost* host = nullptr;
  std::uint32_t incarnation = 0;
  std::uint64_t paused_until = 0;
  std::uint64_t polled_at = 0;
  bool ends_after_poll = false;  ///< the node dies when its poll has returned
  std::uint64_t fail_at = 0;     ///< of the current plan
  std::uint32_t plans = 0;       ///< plans set so far: each has another seed

  // Sleeping: sleep.cc.
  std::uint32_t sleeps_after = 0;  ///< polls in a row without an event; 0: never
  std::uint32_t idle_polls = 0;    ///< in a row
  bool is_asleep = false;
  bool has_missed = false;         ///< this sleep is counted in missed_wakeups
  int sleeps_on = -1;              ///< Engine::fd()
  std::uint64_t wakes_at = 0;      ///< tick
  std::uint64_t host_changes = 0;  ///< of its host, when `sleeps_on` was last read

  [[nodiscard]] bool alive() const noexcept {
    return static_cast<bool>(engine) && !ends_after_poll;
  }
  /// The number of its host: that of the first node there.
  [[nodiscard]] NodeId home() const noexcept { return host->number(); }
  [[nodiscard]] ibv_context* device() const noexcept {
    return detail::core_of(engine)->context.device->context();
  }
};

/// An action to run at a given time.
struct ScheduledAction {
  std::uint64_t when;
  std::uint64_t order;
  std::function<void()> what;
  friend bool operator<(const ScheduledAction& a,
                        const ScheduledAction& b) noexcept {  // the top is the earliest
    return a.when != b.when ? a.when > b.when : a.order > b.order;
  }
};

using Way = std::pair<NodeId, NodeId>;

/// The network's cuts and faults, and the delays of handshakes.
class NetworkModel final : public LinkModel {
 public:
  explicit NetworkModel(std::uint64_t seed) noexcept : random_(seed) {}
  bool is_up(std::uint32_t from, std::uint32_t to) override;
  std::uint64_t draw_control_delay(std::uint32_t from, std::uint32_t to) override;
  [[nodiscard]] const NetworkFaults& faults(NodeId from, NodeId to) const;

  NetworkFaults everywhere;
  std::map<Way, NetworkFaults> ways;
  std::set<Way> cuts;                                     ///< the lower number first
  std::map<NodeId, std::array<PortState, kPorts>> ports;  ///< of hosts; without an entry: up

 private:
  base::Random random_;
};

inline Way both(NodeId a, NodeId b) noexcept { return {std::min(a, b), std::max(a, b)}; }

/// Errors: invalid_argument naming the field.
[[nodiscard]] Result<void> check(const NetworkFaults& faults);
[[nodiscard]] softverbs::FaultPlan plan_of(const NetworkFaults& faults, std::uint64_t seed);
void add(SimulationStats& sum, const softverbs::FaultStatistics& more) noexcept;
/// Receives for datagrams that the device has, completed ones in the queue included.
[[nodiscard]] std::uint32_t datagram_receives(const detail::EngineCore& core) noexcept;

}  // namespace spinwire::sim

namespace spinwire {

struct Simulation::State {
  State(std::uint64_t seed, const SimulationOptions& options);
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State();

  /// On the host of `neighbour`; null: on a host of its own.
  Result<NodeId> add(const Config& config, const sim::Node* neighbour = nullptr);
  Result<void> start_node(NodeId number);
  void end_node(sim::Node& node) noexcept;
  [[nodiscard]] Result<sim::Node*> living(NodeId node, const char* asked);
  /// Sets a node's fault plan, and the plans of paths from and to it.
  Result<void> apply_faults(NodeId node);
  /// From the nodes of one host to those of another.
  Result<void> apply_way_faults(NodeId from, NodeId to);
  /// Sets the state of the links between the nodes of two hosts, at both ends.
  void apply_link(NodeId a, NodeId b) noexcept;
  /// Sets the state of a port at all nodes of a host.
  void apply_port(NodeId home, std::uint8_t port) noexcept;
  [[nodiscard]] softverbs::FaultPlan plan_of(NodeId node);

  Status step();
  void poll(sim::Node& node, NodeId number);
  void run_due_actions();
  // In sleep.cc.
  /// Lets a node sleep, unless a last poll finds something. Returns the events of that poll.
  int fall_asleep(sim::Node& node);
  /// Whether a node sleeps on; if not, it is awake now. Counts wake-ups that were missed.
  bool sleeps_on(sim::Node& node);
  void wake(sim::Node& node) noexcept;
  /// Whether something has come that makes the node's descriptor readable.
  [[nodiscard]] static bool has_come(const sim::Node& node);
  /// Advances time to the next due point, after steps without an event.
  void jump();
  /// Makes time advance in small steps again, after an action that may have consequences.
  void end_quiet() noexcept;
  static bool has_pending_work(const sim::Node& node) noexcept;
  [[nodiscard]] std::uint64_t next_of(const sim::Node& node) const;
  [[nodiscard]] std::uint64_t next_due() const;
  [[nodiscard]] std::uint64_t next_timer(const sim::Node& node) const;
  void advance_time(std::uint64_t least, std::uint64_t most) noexcept;
  void note(std::uint64_t value) noexcept;
  [[nodiscard]] std::uint64_t trace_hash() const noexcept;
  [[nodiscard]] Result<void> audit() const;

  const std::uint64_t seed;
  SimulationOptions options;
  base::SeedSource source;  ///< for the engines
  base::Random order;       ///< for the order and duration of polls
  base::Random chances;     ///< for the test
  sim::NetworkModel network_model;
  sim::ControlNetwork control_network;
  std::vector<std::unique_ptr<sim::Node>> nodes;
  std::vector<NodeId> turns;
  std::priority_queue<sim::ScheduledAction> actions;
  std::uint64_t action = 0;
  std::uint64_t now;                        ///< tick of all clocks
  std::uint32_t quiet = 0;                  ///< steps in a row without an event
  std::uint64_t first_stride = 10'000'000;  ///< the shortest interval of nodes' control steps
  std::uint64_t stride = first_stride;      ///< longest next jump
  bool stepping = false;
  std::optional<NodeId> polling;
  std::uint64_t trace;
  SimulationStats stats;  ///< without the faults of the living nodes
};

}  // namespace spinwire
