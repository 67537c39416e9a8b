// Simulates whole systems in one thread, for tests: engines on softverbs, a network with faults,
// nodes that die and restart, and virtual time. The seed, the program and its calls determine the
// whole run, so a failure happens again for its seed.
//
// All functions are set-up. Call them on the thread that made the simulation; from callbacks only
// where the function allows it. The example sim-test shows how. The simulator is
// a separate library: link with `pkg-config --libs spinwire-sim` or the CMake target
// Spinwire::spinwire_sim.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "spinwire/clock.h"
#include "spinwire/config.h"
#include "spinwire/engine.h"
#include "spinwire/export.h"
#include "spinwire/status.h"

namespace spinwire {

/// Faults from one node to another. Probabilities are 0 (never) to 1 (always). Delays are 0 to 24
/// h, drawn evenly between minimum and maximum. By default there are no faults and no delays.
struct NetworkFaults {
  // Datagrams: remote calls and their replies.
  double drop = 0;                     ///< probability that a datagram is lost
  double duplicate = 0;                ///< probability that a datagram arrives twice
  double reorder = 0;                  ///< probability that later datagrams overtake it
  std::uint32_t reorder_distance = 4;  ///< by up to this many; 1 … 65536
  Nanoseconds datagram_delay_min{0};   ///< shortest delay of a datagram
  Nanoseconds datagram_delay_max{0};   ///< longest delay of a datagram
  // Connections. Their messages stay in order.
  double not_ready = 0;  ///< probability that a message finds its receiver not ready
  std::uint32_t not_ready_in_a_row = 1;  ///< times; above queue_pair.rnr_retry the connection ends
  Nanoseconds message_delay_min{0};      ///< shortest delay of a connection's request
  Nanoseconds message_delay_max{0};      ///< longest delay of a connection's request
  /// Probability that a packet (up to the path MTU), or its acknowledgement, is lost. That packet
  /// and those behind it are sent again after 10 us, or after queue_pair.ack_timeout. The
  /// connection ends when queue_pair.retry_count attempts in a row are lost.
  double packet_loss = 0;
  // The control port, which makes connections and sessions.
  Nanoseconds control_delay_min{0};  ///< shortest delay of bytes of a handshake
  Nanoseconds control_delay_max{0};  ///< longest delay of bytes of a handshake
};

/// How time passes in a simulation.
struct SimulationOptions {
  /// Virtual time that a poll takes, evenly between minimum and maximum. 0 … 1 ms, not both 0.
  Nanoseconds poll_time_min{50};
  Nanoseconds poll_time_max{500};  ///< longest time of a poll
  double skip_probability = 0.05;  ///< probability that a step skips a node; 0 … 0.99
};

/// Number of a node, from 0 in the order of add().
using NodeId = std::uint32_t;

/// What a port of a node's device does to connections. Datagrams pass in each state.
enum class PortState : std::uint8_t {
  up,     ///< carries them
  down,   ///< its link is down, which the device reports
  silent  ///< its link is up, but nothing passes, as behind a switch that has failed
};

/// Counts since the simulation began, over all nodes and their incarnations.
struct SimulationStats {
  std::uint64_t steps = 0;             ///< calls of step()
  std::uint64_t polls = 0;             ///< calls of Engine::poll()
  std::uint64_t jumps = 0;             ///< jumps over time without events
  std::uint64_t kills = 0;             ///< nodes killed
  std::uint64_t restarts = 0;          ///< nodes started again
  std::uint64_t dropped = 0;           ///< datagrams
  std::uint64_t duplicated = 0;        ///< datagrams
  std::uint64_t reordered = 0;         ///< datagrams overtaken by later ones
  std::uint64_t delayed = 0;           ///< datagrams
  std::uint64_t cut = 0;               ///< datagrams lost on cut links
  std::uint64_t overflowed = 0;        ///< datagrams lost because a node held more than 1024
  std::uint64_t not_ready = 0;         ///< messages whose receiver was not ready
  std::uint64_t delayed_requests = 0;  ///< delayed requests of connections
  std::uint64_t unanswered = 0;        ///< attempts of connections' requests on cut links
  std::uint64_t failed = 0;            ///< requests failed by fail_request()
  // Packets of connections. A lost packet and those behind it are sent again.
  std::uint64_t packets_lost = 0;           ///< by NetworkFaults::packet_loss
  std::uint64_t packets_retransmitted = 0;  ///< sent again after a loss
  // Of sleep_when_idle().
  std::uint64_t sleeps = 0;   ///< times that a node slept
  std::uint64_t wakeups = 0;  ///< sleeps that ended because Engine::fd() was readable
  /// Sleeps in which something came, and Engine::fd() did not become readable, or that outlasted a
  /// timer: defects of the library.
  std::uint64_t missed_wakeups = 0;
};

/// A simulation. It belongs to the thread that made it; a thread has one at a time. The thread
/// keeps the memory of up to 32 dead nodes, zeroed, for later nodes and simulations.
class SPINWIRE_API Simulation {
 public:
  /// Errors: invalid_argument (names the option), in_use (this thread has a simulation), no_memory.
  [[nodiscard]] static Result<Simulation> create(std::uint64_t seed,
                                                 const SimulationOptions& options = {});
  Simulation(Simulation&&) noexcept;
  Simulation& operator=(Simulation&&) noexcept;
  /// Kills all nodes; no callback runs.
  ~Simulation();

  /// A configuration with small pools and queues, with which nodes start within a millisecond.
  /// Change it as needed.
  static Config config();

  // Nodes.
  /// Adds a node with an engine on softverbs. The node's addresses exist only in the simulation.
  /// Errors: invalid_argument (another device, or hugepages are required), limit (1024 nodes);
  /// those of Engine::open().
  [[nodiscard]] Result<NodeId> add(const Config& config);
  /// Adds a node on the host of another: they share addresses, cuts and faults of links, and one
  /// can take a listener of the other over (Listener::release(), Engine::adopt_listener()). Errors:
  /// those of add(); invalid_argument (no such node).
  [[nodiscard]] Result<NodeId> add_beside(NodeId neighbour, const Config& config);
  /// Number of nodes.
  [[nodiscard]] std::uint32_t size() const noexcept;
  /// Whether the node lives.
  [[nodiscard]] bool alive(NodeId node) const noexcept;
  /// How often the node has started: 1, and one more with each restart(). Also from callbacks.
  [[nodiscard]] std::uint32_t incarnation(NodeId node) const noexcept;
  /// The node's engine; an empty one if the node is dead. Only the simulation calls its poll(). The
  /// reference stays valid. Also from callbacks.
  [[nodiscard]] Engine& engine(NodeId node) noexcept;
  /// The node's address, which all of its incarnations share, for Engine::listen(), connect() and
  /// open_session(). A node of add_beside() has its neighbour's. Also from callbacks.
  [[nodiscard]] static std::string address(NodeId node, std::uint16_t port = 7000);

  /// Kills the node's process: it sends nothing more, and its memory is freed, except buffers that
  /// the test holds. Its handles answer not_connected. Peers notice as they do in production: the
  /// device reports a dead process after about a millisecond, and datagrams report nothing. Also
  /// from callbacks. In the node's own callback, unsent data is lost and alive() is false at once,
  /// but the engine ends after the poll, which may run further callbacks. Errors: invalid_argument
  /// (no such node, or dead).
  [[nodiscard]] Result<void> kill(NodeId node);
  /// Starts a dead node again: a new engine with the old configuration and address. Errors:
  /// invalid_argument (no such node, or alive); those of Engine::open().
  [[nodiscard]] Result<void> restart(NodeId node);
  /// Does not poll the node for `how_long`, as if its process were stopped. Also from callbacks.
  /// Errors: invalid_argument (no such node, or longer than an hour).
  [[nodiscard]] Result<void> pause(NodeId node, Nanoseconds how_long);
  /// Lets the node sleep after this many polls in a row without an event, by Engine::arm(); 0:
  /// never, as without this call. It is polled again when Engine::fd() is readable and after
  /// Engine::next_deadline(). An action of at() that starts something on the node's engine calls
  /// Engine::wake(), too. Also for later incarnations. Errors: invalid_argument (no such node).
  [[nodiscard]] Result<void> sleep_when_idle(NodeId node, std::uint32_t polls);

  // The network. Settings also hold for later incarnations, and for all nodes of a host.
  /// Sets the faults between all nodes, except pairs with their own. Errors: invalid_argument
  /// (names the field).
  [[nodiscard]] Result<void> set_faults(const NetworkFaults& faults);
  /// Sets the faults from one node to another. Errors: invalid_argument (names the field or node).
  [[nodiscard]] Result<void> set_faults(NodeId from, NodeId to, const NetworkFaults& faults);
  /// Cuts or heals the link between two nodes. On a cut link datagrams are lost, connections retry
  /// until they fail, and handshakes wait. Errors: invalid_argument (no such node, or on one host).
  [[nodiscard]] Result<void> cut(NodeId a, NodeId b);
  /// Heals the link between two nodes. Errors: invalid_argument (no such node, or on one host).
  [[nodiscard]] Result<void> heal(NodeId a, NodeId b);
  /// Cuts all links of a node. Errors: invalid_argument (no such node).
  [[nodiscard]] Result<void> isolate(NodeId node);
  /// Heals all links. Errors: no_memory.
  [[nodiscard]] Result<void> heal();
  /// Sets the state of a port of each device on the node's host, 1 or 2. An engine uses port 1,
  /// unless ConnectOptions::local_paths or SessionOptions::local_paths name others. A node starts
  /// before its ports get their states. Errors: invalid_argument (no such node or port).
  [[nodiscard]] Result<void> set_port(NodeId node, std::uint8_t port, PortState state);
  /// Makes the n-th work request that the node posts from now on (counted from 1) fail at its
  /// device: its connection ends, or the datagram is lost. Errors: invalid_argument (dead, or n is
  /// 0).
  [[nodiscard]] Result<void> fail_request(NodeId node, std::uint64_t n);

  // Time.
  /// Virtual time since the simulation began. Also from callbacks.
  [[nodiscard]] Nanoseconds now() const noexcept;
  /// Polls each node once, in an order that the seed determines, and advances the time by the
  /// duration of the polls. Without work, advances to the next event. Errors: reentrant (inside a
  /// callback), wrong_thread.
  Status step();
  /// Steps until done() answers true. False if `limit` of virtual time passed first.
  template <typename Done>
  [[nodiscard]] bool run_until(Done&& done, Nanoseconds limit) {
    const Nanoseconds end = now() + limit;
    while (!done()) {
      if (now() >= end || step() != Status::ok) return false;
    }
    return true;
  }
  /// Runs for so long in virtual time.
  void run_for(Nanoseconds time) {
    (void)run_until([] { return false; }, time);
  }
  /// Runs `what` at that time, between polls; at equal times, in the order of the calls. `what` may
  /// call everything but step(). Also from callbacks. An exception that leaves `what` leaves the
  /// step() that ran it. The next step() goes on with what was due behind it.
  void at(Nanoseconds when, std::function<void()> what);

  // Chance and the trace. Also from callbacks.
  /// A number from 0 to `bound` - 1; 0 for 0. Does not change the rest of the run.
  std::uint64_t random(std::uint64_t bound) noexcept;
  /// True with this probability.
  [[nodiscard]] bool chance(double probability) noexcept;
  /// Adds a value to the trace. Do not add values that differ between processes, such as addresses.
  void note(std::uint64_t value) noexcept;
  /// Adds a text to the trace.
  void note(std::string_view text) noexcept;
  /// Hash of the run: of all notes, of every event of every poll with its time, and of the engines'
  /// counters. Equal runs have equal hashes.
  [[nodiscard]] std::uint64_t trace_hash() const noexcept;

  /// Audits all living nodes (Engine::audit()), and checks that each datagram receive is accounted
  /// for. Errors: those of Engine::audit(), with the node's number.
  [[nodiscard]] Result<void> audit() const;
  /// Counts since the simulation began.
  [[nodiscard]] SimulationStats stats() const noexcept;

 private:
  struct State;
  friend struct detail::Internals;
  explicit Simulation(std::unique_ptr<State> state) noexcept;
  std::unique_ptr<State> state_;
};

}  // namespace spinwire
