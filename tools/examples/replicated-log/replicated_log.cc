// A log on three nodes, which goes on while any one of them is away.
//
//   nodes=127.0.0.1:7101,127.0.0.1:7102,127.0.0.1:7103
//   for i in 0 1 2; do replicated-log --id $i --nodes $nodes --file /dev/shm/log.$i --new & done
//   log-client append --nodes $nodes --count 1000
//   log-client read 127.0.0.1:7102
//
// Only the first start of a node takes --new.
//
// One node leads. It appends what clients send to its own log, and writes it into the logs of the
// other nodes, by one-sided writes with a notice. Each node's log is memory that it leases to the
// leader. The lease is the node's vote, and its end is what keeps an old leader out:
//
//   - A candidate asks its peers for their logs, in an epoch that is newer than all it has seen.
//     A node leases its log for one epoch at a time, and never again for an older one.
//   - With the logs of a majority, its own included, the candidate leads. Before, it reads what its
//     own log lacks of the best log among them (the one with the newest epoch at its end, then the
//     longest). An old leader cannot write there any more: its lease has ended, by its time, its
//     connection or its release, and the device refuses later writes.
//   - The leader appends a record of its own. A record is committed when that one and the record
//     itself are on a majority. Only then is its client answered.
//   - A node whose log nobody leases any more becomes a candidate after a random time.
//
// What it promises: a record whose call was answered is at its index for ever, on a majority of the
// files, although nodes are restarted, killed, stopped and continued at any time. A record is
// appended once, however often its client repeats the call.
//
// A file also holds the epoch in which its node has last given its log. If one file is lost,
// nothing else is, as long as its node stays away until the two others have answered a record
// (log-client append --count 1): then both have all answered records, and the node may start with
// --new. Started with --new earlier, it may make a majority with a node that lacks answered
// records, and they are lost.
//
// What it does not: survive two lost files, or a power failure (the files are written by the kernel
// when it likes; on adapters they must be on tmpfs or persistent memory). A record whose call
// failed may have been appended. A read may miss the newest records. The log is not compacted, and
// the nodes are always the same three.
//
// Note that this program has no loop that connects, no queue of things to send, and no sleep: see
// Reconnect, on_writable, Idler and drain.
//
// CMake builds it, and so does this command. A copy of this folder of a clone needs `cp -rL`.
//
//   g++ -std=c++20 -O2 *.cc -o replicated-log $(pkg-config --cflags --libs spinwire fmt CLI11)
#include "replicated_log.h"

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "program.h"

namespace {

using namespace spinwire;        // NOLINT: a program of one file
using namespace replicated_log;  // NOLINT
using namespace std::chrono_literals;
using program::bytes_of;
using program::decode;
using program::fail;
using program::must;

constexpr Nanoseconds kTick = 20ms;
constexpr Nanoseconds kLease = 300ms;          // renewed at each tick
constexpr std::uint64_t kMostAtOnce = 16'384;  // records of one write
constexpr std::uint64_t kLeadersOwn = 4096;    // records that clients leave free

struct Options {
  std::uint32_t id = 0;
  std::vector<std::string> nodes;
  std::string file;
  std::string journal;
  bool is_new = false;
  std::uint64_t records = 1u << 20;  // that a new log has room for
};

/// A message between nodes.
struct Vote {
  /// A candidate asks for a log, and so does a leader that lacks the peer's.
  enum Kind : std::uint64_t { ask, ask_as_leader, grant, refuse } kind;
  std::uint64_t epoch;
  // Of a grant: what the log has.
  std::uint64_t committed;
  std::uint64_t size;
  std::uint64_t last_epoch;
};

Config settings() {
  Config config = must(Config::load());
  config.engine.control = ControlMode::automatic;
  // A node that is silent for half a second is replaced.
  config.connections.keepalive_interval = 100ms;
  config.connections.peer_timeout = 500ms;
  config.queue_pair.ack_timeout = 8;  // 1 ms: a lease ends soon after its time
  // Messages and calls are short, and the log is memory of its own. An engine touches all of its
  // pools when it opens: a node that takes little memory is back soon after a restart.
  config.connections.max_message_bytes = config.connections.eager_bytes;
  config.memory.receive_bytes = 12u << 20;
  config.memory.send_bytes = 4u << 20;
  config.memory.lease_bytes = 2u << 20;
  config.memory.rendezvous_bytes = 0;
  return config;
}

class Node {
 public:
  explicit Node(const Options& o)
      : id_(o.id),
        nodes_(o.nodes.size()),
        log_(o.file, o.is_new ? std::optional(o.records) : std::nullopt),
        random_(std::random_device()()) {
    if (!o.journal.empty())
      journal_ = ::open(o.journal.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    engine_ = must(Engine::open(settings()));
    memory_ = must(engine_.register_memory(std::as_writable_bytes(log_.records()), Access::local));
    must(engine_.serve(kAppend, [this](Request& r) { on_append(r); }));
    must(engine_.serve(kRead, [this](Request& r) { on_read(r); }));
    ListenOptions listen;
    listen.handlers.on_message = [this](Connection c, Message& m) { on_leaders_message(c, m); };
    listen.handlers.on_returned = [this](Connection, const Returned& r) { on_returned(r); };
    listener_ = must(engine_.listen(o.nodes.at(id_), listen));
    for (std::size_t i = 0; i != nodes_; ++i) {
      if (i != id_) connect(peers_.emplace_back(), o.nodes[i]);
    }
    must(engine_.every(kTick, [this] { on_tick(); }));
    wait_for_leader();
  }
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;
  ~Node() { engine_ = Engine(); }  // runs callbacks, so it happens while all members exist

  int run() {
    Idler idler;
    while (fault_.empty() && !program::stop_requested()) must(idler.idle(engine_, engine_.poll()));
    if (!fault_.empty()) return fail(fault_);
    // The leader answers the calls under way. Then the peers and clients go elsewhere for a time.
    must(engine_.drain(2s, {.retry_after = 50ms}));
    while (!engine_.drained()) must(idler.idle(engine_, engine_.poll()));
    return program::kDone;
  }

 private:
  enum class Role { follower, candidate, recovering, leader };
  /// Another node, and its log while we have it.
  struct Peer {
    Connection connection;
    RemoteMemory log;
    Vote grant{};
    std::uint64_t sent = 0;    // records that are written to it or under way
    std::uint64_t stored = 0;  // records that have been written
  };

  void connect(Peer& peer, const std::string& address) {
    ConnectOptions options;
    options.reconnect = {.attempts = ~0u, .first_delay = 5ms, .max_delay = 50ms};
    options.timeout = 500ms;
    options.handlers.on_message = [this, &peer](Connection, Message& m) { on_vote(peer, m); };
    options.handlers.on_lease = [this, &peer](Connection, RemoteMemory& m) { on_lease(peer, m); };
    options.handlers.on_writable = [this, &peer](Connection) { replicate(peer); };
    peer.connection = must(engine_.connect(address, options));
  }

  // ---- as a follower ----

  void wait_for_leader() { ticks_left_ = static_cast<std::int64_t>(25 + random_() % 15); }

  void wait_for_others() { ticks_left_ = static_cast<std::int64_t>(1 + random_() % 8); }

  /// A candidate asks for our log, or a leader has written to it.
  void on_leaders_message(Connection from, const Message& m) {
    if (m.is_write()) return log_.set_committed(m.immediate().value_or(0));
    Vote vote{};
    if (!decode(m.bytes(), vote) || engine_.draining()) return;
    if (lease_ || is_reading_ || role_ == Role::recovering || role_ == Role::leader) return;
    // Of two candidates the newer one goes first, but a leader stays.
    const std::uint64_t least =
        vote.kind == Vote::ask ? std::max(log_.epoch(), epoch_) : log_.epoch();
    if (vote.epoch < least)
      return (void)from.send_copy(bytes_of(Vote{Vote::refuse, least, 0, 0, 0}));
    // From here on no older leader is let in, and our own candidacy is over.
    role_ = Role::follower;
    epoch_ = 0;
    log_.set_epoch(vote.epoch);
    log_.extend();
    const Vote grant{Vote::grant, vote.epoch, log_.committed(), log_.size(), log_.last_epoch()};
    if (from.send_copy(bytes_of(grant)) != Status::ok) return;  // the candidate asks again
    const LeaseOptions lease{.duration = kLease, .tag = vote.epoch};
    (void)from.lease(memory_.slice(), lease, {}, &lease_);  // likewise
  }

  /// Nobody can write to our log any more, unless the memory is missing: then an access of a leader
  /// that has stopped may go on, and only our own end is sure to end it. So nobody gets the log,
  /// and we do not lead, until this node has been started again.
  void on_returned(const Returned& returned) {
    if (returned.lease != lease_) return;
    if (!returned.memory) return void(fault_ = "a lost leader may still use the log; start again");
    lease_ = {};
    wait_for_others();
  }

  void on_tick() {
    if (role_ == Role::follower) {
      if (lease_ || is_reading_ || engine_.draining() || --ticks_left_ > 0) return;
      role_ = Role::candidate;
      epoch_ = next_epoch();
    }
    for (Peer& peer : peers_) {
      if (peer.log.time_left() == 0ns) peer.log.release();
    }
    if (role_ != Role::candidate && !has_majority()) return step_down();
    for (Peer& peer : peers_) {
      // What fails is done at the next tick.
      if (!peer.log) {
        const auto kind = role_ == Role::candidate ? Vote::ask : Vote::ask_as_leader;
        (void)peer.connection.send_copy(bytes_of(Vote{kind, epoch_, 0, 0, 0}));
      } else {
        // The tick runs anyway, so the lease keeps most of its time. auto_renew() would ask when
        // half of it is over, and a peer that is late by the other half would cost us its log.
        (void)peer.log.renew(kLease);
        replicate(peer, true);
      }
    }
  }

  // ---- as a candidate ----

  /// The next epoch that is ours: epochs of different nodes differ.
  std::uint64_t next_epoch() {
    seen_ = std::max(seen_, log_.epoch());
    return (seen_ / nodes_ + 1) * nodes_ + id_;
  }

  void on_vote(Peer& peer, const Message& m) {
    Vote vote{};
    if (!decode(m.bytes(), vote) || role_ == Role::follower) return;
    if (vote.kind == Vote::grant) {
      peer.grant = vote;
    } else if (vote.kind == Vote::refuse && vote.epoch > epoch_) {
      seen_ = std::max(seen_, vote.epoch);
      step_down();
    }
  }

  void on_lease(Peer& peer, RemoteMemory& log) {
    // A lease that we do not take goes back at once.
    if (role_ == Role::follower || log.tag() != epoch_ || peer.grant.epoch != epoch_) return;
    peer.log = std::move(log);
    const Vote grant = std::exchange(peer.grant, {});
    peer.sent = grant.committed;
    peer.stored = 0;
    if (role_ == Role::candidate) recover(peer, grant);
    if (role_ == Role::leader) replicate(peer);
  }

  /// We have a majority: two of three. Nobody writes to these two logs but us.
  void recover(Peer& peer, const Vote& other) {
    role_ = Role::recovering;
    log_.set_epoch(epoch_);
    log_.extend();
    if (std::pair(other.last_epoch, other.size) <= std::pair(log_.last_epoch(), log_.size()))
      return lead();
    const std::size_t from = log_.committed() * sizeof(Record);
    const std::size_t bytes = other.size * sizeof(Record) - from;
    const auto done = [this](const Completion& c) {
      is_reading_ = false;
      if (role_ != Role::recovering) return;
      c.status == Status::ok ? lead() : step_down();
    };
    is_reading_ = peer.connection.read(memory_.slice(from, bytes), peer.log.slice(from, bytes),
                                       done) == Status::ok;
    if (!is_reading_) step_down();
  }

  // ---- as the leader ----

  /// With our own log, that of one peer is a majority.
  [[nodiscard]] bool has_majority() const {
    return std::ranges::any_of(peers_, [](const Peer& p) { return p.log.time_left() > 0ns; });
  }

  void lead() {
    role_ = Role::leader;
    log_.extend();
    clients_.clear();
    for (std::uint64_t i = 0; i != log_.size(); ++i)
      clients_[log_.records()[i].client] = {log_.records()[i].number, i};
    first_ = log_.size();
    // Without room, no record is committed any more; reads go on.
    if (has_room(1)) log_.append(epoch_, 0, epoch_, {});
    for (Peer& peer : peers_) replicate(peer);
  }

  void step_down() {
    role_ = Role::follower;
    epoch_ = 0;
    wait_for_others();
    for (Peer& peer : peers_) peer.log.release();
    for (auto& [index, call] : calls_) (void)call.refuse(kNotLeading);
    calls_.clear();
  }

  /// Writes to the peer's log what it lacks; with `is_due`, a notice at least. What finds no room
  /// now goes when the connection is writable again.
  void replicate(Peer& peer, bool is_due = false) {
    while (role_ == Role::leader && peer.log && (is_due || peer.sent != log_.size())) {
      const std::uint64_t end = std::min(log_.size(), peer.sent + kMostAtOnce);
      const std::size_t from = peer.sent * sizeof(Record);
      const std::size_t bytes = end * sizeof(Record) - from;
      const auto committed = static_cast<std::uint32_t>(std::min(log_.committed(), end));
      const auto done = [this, &peer, end, epoch = epoch_](const Completion& c) {
        if (c.status == Status::ok && role_ == Role::leader && epoch == epoch_)
          on_stored(peer, end);
      };
      if (peer.connection.write_with_imm(memory_.slice(from, bytes), peer.log.slice(from, bytes),
                                         committed, done) != Status::ok)
        return;
      peer.sent = end;
      is_due = false;
    }
  }

  /// The peer's file has the first `count` records.
  void on_stored(Peer& peer, std::uint64_t count) {
    peer.stored = std::max(peer.stored, count);
    // With us, one peer is a majority. Records of earlier epochs count with the first of ours.
    if (peer.stored <= first_) return;
    log_.set_committed(peer.stored);
    while (!calls_.empty() && calls_.begin()->first < log_.committed()) {
      (void)calls_.begin()->second.reply(bytes_of(calls_.begin()->first));
      calls_.erase(calls_.begin());
    }
  }

  // ---- for clients ----

  void on_append(Request& request) {
    Append append{};
    if (!decode(request.bytes(), append) || append.client == 0 || append.number == 0 ||
        !std::ranges::all_of(view(append.text), is_printable))
      return (void)request.refuse("this is no record");
    if (journal_ >= 0 && ::write(journal_, &append, offsetof(Append, text)) < 0)
      return (void)request.refuse("the journal is not written");
    if (role_ != Role::leader || !has_majority()) {
      // The client's session goes on to the next node.
      (void)request.session().close({GoodbyeReason::overloaded, kTick});
      return (void)request.refuse(kNotLeading);
    }
    const auto known = clients_.find(append.client);
    Appended last = known != clients_.end() ? known->second : Appended{};
    if (append.number == last.number + 1) {
      if (!has_room(kLeadersOwn + 1)) return (void)request.refuse("the log is full");
      last = clients_[append.client] = {append.number, log_.size()};
      log_.append(epoch_, append.client, append.number, append.text);
      for (Peer& peer : peers_) replicate(peer);
    } else if (append.number != last.number) {
      return (void)request.refuse("the number is out of order");
    }
    if (last.index < log_.committed()) return (void)request.reply(bytes_of(last.index));
    if (first_ == log_.records().size()) return (void)request.refuse("the log is full");
    calls_.emplace(last.index, request.defer());
  }

  [[nodiscard]] bool has_room(std::uint64_t records) const {
    return log_.records().size() - log_.size() >= records;
  }

  void on_read(Request& request) {
    Read read{};
    if (!decode(request.bytes(), read)) return (void)request.refuse("this is no read");
    const std::uint64_t from = std::min(read.from, log_.committed());
    const std::uint64_t count =
        std::min<std::uint64_t>(log_.committed() - from, request.max_reply() / sizeof(Record));
    (void)request.reply(std::as_bytes(log_.records().subspan(from, count)));
  }

  struct Appended {
    std::uint64_t number = 0;
    std::uint64_t index = 0;
  };

  // Declared before the engine, whose destructor still runs callbacks.
  std::size_t id_;
  std::size_t nodes_;
  Log log_;
  std::mt19937_64 random_;
  int journal_ = -1;
  std::string fault_;
  Role role_ = Role::follower;
  LeaseId lease_;                // of our log to the leader
  bool is_reading_ = false;      // from a peer's log into ours
  std::int64_t ticks_left_ = 0;  // until a follower without a leader becomes a candidate
  std::uint64_t seen_ = 0;       // the newest epoch that we have heard of
  std::uint64_t epoch_ = 0;      // that we lead, or want to; else 0
  std::uint64_t first_ = 0;      // record of this epoch
  std::map<std::uint64_t, Appended> clients_;        // their last records
  std::multimap<std::uint64_t, PendingCall> calls_;  // by the record that they wait for
  std::deque<Peer> peers_;
  MemoryRegion memory_;  // the log's
  Engine engine_;
  Listener listener_;
};

}  // namespace

int main(int argc, char** argv) {
  program::name = "replicated-log";
  program::log_to_stderr();
  program::catch_stop_signals();

  // On softverbs, nodes lease each other memory that lies in no pool: a log is a mapped file, so
  // that it outlives its process. They are processes of one user that trust each other.
  ::setenv("SOFTVERBS_TRUST_PAGES", "1", 0);

  CLI::App app("A node of a replicated log; see the head of its source.", "replicated-log");
  Options o;
  app.add_option("--nodes", o.nodes, "addresses of the three nodes: a.b.c.d:port,…")
      ->delimiter(',')
      ->expected(3)
      ->required();
  app.add_option("--id", o.id, "which of the nodes this is")->check(CLI::Range(0, 2))->required();
  app.add_option("--file", o.file, "holds this node's log")->required();
  CLI::Option* const is_new = app.add_flag(
      "--new", o.is_new, "make the file: a node's first start; see the source for a lost file");
  app.add_option("--records", o.records, "that a new log takes; the same at all nodes")
      ->needs(is_new)
      ->check(CLI::Range(std::uint64_t{8192}, std::uint64_t{1} << 24))
      ->capture_default_str();
  app.add_option("--journal", o.journal, "a file to which each call that runs here is added");
  int code = 0;
  if (!program::parse_arguments(app, argc, argv, code)) return code;
  try {
    const auto node = std::make_unique<Node>(o);
    return node->run();
  } catch (const Failure& failure) {
    return fail(failure.what());
  }
}
