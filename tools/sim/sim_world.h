// Internals of the simulated workload: its objects and their accounts.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "sim/sim_workload.h"
#include "spinwire/spinwire.h"

namespace spinwire::tools {

using namespace std::chrono_literals;

inline constexpr Nanoseconds kNeverGood = Nanoseconds::max();
inline constexpr Nanoseconds kLongestRetryAfter = 30ms;  ///< of nodes that drain
/// Until those that were asked to wait come back: a random part is added.
inline constexpr Nanoseconds kLongestHoldOff = kLongestRetryAfter * 5 / 4;

inline constexpr std::array<PortState, 2> kPortsUp{PortState::up, PortState::up};

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
  NodeId from = 0;                     ///< a node
  std::vector<LocalPath> local_paths;  ///< empty: the engine's own port
  /// Hosts, in the order in which they are tried, and until when they asked us to wait; 0: they did
  /// not.
  std::vector<std::pair<NodeId, Nanoseconds>> targets;
  std::size_t place = 0;          ///< of the target that is connected, or was last
  std::uint32_t incarnation = 0;  ///< of the opening node
  Nanoseconds down_since{0};      ///< unless it is ready
  Nanoseconds timeout{0};         ///< of each attempt
  std::uint32_t port = 0;         ///< local; the last one with which it was ready
  bool reconnects = false;
  bool interrupted = false;  ///< and not ready since
  bool leaving = false;      ///< an end drains, or did
  bool ready = false;
  bool over = false;      ///< on_closed has run, or the opening node has died
  bool closing = false;   ///< by its own end
  bool troubled = false;  ///< an end was dead or the link between them cut

  /// The host of the other end.
  [[nodiscard]] NodeId to() const noexcept { return targets[place].first; }
  [[nodiscard]] bool may_reach(NodeId host) const noexcept {
    return std::any_of(targets.begin(), targets.end(),
                       [host](const auto& target) { return target.first == host; });
  }
};

struct SimSession : SimPath {
  bool shaken = false;     ///< its connection for long calls may have been closed
  bool connected = false;  ///< all calls use a connection: an end has no datagrams
  bool waits = false;      ///< its calls wait until it is ready
  /// Its server has given its listener away. The successor refuses its connection for long calls
  /// with a goodbye, and the session ends in order.
  bool moved = false;
  Session handle;
};

struct SimLink : SimPath {
  Connection handle;
  std::uint32_t epoch = 0;  ///< how often it was ready
  std::uint64_t sent = 0;
  std::vector<std::uint64_t> delivered;  ///< messages, of each epoch
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
  std::uint32_t epoch = 0;  ///< SimLink::epoch
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

/// A timer of Engine::after() or Engine::every().
struct SimTimer {
  NodeId node = 0;
  std::uint32_t incarnation = 0;
  Nanoseconds due{0};       ///< of the next run
  Nanoseconds interval{0};  ///< 0: it runs once
  Timer handle;
  std::uint32_t runs = 0;
  bool is_over = false;       ///< no further run may follow
  bool is_cancelled = false;  ///< for that reason
};

/// How far a lease of the workload has come.
enum class SimLeaseStage : std::uint8_t {
  requested,
  held,
  left,  ///< by its holder: detached
  over   ///< for its holder
};

/// Memory that a connection's client has leased from the server.
struct SimLease {
  std::uint32_t link = 0;
  std::uint32_t epoch = 0;  ///< SimLink::epoch
  std::uint32_t bytes = 0;
  Nanoseconds duration{0};
  SimLeaseStage stage = SimLeaseStage::requested;
  bool is_calm = false;     ///< begun when all trouble was over: nothing excuses its end
  bool is_renewed = false;  ///< automatically, now
  bool gives_back = false;  ///< give_back() was called
  bool was_held = false;    ///< its owner has granted it
  bool is_counted = false;  ///< in SimEvent::renewals
  Nanoseconds begun{0};
  std::uint32_t denial = 0;         ///< the code with which the owner refuses it; 0: it does not
  Nanoseconds ends_by{kNeverGood};  ///< the owner has its memory again by then
  RemoteMemory memory;
  RemoteRegion detached;  ///< with its key
  // The owner's.
  NodeId owner = 0;
  std::uint32_t owner_incarnation = 0;  ///< 0: not granted
  std::uint32_t returns = 0;
};

/// An operation on leased memory.
struct SimAccess {
  std::uint32_t lease = 0;
  bool is_late = false;  ///< begun when the owner had its memory again
  bool ended = false;
};

struct SimActor {
  Listener listener;
  std::vector<std::uint32_t> sessions;  ///< opened here; some may be over
  std::vector<std::uint32_t> links;
  std::deque<SimKept> kept;
  std::vector<std::uint32_t> timers;  ///< started here; some may be over
  NodeId host = 0;
  bool dies_in_handler = false;
  bool is_retired = false;  ///< a successor has its listener, or gets it
  bool is_drained = false;
  Nanoseconds drained_by{0};           ///< the drain ends until then; 0: there is none
  Nanoseconds cut_off_at{kNeverGood};  ///< the drain is cut off then
  std::uint32_t served_limit = 0;      ///< of a node that drains: most sessions that it may serve
};

/// Where nodes listen. Nodes take turns there when listeners are handed over.
struct SimHost {
  Config config;
  NodeId current = 0;           ///< the node that listens
  std::optional<NodeId> spare;  ///< a former one, dead
  int listener = -1;            ///< the socket, while it is handed over
  Nanoseconds good_since{0};    ///< somebody accepts since; kNeverGood: nobody does
  Nanoseconds paused_until{0};
  Nanoseconds left_at = Nanoseconds::min() / 2;      ///< when a node that drained ended
  Nanoseconds released_at = Nanoseconds::min() / 2;  ///< when a node last gave its listener away
  bool has_drained = false;                          ///< said goodbye
  bool has_moved = false;                            ///< a node has given its listener away
  bool has_no_listener = false;                      ///< its node has closed its listener for now
  bool shaky = false;                                ///< a work request of its device will fail
  bool connects = false;                             ///< its calls use connections only
  int key_file = -1;                                 ///< descriptor
  std::uint32_t key_stage = 0;                       ///< of a rotation
  std::array<PortState, 2> ports = kPortsUp;         ///< of its devices
  std::array<Nanoseconds, 2> ports_since{};          ///< when they got these states
};

/// One run. sim_workload.cc drives it, sim_sessions.cc opens sessions, sim_calls.cc calls and
/// serves, sim_messages.cc sends, sim_trouble.cc causes faults, sim_departures.cc drains and hands
/// over, sim_paths.cc judges reconnecting, sim_local_paths.cc fails local ports, sim_timers.cc has
/// timers, sim_leases.cc leases, and sim_keys.cc keys and strangers.
class SimWorld {
 public:
  SimWorld(Simulation simulation, std::uint64_t seed, const SimWorkload& workload);
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
  void choose_features();
  [[nodiscard]] bool has_by_seed(std::uint64_t feature, std::uint64_t percent) const noexcept;
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
  void open_later(const SimSession& s);
  void on_session_ready(std::uint32_t session);
  [[nodiscard]] static bool is_told_to_move(const SimSession& s, const Error& why);
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

  // Paths: sessions and connections.
  [[nodiscard]] NodeId home(NodeId node) const { return actors_[node].host; }
  NodeId other_host(NodeId host);
  /// Chooses the addresses.
  void choose_targets(SimPath& p, NodeId from, NodeId to);
  [[nodiscard]] static std::vector<std::string> alternatives(const SimPath& p);
  void on_path_ready(SimPath& p, const char* kind, std::uint32_t index, std::string_view peer);
  void on_path_down(SimPath& p, const char* kind, std::uint32_t index, const Error& why);
  [[nodiscard]] bool is_cut_off(const SimPath& p) const;
  /// Whether the end that the error reports has a reason that is not the library's.
  [[nodiscard]] bool has_reason(const SimPath& p, const Error& why) const;
  /// A path has ended with this error: if it reconnects, only for a reason that does not pass.
  void check_end(const SimPath& p, const char* kind, std::uint32_t index, const Error& why);
  [[nodiscard]] Nanoseconds reachable_since(NodeId from, const SimPath& p) const;
  [[nodiscard]] Nanoseconds longest_absence(const SimPath& p) const;
  [[nodiscard]] bool is_away(const SimPath& p) const;
  void check_reconnect(const SimPath& p, const char* kind, std::size_t index);
  void watch_reconnects();
  bool await_reconnects();

  // Local paths.
  void choose_local_paths(SimPath& p);
  [[nodiscard]] PortState port_state(NodeId host, std::uint32_t port) const {
    return hosts_[host].ports[port - 1];
  }
  [[nodiscard]] bool has_own_ports(const SimPath& p) const { return !p.local_paths.empty(); }
  [[nodiscard]] bool is_every_link_down(const SimPath& p) const;
  /// Since when connections reach a peer of the host through a port there; kNeverGood: they do not.
  [[nodiscard]] Nanoseconds port_good_since(NodeId host, const SimPath& p) const;
  [[nodiscard]] Nanoseconds peers_port_good_since(NodeId host) const;
  void set_port(NodeId host, std::uint8_t port, PortState state);
  void mark_port(NodeId host, std::uint8_t port);
  std::pair<NodeId, std::uint8_t> pick_port();
  void plan_port(Nanoseconds within);
  void restore_ports();
  void note_port(SimPath& p, const char* kind, std::uint32_t index, const LocalPath& path);
  void check_port(const SimPath& p, const char* kind, std::size_t index, std::uint32_t port);
  void audit_local_paths();

  // Timers.
  void start_timer(NodeId node, Nanoseconds delay, bool repeats);
  void start_timers(NodeId node);
  void act_on_timers(NodeId node);
  void on_timer(std::uint32_t timer, std::uint32_t runs);
  void cancel_timer(std::uint32_t timer);
  [[nodiscard]] Nanoseconds latest_run(const SimTimer& t) const;
  void end_timers(NodeId node);
  void audit_timers();

  // Leases.
  void act_on_leases(std::uint32_t link);
  bool request_lease(std::uint32_t link, bool is_calm);
  void on_memory_request(NodeId node, MemoryRequest& request);
  void on_lease_reply(std::uint32_t lease, LeaseReply& reply);
  void renew_by_itself(std::uint32_t lease);
  void on_renewal_end(std::uint32_t lease, Status status);
  void end_lease(std::uint32_t lease, std::uint64_t how);
  void use_lease(std::uint32_t lease);
  void use_key_late(std::uint32_t lease);
  void on_access_end(std::uint64_t access, Status status);
  void on_returned(NodeId node, const Returned& returned);
  void judge_return(const SimLease& lease, std::uint32_t index, ReturnedBy how);
  void audit_held(SimLease& lease, std::uint32_t index);
  [[nodiscard]] bool is_link_up(const SimLease& lease) const;
  [[nodiscard]] bool has_owner(const SimLease& lease) const {
    return is_incarnation(lease.owner, lease.owner_incarnation);
  }
  /// Whether the lease's connection may end without a defect.
  [[nodiscard]] bool may_link_end(const SimLease& lease) const;
  [[nodiscard]] bool is_excused(const SimLease& lease) const;
  [[nodiscard]] Nanoseconds longest_retry() const;
  void orphan_leases(NodeId node);
  void audit_leases();
  bool prove_leases();
  void judge_leases();

  // Departures.
  void add_actor(NodeId host);
  /// Wakes a node for what was started on its engine between polls.
  void rouse(NodeId node) { (void)sim_.engine(node).wake(); }
  /// Called in a callback: the node must be polled again before it sleeps.
  void rouse_inside(NodeId node);
  [[nodiscard]] bool is_leaving(NodeId node) const { return actors_[node].drained_by.count() != 0; }
  /// Takes the actor for a node that starts.
  void renew(SimActor& actor);
  /// Whether a node of the host drains.
  [[nodiscard]] bool has_leaving(NodeId host) const;
  /// Whether a node that has given its listener away lives on the host.
  [[nodiscard]] bool has_former(NodeId host) const;
  [[nodiscard]] bool is_everyone_back() const;
  void plan_departures();
  void drain(NodeId node);
  void on_drained(NodeId node, const DrainReport& report);
  void leave(NodeId node, std::uint32_t incarnation);
  void hand_over(NodeId host);
  void start_successor(NodeId host);
  void plan_lapse(NodeId host, Nanoseconds within);
  void lapse(NodeId host);
  void audit_departures();
  void on_peer_request(NodeId node, PeerRequest& request);
  void close_descriptors() noexcept;

  // Keys.
  int make_key_file(std::string_view text);
  std::string add_key_file(SimHost& host);
  void rotate_keys(NodeId host);
  void add_strangers(Config config);
  void plan_stranger(NodeId stranger);
  void meet_stranger(NodeId from, const std::string& address);
  void on_stranger_refused(NodeId from, const Error& why);

  // Messages.
  void connect(NodeId from, NodeId to);
  void connect_later(const SimLink& l);
  void on_link_ready(std::uint32_t link);
  void on_link_interrupted(std::uint32_t link, const Error& why);
  void listen(NodeId node);
  void send_message(std::uint32_t link);
  void on_message(NodeId node, Message& message);
  void on_sent(std::uint64_t number, const Completion& completion);
  void on_link_closed(std::uint32_t link, const Error& why);

  // Trouble.
  void choose_faults();
  [[nodiscard]] NodeId any_host();
  NetworkFaults draw_faults(double worst, bool of_each);
  void plan_trouble();
  void plan_kill(Nanoseconds within);
  void plan_cut(Nanoseconds within);
  void plan_pause(Nanoseconds within);
  void plan_failure(Nanoseconds within);
  void hurry();
  /// It starts again after `down`, if that is given.
  void kill(NodeId node, std::optional<Nanoseconds> down = {});
  void end_actor(NodeId node);
  void restart_later(NodeId node);
  void cut(NodeId a, NodeId b);
  void heal(NodeId a, NodeId b);
  void end_trouble();
  void mark(NodeId a, NodeId b);
  void mark(NodeId host);
  [[nodiscard]] bool in_trouble(const SimPath& p) const;

  const SimWorkload workload_;
  const std::uint64_t seed_;
  SimOutcome outcome_;
  // Declared before the simulation, as they must outlive its nodes.
  std::deque<SimSession> sessions_;
  std::deque<SimLink> links_;
  std::deque<SimCall> calls_;
  std::deque<SimMessage> messages_;
  std::deque<SimTimer> timers_;
  std::deque<SimLease> leases_;  ///< a lease's tag is its index and 1
  std::deque<SimAccess> accesses_;
  std::deque<SimActor> actors_;  ///< one for each node
  std::deque<SimHost> hosts_;    ///< of the nodes that belong together: neither of strangers
  std::set<std::pair<NodeId, NodeId>> cuts_;                 ///< of hosts
  std::map<std::pair<NodeId, NodeId>, Nanoseconds> healed_;  ///< when cuts were last healed
  std::vector<std::uint64_t> open_calls_;  ///< accepted; some may have ended since
  Simulation sim_;
  Nanoseconds pace_{0};   ///< average time between two acts of a node
  Nanoseconds slack_{0};  ///< tolerance of deadlines
  double worst_loss_ = 0;
  double long_calls_ = 0;    ///< probability of a long call
  std::uint64_t goal_ = 0;   ///< calls to begin before the run ends
  bool winding_up_ = false;  ///< no new calls but probes
  bool probing_ = false;
  bool is_closing_ = false;  ///< everything is being closed
  bool has_keys_ = false;
  bool has_drains_ = false;
  bool has_handovers_ = false;
  bool has_failovers_ = false;
  bool has_lapses_ = false;  ///< listeners go away and come back
  bool has_sleepers_ = false;
  bool has_local_paths_ = false;  ///< ports fail, and sessions and connections name theirs
  bool has_timers_ = false;
  bool has_leases_ = false;
  std::uint32_t first_key_stage_ = 0;
  std::vector<int> key_files_;  ///< descriptors
  std::uint64_t tiny_begun_ = 0;
  std::uint64_t tiny_runs_ = 0;
  std::uint64_t unended_ = 0;  ///< calls that have not ended
  std::uint64_t unsent_ = 0;   ///< messages, and accesses to leases, that have not ended
};

}  // namespace spinwire::tools
