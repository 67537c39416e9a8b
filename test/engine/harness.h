// Shared by the tests of engines: engines with small pools that one thread polls in turn and that
// record their callbacks; tallies of operations; child processes.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/sanitizers.h"
#include "engine/sparse_engine.h"
#include "own_process.h"
#include "spinwire/spinwire.h"

namespace engine_test {

using spinwire::Access;
using spinwire::Buffer;
using spinwire::BufferSlice;
using spinwire::Clock;
using spinwire::Completion;
using spinwire::CompletionCallback;
using spinwire::Config;
using spinwire::Connection;
using spinwire::ConnectionState;
using spinwire::ConnectOptions;
using spinwire::ControlMode;
using spinwire::Engine;
using spinwire::Error;
using spinwire::HugepagePolicy;
using spinwire::Listener;
using spinwire::ListenOptions;
using spinwire::LockPolicy;
using spinwire::MemoryRegion;
using spinwire::Message;
using spinwire::Pool;
using spinwire::Post;
using spinwire::RemoteRegion;
using spinwire::Result;
using spinwire::SharedReceiveQueue;
using spinwire::Status;
using namespace std::chrono_literals;

/// The device under test: SPINWIRE_TEST_DEVICE, softverbs by default.
inline std::string device_name() {
  const char* name = std::getenv("SPINWIRE_TEST_DEVICE");
  return name != nullptr ? name : "softverbs";
}
/// For behaviour of softverbs only, such as sends that wait until the peer polls. A test writes: if
/// (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << the reason;
inline bool on_softverbs() { return device_name().find("softverbs") != std::string::npos; }
inline constexpr const char* kSoftverbsOnly = "for softverbs only: ";

/// How much slower than usual this machine is (SPINWIRE_TEST_SLOWNESS). Waits are that much longer,
/// large amounts that much smaller.
inline std::uint32_t slowness() {
  const char* factor = std::getenv("SPINWIRE_TEST_SLOWNESS");
  const int value = factor != nullptr ? std::atoi(factor) : 1;
  return static_cast<std::uint32_t>(std::max(value, 1));
}
inline std::uint32_t amount(std::uint32_t usual) { return usual / slowness(); }

/// Whether all messages use work requests (SPINWIRE_TEST_MESSAGES=verbs).
inline bool messages_by_work_requests() {
  const char* messages = std::getenv("SPINWIRE_TEST_MESSAGES");
  return messages != nullptr && std::string(messages) == "verbs";
}
/// Whether short messages go without work requests. The preloaded device lacks that path.
inline bool sends_directly() {
  return device_name().starts_with("softverbs") && !messages_by_work_requests();
}

/// More than until() waits, in every test. With the shipped limits of 2 s and 5 s, a handshake
/// fails on a machine that is busy enough.
inline constexpr std::chrono::minutes kHandshakeLimit{10};

/// Pools of a few MiB, so that an engine opens in milliseconds. No handshake runs out of time, in
/// either direction: a test of that sets its own limit. With SPINWIRE_TEST_OWN_RECEIVES each
/// connection has receives of its own.
inline Config small_config() {
  Config c;
  c.connections.connect_timeout = c.connections.handshake_timeout = kHandshakeLimit;
  c.device.name = device_name();
  // A port of the device; without one, the library chooses.
  if (const char* port = std::getenv("SPINWIRE_TEST_PORT"); port != nullptr)
    c.device.port = static_cast<std::uint32_t>(std::atoi(port));
  c.memory.hugepages = HugepagePolicy::off;
  c.memory.send_bytes = 8u << 20;  // a chunk of 2 MiB serves one size class at a time
  c.memory.receive_bytes = 2u << 20;
  c.memory.lease_bytes = 4u << 20;
  c.memory.rendezvous_bytes = 0;
  c.memory.windows = 0;
  c.connections.max_message_bytes = c.connections.eager_bytes;  // no rendezvous messages
  c.queues.send_depth = 64;
  c.queues.receive_depth = 256;
  c.queues.operations = 1024;
  c.queues.completion_depth = 2048;
  c.connections.maximum = 64;
  c.connections.handshakes = 16;
  c.security.open = std::getenv("SPINWIRE_TEST_DEVICE") != nullptr;  // other hosts may reach it
  if (messages_by_work_requests()) c.connections.direct_messages = spinwire::DirectPath::off;
  if (std::getenv("SPINWIRE_TEST_OWN_RECEIVES") != nullptr) {
    c.queues.shared_receive_queue = SharedReceiveQueue::off;
    c.queues.receive_depth = 1024;  // 64 each
    c.queues.completion_depth = 4096;
    c.memory.receive_bytes = 8u << 20;
    c.connections.maximum = 16;
  }
  return c;
}
/// Messages by work requests: one ends when the peer has it, not when the call returns.
inline Config without_direct_messages(Config c = small_config()) {
  c.connections.direct_messages = spinwire::DirectPath::off;
  return c;
}

/// Detects within milliseconds that the peer of an idle connection is gone.
inline Config watchful_config() {
  Config c = small_config();
  c.connections.keepalive_interval = 20ms;
  c.queue_pair.ack_timeout = 8;
  return c;
}

/// The application's operations: each must complete exactly once if accepted, and never if refused.
class Tally {
 public:
  /// Runs `call`, which starts an operation with the given callback.
  template <typename Call>
  Status run(Call&& call) {
    const std::size_t id = seen_.size();
    seen_.push_back(0);
    taken_.push_back(false);
    const Status status = call(CompletionCallback([this, id](const Completion& c) {
      ++seen_[id];
      ++completed;
      ++by_status[static_cast<std::size_t>(c.status)];
      bytes += c.bytes;
    }));
    if (status == Status::ok) {
      taken_[id] = true;
      ++accepted;
    }
    return status;
  }
  [[nodiscard]] std::uint64_t ended(Status status) const {
    return by_status[static_cast<std::size_t>(status)];
  }
  [[nodiscard]] bool idle() const { return completed == accepted; }
  void expect_exact() const {
    EXPECT_EQ(accepted, completed);
    for (std::size_t i = 0; i < seen_.size(); ++i) {
      ASSERT_EQ(seen_[i], taken_[i] ? 1 : 0) << "operation " << i;
    }
  }

  [[nodiscard]] std::uint64_t outstanding() const { return accepted - completed; }

  std::uint64_t accepted = 0;
  std::uint64_t completed = 0;
  std::uint64_t bytes = 0;
  std::array<std::uint64_t, spinwire::kStatusCount> by_status{};

 private:
  std::deque<std::uint8_t> seen_;
  std::deque<bool> taken_;
};

/// An engine and a record of its callbacks. The hooks may be empty.
class Node {
 public:
  /// With `ticks`, the test moves the time, and each poll takes a control step.
  explicit Node(const Config& config = small_config(), const std::uint64_t* ticks = nullptr)
      : steps_(ticks != nullptr || config.engine.control == ControlMode::manual) {
    auto opened = open_engine(config, ticks != nullptr ? Clock::manual(ticks) : Clock::real());
    EXPECT_TRUE(opened) << opened.error().message();
    if (opened) engine = std::move(*opened);
  }
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  [[nodiscard]] spinwire::ConnectionHandlers handlers() {
    spinwire::ConnectionHandlers h;
    h.on_ready = [this](Connection c) {
      ready.push_back(c);
      if (on_ready) on_ready(c);
    };
    h.on_message = [this](Connection c, Message& m) {
      ++messages;
      if (on_message) on_message(c, m);
    };
    if (has_on_offer) {
      h.on_offer = [this](Connection c, spinwire::Offer& offer) {
        if (on_offer) on_offer(c, offer);
      };
    }
    h.on_lease = [this](Connection c, spinwire::RemoteMemory& memory) {
      if (on_lease) on_lease(c, memory);
    };
    h.on_returned = [this](Connection c, const spinwire::Returned& returned) {
      if (on_returned) on_returned(c, returned);
    };
    h.on_closed = [this](Connection c, const Error& e) {
      closed.push_back(e);
      closed_connections.push_back(c);
      if (on_closed) on_closed(c, e);
    };
    return h;
  }
  void listen(const std::string& address = "127.0.0.1:0") {
    ListenOptions options;
    options.handlers = handlers();
    options.on_accept = [this](Connection c) {
      ++accepts;
      if (on_accept) on_accept(c);
    };
    auto made = engine.listen(address, options);
    ASSERT_TRUE(made) << made.error().message();
    listener = std::move(*made);
  }
  [[nodiscard]] Connection begin(const std::string& address) {
    auto made = engine.connect(address, {handlers()});
    EXPECT_TRUE(made) << made.error().message();
    return made ? *made : Connection();
  }
  [[nodiscard]] Connection begin(const Node& to) { return begin(to.listener.address()); }

  int poll() {
    const int events = engine.poll();
    if (steps_) (void)engine.poll_control();
    return events;
  }
  [[nodiscard]] Buffer buffer(std::size_t size, Pool pool = Pool::send) {
    Buffer b = engine.allocate(size, pool);
    EXPECT_TRUE(b) << to_string(engine.allocate_status());
    return b;
  }
  [[nodiscard]] Buffer filled(std::size_t size, std::uint32_t seed) {
    Buffer b = buffer(std::max<std::size_t>(size, 1));
    (void)b.resize(size);
    for (std::size_t i = 0; i < size; ++i) b.data()[i] = pattern(seed, i);
    return b;
  }
  static std::byte pattern(std::uint32_t seed, std::size_t at) {
    return static_cast<std::byte>(seed * 31 + at * 7 + (at >> 8));
  }
  static bool holds(std::span<const std::byte> bytes, std::uint32_t seed) {
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      if (bytes[i] != pattern(seed, i)) return false;
    }
    return true;
  }

  /// Checks that nothing of the application's is left. Call it when all connections are gone.
  void expect_clean() {
    const auto s = engine.stats();
    EXPECT_EQ(s.connections, 0u);
    EXPECT_EQ(s.operations, 0u);
    EXPECT_EQ(s.reserved_receives, 0u);
    EXPECT_EQ(s.stale_completions, stale_allowed ? s.stale_completions : 0u);
    if (engine.device().shared_receives) {
      EXPECT_GT(s.receives + engine.config().queues.receive_postlist,
                engine.config().queues.receive_depth);
    } else {
      EXPECT_EQ(s.receives, 0u);  // freed with their connections
    }
    EXPECT_EQ(engine.memory_stats(Pool::send).blocks_used, 0u);
    EXPECT_EQ(engine.memory_stats(Pool::lease).blocks_used, 0u);
    EXPECT_EQ(engine.memory_stats(Pool::rendezvous).blocks_used, 0u);
    tally.expect_exact();
    const auto audit = engine.audit();
    EXPECT_TRUE(audit) << audit.error().message();
  }

  std::function<void(Connection)> on_accept, on_ready;
  std::function<void(Connection, Message&)> on_message;
  std::function<void(Connection, spinwire::Offer&)> on_offer;
  bool has_on_offer = true;  ///< false: messages above the eager limit may come directly
  std::function<void(Connection, spinwire::RemoteMemory&)> on_lease;
  std::function<void(Connection, const spinwire::Returned&)> on_returned;
  std::function<void(Connection, const Error&)> on_closed;
  std::vector<Connection> ready;
  std::vector<Error> closed;
  std::vector<Connection> closed_connections;
  std::uint64_t messages = 0;
  std::uint64_t accepts = 0;
  bool stale_allowed = false;  ///< a connection was closed with completions outstanding
  Tally tally;
  Listener listener;
  Engine engine;

 private:
  bool steps_;
};

/// Polls the nodes in turn until `done`. False after a minute: what is waited for takes
/// milliseconds on an idle machine, so that only a defect takes so long. A slow machine has more
/// time, but less than test/softroce leaves to one test.
template <typename Done>
bool until(std::initializer_list<Node*> nodes, Done&& done,
           std::chrono::milliseconds timeout = 60s) {
  const auto deadline =
      std::chrono::steady_clock::now() +
      std::min<std::chrono::milliseconds>(timeout * slowness(), std::max(timeout, 100'000ms));
  for (unsigned i = 0;; ++i) {
    if (done()) return true;
    for (Node* node : nodes) (void)node->poll();
    if (i % 64 == 0 && std::chrono::steady_clock::now() > deadline) return done();
  }
}

/// Both ends of one connection.
struct Ends {
  Connection client;
  Connection server;
};

inline Ends connect(Node& client, Node& server) {
  const std::size_t before = server.ready.size();
  Ends ends;
  ends.client = client.begin(server);
  // The client's first credit is an operation on some devices, and over then.
  EXPECT_TRUE(until({&client, &server},
                    [&] {
                      return ends.client.ready() && server.ready.size() > before &&
                             ends.client.snapshot().control == 0;
                    }))
      << "not ready: " << to_string(ends.client.state());
  if (server.ready.size() > before) ends.server = server.ready.back();
  return ends;
}

/// Closes the rest from the first node's end and waits until both have no connections.
inline void finish(Node& a, Node& b) {
  for (Connection c : a.ready) (void)c.close();
  EXPECT_TRUE(until({&a, &b}, [&] {
    return a.engine.stats().connections == 0 && b.engine.stats().connections == 0;
  }));
  // Further polls repost receives of messages that crossed the close.
  for (int i = 0; i < 8; ++i) (void)(a.poll() + b.poll());
  a.expect_clean();
  b.expect_clean();
}

/// A listening server and a client, connected once.
struct Pair {
  explicit Pair(const Config& config = small_config(), const std::uint64_t* ticks = nullptr)
      : Pair(config, config, ticks) {}
  Pair(const Config& servers, const Config& clients, const std::uint64_t* ticks = nullptr)
      : server(servers, ticks), client(clients, ticks) {
    server.listen();
    ends = connect(client, server);
  }
  template <typename Done>
  bool until(Done&& done) {
    return engine_test::until({&client, &server}, std::forward<Done>(done));
  }
  /// Polls both for a while, to check that something does not happen.
  void settle(int rounds = 200) {
    for (int i = 0; i < rounds; ++i) (void)(client.poll() + server.poll());
  }
  void finish() { engine_test::finish(client, server); }

  Node server;
  Node client;
  Ends ends;
};

/// Replaces the pair's connection by one with its own protection domains at both ends.
inline void use_own_domains(Pair& p) {
  EXPECT_EQ(p.ends.client.close(), Status::ok);
  spinwire::ConnectionSettings own;
  own.own_domain = true;
  p.server.on_accept = [own](Connection c) { EXPECT_TRUE(c.configure(own)); };
  p.server.ready.clear();
  ConnectOptions options;
  options.handlers = p.client.handlers();
  options.settings = own;
  auto made = p.client.engine.connect(p.server.listener.address(), options);
  EXPECT_TRUE(made) << made.error().message();
  EXPECT_TRUE(p.until([&] {
    return made->ready() && !p.server.ready.empty() && !p.client.closed.empty() &&
           !p.server.closed.empty();
  }));
  p.client.closed.clear();
  p.server.closed.clear();
  p.ends = {*made, p.server.ready.back()};
}

using own_process::mappings;
using own_process::open_descriptors;

/// Memory mappings that the C library's heap may have added meanwhile; a sanitizer's adds many.
#if SPINWIRE_ASAN || SPINWIRE_TSAN
inline constexpr std::size_t kHeapMappings = 64;
#else
inline constexpr std::size_t kHeapMappings = 4;
#endif

/// A forked process with a pipe in each direction. `body` uses descriptors `in` and `out` and
/// returns the exit code. The destructor kills the process if it still runs.
class Child {
 public:
  explicit Child(const std::function<int(int in, int out)>& body) {
    int down[2], up[2];
    EXPECT_EQ(pipe2(down, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(up, O_CLOEXEC), 0);
    pid_ = fork();
    if (pid_ == 0) {
      close(down[1]);
      close(up[0]);
      alarm(300 * slowness());  // for what the parent does not end
      int code = 99;
      try {
        code = body(down[0], up[1]);
      } catch (...) {
      }
      _exit(testing::Test::HasFailure() && code == 0 ? 98 : code);
    }
    close(down[0]);
    close(up[1]);
    to_ = down[1];
    from_ = up[0];
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    kill(SIGKILL);
    close(to_);
    close(from_);
  }

  /// The next line from the child.
  std::string line() {
    std::string text;
    for (char c = 0; read(from_, &c, 1) == 1 && c != '\n';) text += c;
    return text;
  }
  void tell(char what) { EXPECT_EQ(write(to_, &what, 1), 1); }
  void signal(int number) const { ::kill(pid_, number); }
  void kill(int number) {
    if (pid_ <= 0) return;
    ::kill(pid_, number);
    (void)wait();
  }
  /// Waits for the child's end. Returns the exit code, or the negated signal.
  int wait() {
    int status = 0;
    if (pid_ <= 0 || waitpid(pid_, &status, 0) != pid_) return -1000;
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  [[nodiscard]] pid_t pid() const { return pid_; }
  /// Readable once the child has written.
  [[nodiscard]] int from() const { return from_; }

 private:
  pid_t pid_ = 0;
  int to_ = -1;
  int from_ = -1;
};

inline void write_line(int out, const std::string& text) {
  const std::string line = text + "\n";
  (void)!write(out, line.data(), line.size());
}

/// A command byte from the parent; 0 if there is none now, 'q' if the parent is gone.
inline char command(int in) {
  char c = 0;
  const int flags = fcntl(in, F_GETFL);
  fcntl(in, F_SETFL, flags | O_NONBLOCK);
  const ssize_t got = read(in, &c, 1);
  return got == 1 ? c : got == 0 ? 'q' : '\0';
}

/// A child that listens and echoes every message until told to quit. An echo that lacks credit
/// waits for it.
inline int echo_server(int in, int out, const Config& config) {
  Node node(config);
  std::deque<std::pair<Connection, Buffer>> echoes;
  node.on_message = [&echoes](Connection c, Message& m) { echoes.emplace_back(c, m.take()); };
  node.listen();
  write_line(out, node.listener.address());
  for (unsigned i = 0;; ++i) {
    (void)node.poll();
    while (!echoes.empty() &&
           echoes.front().first.send(echoes.front().second) != Status::would_block)
      echoes.pop_front();
    if (i % 1024 == 0 && command(in) == 'q') return 0;
  }
}

}  // namespace engine_test
