// Whole systems in one thread, for tests: many engines on the embedded device, a network between
// them that loses, repeats, delays and cuts as it is told, time that is virtual, and nodes that die
// and come back. All chance comes from one number: the same seed, program and calls give the same
// run, bit by bit, so that a failure found by trying seeds happens again for its seed.
//
// Everything here is set-up code. Call it from the thread that made the simulation, and not from
// inside callbacks unless the function allows it. tools/examples/sim_test.cc shows an example. The
// simulator is a library of its own: link with `pkg-config --libs spinwire-sim`, or with the CMake
// target Spinwire::spinwire_sim.
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

/// What may happen to what one node sends to another. Probabilities are 0 (never) to 1 (always),
/// delays 0 to 24 h, drawn evenly between both ends, for each on its own. The default is a network
/// without faults, in which everything takes no time.
struct NetworkFaults {
  // Datagrams: remote calls and their replies.
  double drop = 0;                     ///< probability of being lost
  double duplicate = 0;                ///< of arriving twice
  double reorder = 0;                  ///< of being overtaken by later ones
  std::uint32_t reorder_distance = 4;  ///< by 1 to so many; 1 … 65536
  Nanoseconds datagram_delay_min{0};
  Nanoseconds datagram_delay_max{0};
  // Connections, whose order is kept whatever happens.
  double not_ready = 0;  ///< probability that a message finds its receiver not ready
  std::uint32_t not_ready_in_a_row = 1;  ///< so many times; above queue_pair.rnr_retry it ends
  Nanoseconds message_delay_min{0};
  Nanoseconds message_delay_max{0};
  /// Probability that a packet of up to the path MTU is lost, of what is sent or of what answers
  /// it: it is sent again after a round trip of 10 us, or the time that queue_pair.ack_timeout
  /// says, with what follows it. When queue_pair.retry_count tries in a row are lost it ends.
  double packet_loss = 0;
  // The control port, by which connections and sessions are made.
  Nanoseconds control_delay_min{0};
  Nanoseconds control_delay_max{0};
};

struct SimulationOptions {
  /// Virtual time that a poll takes, evenly between both. 0 … 1 ms, and not both 0.
  Nanoseconds poll_time_min{50};
  Nanoseconds poll_time_max{500};
  double left_out = 0.05;  ///< probability that a step passes a node over; 0 … 0.99
};

/// One of a simulation's nodes; they are numbered from 0 in the order of add().
using NodeId = std::uint32_t;

/// Counted since the simulation began, all nodes and lives together.
struct SimulationStats {
  std::uint64_t steps = 0;
  std::uint64_t polls = 0;
  std::uint64_t jumps = 0;  ///< over time in which nothing was to be done
  std::uint64_t kills = 0;
  std::uint64_t restarts = 0;
  std::uint64_t dropped = 0;     ///< datagrams
  std::uint64_t duplicated = 0;  ///< datagrams
  std::uint64_t reordered = 0;   ///< datagrams, overtaken by one at least
  std::uint64_t delayed = 0;     ///< datagrams
  std::uint64_t cut = 0;         ///< datagrams lost on links that were cut
  std::uint64_t overflowed = 0;  ///< datagrams lost as more than 1024 of a node's were held
  std::uint64_t not_ready = 0;   ///< messages that found their receiver so
  std::uint64_t late = 0;        ///< requests of connections that were delayed
  std::uint64_t unanswered = 0;  ///< requests of connections on links that were cut, each try
  std::uint64_t failed = 0;      ///< by fail_request()
  /// Of connections; what is sent again is the lost ones and those behind them.
  std::uint64_t packets_lost = 0;
  std::uint64_t packets_resent = 0;
};

/// Belongs to the thread that made it; one at a time in a thread. The memory of nodes that are gone
/// is kept for the next ones of the thread, those of other simulations included: zeroed, and up to
/// 64 pieces, two a node.
class SPINWIRE_API Simulation {
 public:
  /// Errors: invalid_argument naming the option; in_use (this thread has one), no_memory.
  static Result<Simulation> create(std::uint64_t seed, const SimulationOptions& options = {});
  Simulation(Simulation&&) noexcept;
  Simulation& operator=(Simulation&&) noexcept;
  /// As if all nodes were killed: no callback runs.
  ~Simulation();

  /// A configuration with small pools and queues, with which nodes begin in less than a
  /// millisecond; long messages and windows included. To be changed as one likes.
  static Config config();

  // Nodes.
  /// One more node, with an engine on the embedded device. Its control port has addresses of the
  /// simulation's own, which are nobody else's to reach. Errors: invalid_argument (another device,
  /// or hugepages are required), limit (1024 nodes); those of Engine::open().
  Result<NodeId> add(const Config& config);
  [[nodiscard]] std::uint32_t size() const noexcept;
  [[nodiscard]] bool alive(NodeId node) const noexcept;
  /// How many lives it has begun, the present one included. From anywhere.
  [[nodiscard]] std::uint32_t life(NodeId node) const noexcept;
  /// Of a node that is alive; an empty one otherwise. Its poll() is the simulation's to call. The
  /// reference stays good, as does what it refers to until the node is killed. From anywhere.
  [[nodiscard]] Engine& engine(NodeId node) noexcept;
  /// The node's address with a port, for Engine::listen(), connect() and open_session(); the same
  /// in all of its lives. From anywhere.
  [[nodiscard]] static std::string address(NodeId node, std::uint16_t port = 7000);

  /// Its process dies: no callback of its runs any more, nothing more leaves it, and its memory is
  /// given back, but for buffers that the test still holds. All other handles of that engine, calls
  /// to be answered included, are void: not to be used, though they may be dropped. Its peers find
  /// out as they do: the device tells that a process is gone after about a millisecond, datagrams
  /// tell nothing. From inside callbacks, too: in those of the node itself, what it has not sent
  /// yet is lost and alive() is false at once, but its engine goes when its poll has returned, and
  /// further callbacks of that poll may run. Errors: invalid_argument (no such node, or dead
  /// already).
  Result<void> kill(NodeId node);
  /// It begins another life, with the configuration and address that it had: a new engine, which
  /// knows nothing of the old. Errors: invalid_argument (no such node, or alive); those of
  /// Engine::open().
  Result<void> restart(NodeId node);
  /// It is not polled for so long, as if its process were off the processor. From inside callbacks,
  /// too. Errors: invalid_argument (no such node, or longer than an hour).
  Result<void> pause(NodeId node, Nanoseconds how_long);

  // The network. What is set holds for later lives as well.
  /// For all ways but those that have faults of their own. Errors: invalid_argument naming the
  /// field, no_memory.
  Result<void> set_faults(const NetworkFaults& faults);
  /// For what `from` sends to `to` alone.
  Result<void> set_faults(NodeId from, NodeId to, const NetworkFaults& faults);
  /// Nothing passes between both any more, or again. Datagrams are lost, connections try again as
  /// long as they do, handshakes wait. Errors: invalid_argument (no such nodes, or one with
  /// itself).
  Result<void> cut(NodeId a, NodeId b);
  Result<void> heal(NodeId a, NodeId b);
  /// A node and all others.
  Result<void> isolate(NodeId node);
  /// All that was cut is healed.
  Result<void> heal();
  /// The n-th work request from now, counted from 1, that the node posts fails at its device: its
  /// connection ends, or if it was a datagram it is lost. Errors: invalid_argument (dead, or n is
  /// 0).
  Result<void> fail_request(NodeId node, std::uint64_t n);

  // Time.
  /// Since the simulation began. From anywhere.
  [[nodiscard]] Nanoseconds now() const noexcept;
  /// Polls each node once, in an order that the seed says, and lets as much time pass as that
  /// takes; when nothing is to be done, as much as there is until something is. Errors: reentrant
  /// (from inside a callback), wrong_thread.
  Status step();
  /// Steps until done() is true, which is asked before each; false if `limit` of virtual time went
  /// by first.
  template <typename Done>
  bool run_until(Done&& done, Nanoseconds limit) {
    const Nanoseconds end = now() + limit;
    while (!done()) {
      if (now() >= end || step() != Status::ok) return false;
    }
    return true;
  }
  void run_for(Nanoseconds time) {
    (void)run_until([] { return false; }, time);
  }
  /// Has `what` run at that time, between polls, in order of time and then of asking. It may call
  /// whatever may be called outside of callbacks, but step(). From anywhere.
  void at(Nanoseconds when, std::function<void()> what);

  // Chance, and what came of it. From anywhere.
  /// Evenly from 0 to `bound` - 1; 0 for 0. Drawing changes nothing else of the run.
  std::uint64_t random(std::uint64_t bound) noexcept;
  /// True with that probability.
  bool chance(double probability) noexcept;
  /// Puts what a test saw into the trace. What differs from process to process, such as addresses
  /// in memory or GIDs, does not belong there.
  void note(std::uint64_t value) noexcept;
  void note(std::string_view text) noexcept;
  /// Two runs with the same hash were the same: it comes from what was noted, from every event of
  /// every poll with its time, and from what engines counted.
  [[nodiscard]] std::uint64_t trace_hash() const noexcept;

  /// Engine::audit() of all nodes that are alive, and that each datagram receive is posted, waiting
  /// or taken. Errors: those, naming the node.
  [[nodiscard]] Result<void> audit() const;
  [[nodiscard]] SimulationStats stats() const noexcept;

 private:
  struct State;
  friend struct detail::Internals;
  explicit Simulation(std::unique_ptr<State> state) noexcept;
  std::unique_ptr<State> state_;
};

}  // namespace spinwire
