// A client of the replicated log: appends records, or reads them. See replicated_log.cc.
//
//   log-client append --nodes A,B,C      appends until interrupted, or --count records
//   log-client read A                    prints what the node at A knows to be committed
//
// The client has several writers, each of which appends one record after another. A call that fails
// may have appended its record, so the writer repeats it at once under the same number.
// Note that the session finds the leader: a node that does not lead ends the session with a
// goodbye, a dead one is lost, and the session goes on to the next address. Calls wait meanwhile,
// also those that a node refused because it ends. Any other refusal ends the program.
//
// CMake builds it, and so does this command. A copy of this folder of a clone needs `cp -rL`.
//
//   g++ -std=c++20 -O2 *.cc -o log-client $(pkg-config --cflags --libs spinwire fmt CLI11)
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string_view>
#include <vector>

#include "program.h"
#include "replicated_log.h"

namespace {

using namespace spinwire;        // NOLINT: a program of one file
using namespace replicated_log;  // NOLINT
using namespace std::chrono_literals;
using program::bytes_of;
using program::decode;
using program::fail;
using program::must;

struct Options {
  std::vector<std::string> nodes;
  std::uint64_t count = 0;  // of records; 0: until interrupted
  std::uint32_t writers = 4;
  std::uint64_t interval = 2'000'000;  // ns between two records of a writer
};

Config settings() {
  Config config = must(Config::load());
  config.engine.control = ControlMode::automatic;
  config.connections.keepalive_interval = 100ms;
  config.connections.peer_timeout = 500ms;
  return config;
}

/// What others have written does not reach a terminal as it is.
std::string printable(std::string_view text) {
  std::string result(text);
  std::ranges::replace_if(
      result, [](char c) { return !is_printable(c); }, '?');
  return result;
}

class Client {
 public:
  explicit Client(const Options& o)
      : left_(o.count != 0 ? o.count : ~std::uint64_t{0}), engine_(must(Engine::open(settings()))) {
    std::random_device random;
    for (std::uint32_t i = 0; i != o.writers; ++i)
      writers_.push_back({(std::uint64_t{random()} << 32 | random()) | 1});
    SessionOptions options;
    options.alternatives = {o.nodes.begin() + 1, o.nodes.end()};
    options.reconnect = {.attempts = ~0u, .first_delay = 5ms, .max_delay = 50ms};
    options.when_not_ready = WhenNotReady::wait;
    options.timeout = 300ms;
    options.on_closed = [this](Session, const Error& e) { fault_ = e.message(); };
    session_ = must(engine_.open_session(o.nodes[0], options));
    must(engine_.every(Nanoseconds(o.interval), [this] { on_tick(); }));
    last_answer_ = engine_.clock().now();
  }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  ~Client() { engine_ = Engine(); }  // runs callbacks, so it happens while all members exist

  int run() {
    Idler idler;
    while (fault_.empty() && !(is_done() && open_ == 0)) must(idler.idle(engine_, engine_.poll()));
    if (!fault_.empty()) return fail(fault_);
    std::uint64_t all = 0;
    for (const Writer& w : writers_) {
      fmt::print("writer {:016x}: {}\n", w.client, w.number);
      all += w.number;
    }
    fmt::print("{} records in {} calls, longest gap between two answers {} ms\n", all, attempts_,
               longest_gap_ / 1ms);
    return program::kDone;
  }

 private:
  struct Writer {
    std::uint64_t client;
    std::uint64_t number = 0;  // of its last record
    bool is_answered = true;   // it is appended
  };

  [[nodiscard]] bool is_done() const { return left_ == 0 || program::stop_requested(); }

  /// Each writer begins its next record.
  void on_tick() {
    for (Writer& w : writers_) {
      if (!w.is_answered || is_done()) continue;
      --left_;
      ++open_;
      ++w.number;
      w.is_answered = false;
      append(w);
    }
  }

  /// The call waits for a node. There is room, because each writer has one call at a time.
  void append(Writer& w) {
    Append record{w.client, w.number, ++attempts_, {}};
    fmt::format_to_n(record.text.data(), record.text.size(), "record {}", w.number);
    CallOptions options;
    options.timeout = 500ms;
    const auto done = [this, &w](Reply& reply) { on_reply(w, reply); };
    const Status status = session_.call(kAppend, bytes_of(record), done, options);
    if (status != Status::ok) fault_ = fmt::format("record {}: {}", w.number, to_string(status));
  }

  void on_reply(Writer& w, const Reply& reply) {
    const bool is_refused = reply.status() == Status::refused && reply.text() != kNotLeading;
    if (is_refused || (reply.status() != Status::ok && !is_retryable(reply.status()))) {
      fault_ = fmt::format("record {}: {}: {}", w.number, to_string(reply.status()),
                           printable(reply.text()));
      return;
    }
    if (reply.status() != Status::ok) return append(w);
    w.is_answered = true;
    --open_;
    const std::uint64_t now = engine_.clock().now();
    longest_gap_ = std::max(longest_gap_, engine_.clock().duration(now - last_answer_));
    last_answer_ = now;
  }

  std::string fault_;
  std::deque<Writer> writers_;
  std::uint64_t left_;
  std::uint64_t open_ = 0;      // records without an answer
  std::uint64_t attempts_ = 0;  // calls so far
  std::uint64_t last_answer_ = 0;
  Nanoseconds longest_gap_{0};
  Engine engine_;
  Session session_;
};

class Reader {
 public:
  explicit Reader(const std::string& node) : engine_(must(Engine::open(settings()))) {
    SessionOptions options;
    options.on_ready = [this](Session s) { read(s); };
    options.on_closed = [this](Session, const Error& e) { finish(e.message()); };
    must(engine_.open_session(node, options));
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;
  ~Reader() { engine_ = Engine(); }

  int run() {
    Idler idler;
    while (!is_over_ && !program::stop_requested()) must(idler.idle(engine_, engine_.poll()));
    return fault_.empty() ? program::kDone : fail(fault_);
  }

 private:
  void read(Session session) {
    const auto done = [this, session](Reply& reply) { on_records(session, reply); };
    const Status status = session.call(kRead, bytes_of(Read{next_}), done);
    if (status != Status::ok) finish(fmt::format("read: {}", to_string(status)));
  }

  void on_records(Session session, const Reply& reply) {
    if (reply.status() != Status::ok)
      return finish(fmt::format("read: {}", to_string(reply.status())));
    if (reply.bytes().empty()) return finish({});
    Record record{};
    for (auto rest = reply.bytes(); rest.size() >= sizeof record;
         rest = rest.subspan(sizeof record)) {
      (void)decode(rest.first(sizeof record), record);
      fmt::print("{} {} {:016x} {} {:016x} {}\n", next_++, record.epoch, record.client,
                 record.number, record.hash, printable(view(record.text)));
    }
    read(session);
  }

  void finish(const std::string& fault) {
    if (!is_over_) fault_ = fault;
    is_over_ = true;
  }

  bool is_over_ = false;
  std::string fault_;
  std::uint64_t next_ = 0;
  Engine engine_;
};

template <typename Program, typename... Args>
int run(const Args&... args) {
  const auto program = std::make_unique<Program>(args...);
  return program->run();
}

}  // namespace

int main(int argc, char** argv) {
  program::name = "log-client";
  program::log_to_stderr(LogLevel::error);
  program::catch_stop_signals();

  CLI::App app("Appends records to a replicated log, or reads them.", "log-client");
  app.require_subcommand(1);
  Options o;
  std::string node;
  CLI::App* append = app.add_subcommand("append", "append records");
  append->add_option("--nodes", o.nodes, "addresses of the nodes: a.b.c.d:port,…")
      ->delimiter(',')
      ->required();
  append->add_option("-n,--count", o.count, "records (until interrupted)")
      ->check(CLI::Range(program::kOne, program::kMostCount));
  append->add_option("--writers", o.writers, "records that are appended at once")
      ->check(CLI::Range(1, 8))
      ->capture_default_str();
  append->add_option("--interval", o.interval, "time between two records of a writer, e.g. 1ms")
      ->transform(CLI::AsNumberWithUnit(
          std::map<std::string, std::uint64_t>{{"ns", 1}, {"us", 1000}, {"ms", 1'000'000}}))
      ->check(CLI::Range(std::uint64_t{10'000}, std::uint64_t{1'000'000'000}))
      ->default_str("2ms");
  CLI::App* read = app.add_subcommand("read", "print the committed records of a node");
  read->add_option("node", node, "a.b.c.d:port")->required();
  int code = 0;
  if (!program::parse_arguments(app, argc, argv, code)) return code;
  try {
    return *append ? run<Client>(o) : run<Reader>(node);
  } catch (const Failure& failure) {
    return fail(failure.what());
  }
}
