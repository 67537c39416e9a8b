// The end that drives a scenario: an engine, and servers in this process or in others.
#pragma once

#include <sys/wait.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "scenarios/command_server.h"

namespace scenarios {

enum class Where { one_process, two_processes };

inline std::string name_of(const testing::TestParamInfo<Where>& where) {
  return where.param == Where::one_process ? "OneProcess" : "TwoProcesses";
}

/// A server in this process or another, and what this end knows of it.
class Peer {
 public:
  Peer(Where where, const Config& config, const std::uint64_t* ticks) {
    if (where == Where::one_process) {
      here_ = std::make_unique<CommandServer>(config, ticks);
      address_ = here_->address();
    } else {
      there_ = std::make_unique<Child>([&](int in, int out) { return serve(in, out, config); });
      address_ = there_->line();
    }
    EXPECT_NE(address_, "");
  }
  [[nodiscard]] const std::string& address() const { return address_; }
  void step() {
    if (here_ && !paused_) (void)here_->step();
  }
  /// Stops the server until resume().
  void pause() {
    paused_ = true;
    if (!there_) return;
    there_->signal(SIGSTOP);
    int status = 0;
    EXPECT_EQ(waitpid(there_->pid(), &status, WUNTRACED), there_->pid());
    EXPECT_TRUE(WIFSTOPPED(status));
  }
  void resume() {
    paused_ = false;
    if (there_) there_->signal(SIGCONT);
  }
  /// Kills the server, without a goodbye.
  void kill() {
    if (there_) there_->kill(SIGKILL);
    here_.reset();
    there_.reset();
  }
  [[nodiscard]] bool alive() const { return here_ || there_; }
  void ask_to_leave() {
    if (there_) there_->tell('q');
  }
  /// Of one in another process: waits, without polling here, until it has sent one more message.
  [[nodiscard]] bool has_sent() { return there_->line() == "sent"; }
  [[nodiscard]] bool can_leave() const {
    if (here_) return here_->alone();
    siginfo_t info{};
    EXPECT_EQ(waitid(P_PID, static_cast<id_t>(there_->pid()), &info, WEXITED | WNOHANG | WNOWAIT),
              0);
    return info.si_pid != 0;
  }
  void leave() {
    if (here_) here_->leave();
    if (there_) {
      EXPECT_EQ(there_->wait(), 0) << "see what the other process said";
    }
    here_.reset();
    there_.reset();
  }

  Connection control;
  std::uint32_t lines = 0;  ///< opened so far
  std::vector<Event> log;   ///< as far as it was read
  std::size_t seen = 0;     ///< entries returned by next()
  std::optional<Bytes> answer;

 private:
  std::string address_;
  std::unique_ptr<CommandServer> here_;
  std::unique_ptr<Child> there_;
  bool paused_ = false;
};

/// What arrived here on a line.
struct Came {
  Connection line;
  Bytes bytes;
  std::optional<std::uint32_t> immediate;
};

inline Config scenario_config() {
  Config c = small_config();
  c.memory.windows = 32;
  c.leases.maximum = 64;
  c.connections.own_domains = 0;
  c.queues.completion_depth = 8192;
  c.connections.keepalive_interval = 50ms * slowness();
  // Leased memory is returned only after its time and all retransmissions.
  if (slowness() == 1) c.queue_pair.ack_timeout = 8;
  return c;
}

class ScenarioDriver {
 public:
  struct Setup {
    Config ours = scenario_config();
    Config theirs = scenario_config();
    bool own_time = false;  ///< with both ends in this process, only pass() moves the time
    unsigned peers = 1;
  };
  explicit ScenarioDriver(Where where) : ScenarioDriver(where, Setup()) {}
  ScenarioDriver(Where where, const Setup& setup)
      : ticks_(setup.own_time && where == Where::one_process ? &now_ : nullptr),
        peers_(make_peers(where, setup)),
        node(setup.ours, ticks_) {
    node.on_message = [this](Connection c, Message& m) {
      for (auto& peer : peers_) {
        if (c == peer->control) {
          peer->answer.emplace(m.bytes().begin(), m.bytes().end());
          return;
        }
      }
      came.push_back({c, {m.bytes().begin(), m.bytes().end()}, m.immediate()});
    };
    node.on_lease = [this](Connection, RemoteMemory& memory) {
      leased.push_back(std::move(memory));
    };
    node.on_returned = [this](Connection c, const Returned& r) {
      Event e{.what = Saw::returned,
              .how = r.how,
              .requested = r.requested,
              .line = c.index(),
              .size = r.memory.size()};
      e.hold(r.memory.bytes());
      returned.push_back(e);
    };
    for (auto& peer : peers_) peer->control = connect(*peer);
  }

  template <typename Done>
  bool until(Done&& done) {
    const auto deadline = std::chrono::steady_clock::now() + std::min(60s * slowness(), 100s);
    for (unsigned i = 1;; ++i) {
      if (done()) return true;
      const int events = node.poll();
      for (auto& peer : peers_) peer->step();
      if (i % 16 != 0) continue;
      if (std::chrono::steady_clock::now() > deadline) return done();
      if (events == 0) (void)sched_yield();
    }
  }
  /// Polls for a while, to check that something does not happen.
  void settle() {
    int rounds = 0;
    (void)until([&] { return ++rounds > 200; });
  }
  [[nodiscard]] bool own_time() const { return ticks_ != nullptr; }
  void pass(Nanoseconds time) {
    now_ += static_cast<std::uint64_t>(time.count());
    settle();
  }

  [[nodiscard]] Peer& peer(unsigned which = 0) { return *peers_[which]; }
  /// Opens a further connection to a server, which numbers it `peer().lines`.
  Connection open_line(unsigned which = 0, const ConnectionSettings& ours = {}) {
    const std::uint32_t number = ++peers_[which]->lines;
    const Connection line = connect(*peers_[which], ours);
    EXPECT_TRUE(until([&] {
      return ask({.what = Do::greet, .line = number}, nullptr, which).status == Status::ok;
    }));
    return line;
  }
  Report ask(const Command& command, Bytes* bytes = nullptr, unsigned which = 0) {
    Peer& peer = *peers_[which];
    peer.answer.reset();
    Report report{.status = Status::timed_out};
    EXPECT_TRUE(peer.control.ready()) << "nobody to ask";
    if (!peer.control.ready()) return report;
    const auto words = std::as_bytes(std::span(&command, 1));
    EXPECT_TRUE(until([&] { return peer.control.send_copy(words) == Status::ok; }));
    EXPECT_TRUE(until([&] { return peer.answer.has_value(); })) << "no answer to a command";
    if (!peer.answer || peer.answer->size() < sizeof report) return report;
    std::memcpy(&report, peer.answer->data(), sizeof report);
    if (bytes != nullptr) bytes->assign(peer.answer->begin() + sizeof report, peer.answer->end());
    return report;
  }
  void order(const Command& command, unsigned which = 0) {
    const Status status = ask(command, nullptr, which).status;
    EXPECT_EQ(status, Status::ok) << to_string(status);
  }
  /// Memory that a server exposes: its region, and its number for look().
  Report expose(Command command, unsigned which = 0) {
    command.what = Do::expose;
    const Report report = ask(command, nullptr, which);
    EXPECT_EQ(report.status, Status::ok) << to_string(report.status);
    return report;
  }
  /// Reads a server's memory, in pieces.
  Bytes look(std::uint32_t index, std::size_t length) {
    constexpr std::size_t kPiece = 2048;
    Bytes all, piece;
    while (all.size() < length) {
      const Report report = ask({.what = Do::look,
                                 .index = index,
                                 .offset = all.size(),
                                 .length = std::min(kPiece, length - all.size())},
                                &piece);
      EXPECT_EQ(report.status, Status::ok);
      if (piece.empty()) break;
      all.insert(all.end(), piece.begin(), piece.end());
    }
    return all;
  }
  /// The server's next event, which must have this kind and line.
  Event next(Saw what, std::uint32_t line = 1, unsigned which = 0) {
    const Event event = next_of_any(what, which);
    EXPECT_EQ(event.line, line);
    return event;
  }
  Event next_of_any(Saw what, unsigned which = 0) {
    Peer& peer = *peers_[which];
    EXPECT_TRUE(until([&] {
      if (peer.seen == peer.log.size()) read_log(which);
      return peer.seen < peer.log.size();
    })) << "it saw nothing more";
    if (peer.seen == peer.log.size()) return {};
    const Event& event = peer.log[peer.seen++];
    EXPECT_EQ(event.what, what);
    return event;
  }
  void expect_no_more(unsigned which = 0) {
    settle();
    read_log(which);
    EXPECT_EQ(peers_[which]->seen, peers_[which]->log.size()) << "it saw more than was to be";
  }

  /// Waits until no operation of the connection is in flight, including internal ones.
  void quiet(const Connection& line) {
    EXPECT_TRUE(until([&] { return line.stats().outstanding == 0; }));
    settle();
    EXPECT_EQ(line.stats().outstanding, 0u);
  }

  /// Starts an operation; tries again while it would block.
  template <typename Call>
  Status start(Call&& call) {
    Status status = Status::would_block;
    EXPECT_TRUE(until([&] { return (status = node.tally.run(call)) != Status::would_block; }));
    return status;
  }
  /// Starts an operation and waits for its end.
  template <typename Call>
  Completion run(Call&& call) {
    ended_ = 0;
    const Status status = start([&](const CompletionCallback& count) {
      count_ = count;
      return call(CompletionCallback([this](const Completion& c) {
        end_ = c;
        ++ended_;
        count_(c);
      }));
    });
    EXPECT_EQ(status, Status::ok) << to_string(status);
    if (status != Status::ok) return {.status = status};
    EXPECT_TRUE(until([&] { return ended_ != 0; }));
    EXPECT_EQ(ended_, 1);
    return end_;
  }
  Status write(Connection line, const BufferSlice& ours, const RemoteRegion& theirs) {
    return run([&](const auto& done) { return line.write(ours, theirs, done); }).status;
  }
  Bytes read(Connection line, const RemoteRegion& theirs) {
    const Buffer got = node.buffer(theirs.length);
    const Completion end =
        run([&](const auto& done) { return line.read(got.slice(), theirs, done); });
    EXPECT_EQ(end.status, Status::ok) << to_string(end.status);
    EXPECT_EQ(end.bytes, theirs.length);
    return {got.data(), got.data() + got.size()};
  }
  [[nodiscard]] Buffer buffer_of(const Bytes& bytes) {
    Buffer b = node.buffer(std::max<std::size_t>(bytes.size(), 1));
    (void)b.resize(bytes.size());
    std::copy(bytes.begin(), bytes.end(), b.data());
    return b;
  }

  /// Starts a call about a lease and, if it was accepted, waits for the server's response.
  template <typename Call>
  LeaseReply reply_to(Call&& call) {
    reply_.reset();
    const Status status = call(LeaseCallback([this](LeaseReply& r) {
      EXPECT_FALSE(reply_) << "told twice";
      reply_.emplace(std::move(r));
    }));
    LeaseReply none;
    none.status = status;
    if (status != Status::ok) return none;
    none.status = Status::timed_out;
    EXPECT_TRUE(until([&] { return reply_.has_value(); }));
    return reply_ ? std::move(*reply_) : std::move(none);
  }
  /// Requests memory from a server and waits for the response.
  LeaseReply request(Connection line, std::size_t bytes, const LeaseOptions& options = {}) {
    return reply_to(
        [&](const LeaseCallback& done) { return line.request_memory(bytes, options, done); });
  }
  Status give_back(RemoteMemory& memory) {
    return reply_to([&](const LeaseCallback& done) { return memory.give_back(done); }).status;
  }

  /// Ends the scenario: no further events, all memory returned, balanced books at both ends.
  void finish() {
    leased.clear();
    for (unsigned i = 0; i < peers_.size(); ++i) {
      if (!peers_[i]->alive()) continue;
      expect_no_more(i);
      order({.what = Do::clean}, i);
    }
    for (Connection c : node.ready) (void)c.close();
    EXPECT_TRUE(until([&] { return node.engine.stats().connections == 0; }));
    for (auto& peer : peers_) {
      if (!peer->alive()) continue;
      peer->ask_to_leave();
      EXPECT_TRUE(until([&] { return peer->can_leave(); }));
      peer->leave();
    }
    settle();
    node.expect_clean();
  }

 private:
  static std::vector<std::unique_ptr<Peer>> make_peers(Where where, const Setup& setup) {
    std::vector<std::unique_ptr<Peer>> peers;
    const bool ticks = setup.own_time && where == Where::one_process;
    for (unsigned i = 0; i < setup.peers; ++i) {
      peers.push_back(std::make_unique<Peer>(where, setup.theirs, ticks ? &now_ : nullptr));
    }
    return peers;
  }
  Connection connect(const Peer& peer, const ConnectionSettings& ours = {}) {
    ConnectOptions options;
    options.handlers = node.handlers();
    options.settings = ours;
    auto made = node.engine.connect(peer.address(), options);
    EXPECT_TRUE(made) << made.error().message();
    if (!made) return {};
    EXPECT_TRUE(until([&] { return made->state() >= ConnectionState::ready; }));
    if (!made->ready()) {
      EXPECT_TRUE(until([&] { return !node.closed.empty(); }));
      ADD_FAILURE() << "not connected: "
                    << (node.closed.empty() ? "" : node.closed.back().message());
    }
    return *made;
  }
  void read_log(unsigned which) {
    Bytes bytes;
    const auto from = static_cast<std::uint32_t>(peers_[which]->log.size());
    EXPECT_EQ(ask({.what = Do::report, .index = from}, &bytes, which).status, Status::ok);
    for (std::size_t at = 0; at + sizeof(Event) <= bytes.size(); at += sizeof(Event)) {
      std::memcpy(&peers_[which]->log.emplace_back(), bytes.data() + at, sizeof(Event));
    }
  }

  static inline std::uint64_t now_ = 1'000'000'000;
  const std::uint64_t* ticks_;
  std::vector<std::unique_ptr<Peer>> peers_;  ///< first: processes must not inherit our engine
  CompletionCallback count_;
  Completion end_;
  int ended_ = 0;
  std::optional<LeaseReply> reply_;

 public:
  std::vector<Came> came;
  std::vector<RemoteMemory> leased;
  std::vector<Event> returned;
  Node node;
};

inline Bytes bytes_of(std::initializer_list<int> values) {
  Bytes bytes;
  for (const int v : values) bytes.push_back(static_cast<std::byte>(v));
  return bytes;
}
inline Bytes all_of(int value, std::size_t count) {
  return Bytes(count, static_cast<std::byte>(value));
}
/// Checks that an event has exactly these bytes.
inline void expect_bytes(const Event& event, const Bytes& bytes) {
  EXPECT_EQ(event.size, bytes.size());
  EXPECT_EQ(event.sum, digest(bytes));
  const std::size_t shown = std::min(bytes.size(), Event::kHead);
  EXPECT_EQ(Bytes(event.head.begin(), event.head.begin() + static_cast<std::ptrdiff_t>(shown)),
            Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(shown)));
}

}  // namespace scenarios

/// Runs a scenario twice: with both ends in this process, and with each in its own.
#define SPINWIRE_SCENARIO(number)                                                      \
  class Scenario##number : public testing::TestWithParam<scenarios::Where> {};         \
  INSTANTIATE_TEST_SUITE_P(                                                            \
      Ends, Scenario##number,                                                          \
      testing::Values(scenarios::Where::one_process, scenarios::Where::two_processes), \
      [](const auto& where) { return scenarios::name_of(where); })
