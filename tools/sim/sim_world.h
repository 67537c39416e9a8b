// Internals of the simulated workload: its objects and their accounts.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <deque>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "sim/sim_workload.h"
#include "spinwire/spinwire.h"

namespace spinwire::tools {

using namespace std::chrono_literals;

enum SimMethod : Method {
  kSimTiny = 1,  ///< too short to carry the call's number; echoes the bytes
  kSimEcho,
  kSimLater,   ///< answered after a while, or never
  kSimNested,  ///< replies after the server's own call to another node
  kSimRefuse,
  kSimSilent,    ///< the handler does not reply
  kSimTooLong,   ///< the handler first tries a reply that is too long
  kSimUnserved,  ///< has no handler
};

/// A session or connection, and what may have disturbed it.
struct SimPath {
  NodeId from = 0;
  NodeId to = 0;
  std::uint32_t incarnation = 0;     ///< of the opening node
  std::uint32_t to_incarnation = 0;  ///< of the other node, when it was opened
  bool ready = false;
  bool over = false;      ///< on_closed has run, or the opening node has died
  bool closing = false;   ///< by its own end
  bool troubled = false;  ///< an end was dead or the link between them cut
};

struct SimSession : SimPath {
  bool shaken = false;     ///< its connection for long calls may have been closed
  bool connected = false;  ///< all calls use a connection: an end has no datagrams
  bool reconnects = false;
  bool waits = false;        ///< its calls wait until it is ready
  bool interrupted = false;  ///< and not ready since
  Session handle;
};

struct SimLink : SimPath {
  Connection handle;
  std::uint64_t sent = 0;
  std::uint64_t delivered = 0;
};

struct SimCall {
  std::uint32_t session = 0;
  Method method = 0;
  std::uint32_t size = 0;
  std::uint32_t reply_size = 0;
  Nanoseconds begun{0};
  Nanoseconds deadline{0};  ///< absolute
  CallId name;
  bool accepted = false;
  bool has_long_timeout = false;  ///< the timeout is long: it misses its deadline only in trouble
  bool forgotten = false;         ///< its handler will not reply
  bool cancelling = false;        ///< cancel() was called
  bool is_long = false;           ///< longer than a datagram, or with memory for the reply
  BufferSlice into;               ///< the memory for the reply
  bool orphan = false;            ///< its caller has died
  std::uint64_t asked_for = 0;    ///< for a handler's own call: the call that it serves
  std::uint32_t ended = 0;
  std::uint32_t runs = 0;
  Status status = Status::ok;
};

struct SimMessage {
  std::uint32_t link = 0;
  std::uint64_t place = 0;  ///< position among the messages of its connection, from 1
  std::uint32_t size = 0;
  std::uint32_t ended = 0;
  std::uint32_t delivered = 0;
  Status status = Status::ok;
};

/// Kept bytes, which must be unchanged when they are dropped.
struct SimKept {
  BufferSlice slice;
  std::uint64_t number;
  bool of_reply;
};

struct SimActor {
  Listener listener;
  std::vector<std::uint32_t> sessions;  ///< opened here; some may be over
  std::vector<std::uint32_t> links;
  std::deque<SimKept> kept;
  bool dies_in_handler = false;
  bool shaky = false;     ///< a work request of its device will fail
  bool connects = false;  ///< its calls use connections only
};

/// One run. sim_workload.cc drives it, sim_calls.cc calls and serves, sim_messages.cc sends,
/// sim_trouble.cc causes faults.
class SimWorld {
 public:
  SimWorld(Simulation simulation, const SimWorkload& workload);
  SimOutcome run();

 private:
  /// The bytes of call or message `number`, 256 at a time.
  static std::span<const std::byte, 256> piece_of(std::uint64_t number, std::size_t at,
                                                  bool of_reply) noexcept;
  static void fill(std::span<std::byte> bytes, std::uint64_t number, bool of_reply);
  static bool holds(std::span<const std::byte> bytes, std::uint64_t number, bool of_reply);

  template <typename... Args>
  void fail(fmt::format_string<Args...> format, Args&&... args) {
    if (outcome_.failures.size() >= 5) return;
    outcome_.failures.push_back(fmt::format("at {} ns: {}", sim_.now().count(),
                                            fmt::format(format, std::forward<Args>(args)...)));
  }
  [[nodiscard]] bool failed() const noexcept { return !outcome_.failures.empty(); }
  void count(SimEvent event) noexcept { ++outcome_.happened[static_cast<std::size_t>(event)]; }
  [[nodiscard]] bool happened(SimEvent event) const noexcept {
    return outcome_.happened[static_cast<std::size_t>(event)] != 0;
  }
  [[nodiscard]] Nanoseconds below(Nanoseconds most) {
    return Nanoseconds(
        static_cast<std::int64_t>(sim_.random(static_cast<std::uint64_t>(most.count()) + 1)));
  }
  [[nodiscard]] bool is_incarnation(NodeId node, std::uint32_t incarnation) const {
    return sim_.alive(node) && sim_.incarnation(node) == incarnation;
  }

  // The run.
  void build();
  void act(NodeId node, std::uint32_t incarnation);
  void plan_act(NodeId node);
  void start_actor(NodeId node);
  void copy_statistics();
  bool goes_on();
  bool settle();
  bool probe();
  bool close_all();
  void audit();
  void judge();

  // Calls.
  void serve(NodeId node);
  void open_session(NodeId from, NodeId to);
  void on_session_ready(std::uint32_t session);
  void on_session_interrupted(std::uint32_t session, const Error& why);
  void on_session_closed(std::uint32_t session, const Error& why);
  std::uint32_t pick_size(std::size_t longest);
  bool begin_call(std::uint32_t session, Method method, Nanoseconds timeout,
                  const PendingCall* outer = nullptr, std::uint64_t asked_for = 0);
  void choose_call(std::uint32_t session);
  Status post_call(SimSession& s, std::uint64_t number, const ReplyCallback& done);
  void on_reply(std::uint64_t number, Reply& reply);
  void on_nested(std::uint64_t inner, const PendingCall& outer);
  void make_long(SimCall& c, NodeId from);
  void judge_reply(const SimCall& c, std::uint64_t number, Reply& reply);
  [[nodiscard]] bool is_shaken(const SimSession& s) const;
  [[nodiscard]] bool is_connected(const SimCall& c) const;
  [[nodiscard]] bool excused(const SimCall& c) const;
  void on_request(NodeId node, Request& request);
  void answer(std::uint64_t number, NodeId node, Request& request);
  void answer_later(std::uint64_t number, NodeId node, const PendingCall& call);
  Status give_reply(std::uint64_t number, NodeId node, const PendingCall& call);
  void check_answered(std::uint64_t number, Status status);
  void cancel_one(NodeId node);
  void close_session(std::uint32_t session);
  void keep(NodeId node, BufferSlice slice, std::uint64_t number, bool of_reply);
  void drop_kept(SimActor& actor, std::size_t leave);

  // Messages.
  void connect(NodeId from, NodeId to);
  void listen(NodeId node);
  void send_message(std::uint32_t link);
  void on_message(NodeId node, Message& message);
  void on_sent(std::uint64_t number, const Completion& completion);
  void on_link_closed(std::uint32_t link, const Error& why);

  // Trouble.
  void choose_faults();
  [[nodiscard]] NodeId any_node();
  NetworkFaults draw_faults(double worst, bool of_each);
  void plan_trouble();
  void plan_kill(Nanoseconds within);
  void plan_cut(Nanoseconds within);
  void plan_pause(Nanoseconds within);
  void plan_failure(Nanoseconds within);
  void hurry();
  void kill(NodeId node);
  void restart_later(NodeId node);
  void cut(NodeId a, NodeId b);
  void heal(NodeId a, NodeId b);
  void end_trouble();
  void mark(NodeId a, NodeId b);
  void mark(NodeId node);
  [[nodiscard]] bool in_trouble(NodeId a, NodeId b) const;

  const SimWorkload workload_;
  SimOutcome outcome_;
  // Declared before the simulation, as they must outlive its nodes.
  std::deque<SimSession> sessions_;
  std::deque<SimLink> links_;
  std::deque<SimCall> calls_;
  std::deque<SimMessage> messages_;
  std::deque<SimActor> actors_;
  std::set<std::pair<NodeId, NodeId>> cuts_;
  std::vector<std::uint64_t> open_calls_;  ///< accepted; some may have ended since
  Simulation sim_;
  Nanoseconds pace_{0};   ///< average time between two acts of a node
  Nanoseconds slack_{0};  ///< tolerance of deadlines
  double worst_loss_ = 0;
  double long_calls_ = 0;    ///< probability of a long call
  std::uint64_t goal_ = 0;   ///< calls to begin before the run ends
  bool winding_up_ = false;  ///< no new calls but probes
  bool probing_ = false;
  std::uint64_t tiny_begun_ = 0;
  std::uint64_t tiny_runs_ = 0;
  std::uint64_t unended_ = 0;  ///< calls that have not ended
  std::uint64_t unsent_ = 0;   ///< messages that have not ended
};

}  // namespace spinwire::tools
