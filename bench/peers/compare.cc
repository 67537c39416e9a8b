// Compares 32-byte round trips of Spinwire, as messages and as remote calls, with a bare ring in
// shared memory and with UCX: all live in the same processes and take turns in short slices, so
// that each meets the same machine. One process holds the clients, another the servers, each on a
// processor of its own; besides, both ends are measured on one thread.
#include <fmt/core.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "common/call_pair.h"
#include "common/echo_pair.h"
#include "peers/placement.h"
#include "peers/report.h"
#include "peers/ring_peer.h"
#include "peers/ucx_peer.h"

namespace spinwire::bench {
namespace {

struct Options {
  std::size_t slices = 30;
  double slice_ms = 2;
  double limit_seconds = 20;
  bool json = false;
};

/// What the server process is to do, until it is told otherwise.
enum class Task : std::uint64_t { wait, connect_ucx, ring, ucx, spinwire, calls, probe };

struct Text {
  std::uint64_t length;
  std::array<char, 4096> bytes;

  void set(const std::string& text) {
    if (text.size() > bytes.size()) give_up("an address is too long");
    length = text.size();
    std::memcpy(bytes.data(), text.data(), text.size());
  }
  [[nodiscard]] std::string get() const { return {bytes.data(), length}; }
};

/// Shared by both processes.
struct Board {
  LonelyWord task;       ///< serial << 8 | Task
  LonelyWord taken;      ///< the task word that the server has taken up
  LonelyWord preempted;  ///< how often the server was, so far; as of taking up a task
  LonelyWord ready;
  LonelyWord ping;
  LonelyWord pong;
  Text ucx_client;
  Text ucx_server;
  Text spinwire_server;
  Text call_server;
  RingWires wires;
};

Board& make_board() {
  void* memory = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) give_up("no shared memory");
  return *static_cast<Board*>(memory);  // zeroes are what all of it begins with
}

std::uint64_t times_preempted() {
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  return static_cast<std::uint64_t>(usage.ru_nivcsw);
}

/// The processors that this process may use.
std::vector<int> processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  ::sched_getaffinity(0, sizeof set, &set);
  std::vector<int> found;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(static_cast<unsigned>(i), &set)) found.push_back(i);
  }
  return found;
}

void pin(int processor) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<unsigned>(processor), &set);
  if (::sched_setaffinity(0, sizeof set, &set) != 0) give_up("the processor cannot be pinned");
}

// ---- the server's process -----------------------------------------------------------------------

class ServerProcess {
 public:
  explicit ServerProcess(Board& board)
      : board_(board), ring_(board.wires), spinwire_(Config{}), calls_(Config{}) {}

  [[noreturn]] void run() {
    board_.ucx_server.set(ucx_.node().address());
    board_.spinwire_server.set(spinwire_.address());
    board_.call_server.set(calls_.address());
    board_.ready.value.store(1, std::memory_order_release);
    for (std::uint64_t word = 0;;) {
      const std::uint64_t next = board_.task.value.load(std::memory_order_acquire);
      if (next == word) {
        ::sched_yield();
        continue;
      }
      word = next;
      board_.preempted.value.store(times_preempted(), std::memory_order_relaxed);
      board_.taken.value.store(word, std::memory_order_release);
      work_on(word);
    }
  }

 private:
  void work_on(std::uint64_t word) {
    switch (static_cast<Task>(word & 0xff)) {
      case Task::connect_ucx:
        ucx_.node().connect(board_.ucx_client.get());
        return;
      case Task::ring:
        return serve(word, ring_);
      case Task::ucx:
        return serve(word, ucx_);
      case Task::spinwire:
        return serve(word, spinwire_);
      case Task::calls:
        return serve(word, calls_);
      case Task::probe:
        return answer_probe(board_.ping, board_.pong);
      case Task::wait:
        return;
    }
  }
  template <typename Server>
  void serve(std::uint64_t word, Server& server) {
    while (board_.task.value.load(std::memory_order_relaxed) == word) server.poll();
  }

  Board& board_;
  RingServer ring_;
  UcxServer ucx_;
  EchoServer spinwire_;
  CallServer calls_;
};

/// A child made before any engine or worker is; it starts working when told, and dies with us.
class Child {
 public:
  Child(Board& board, int processor) {
    int pipe[2];
    if (::pipe(pipe) != 0) give_up("no pipe");
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ < 0) give_up("no second process");
    go_ = pipe[1];
    if (pid_ != 0) {
      ::close(pipe[0]);
      return;
    }
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::close(pipe[1]);
    char byte = 0;
    if (::getppid() != parent || ::read(pipe[0], &byte, 1) != 1) ::_exit(0);
    pin(processor);
    ServerProcess(board).run();
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    ::close(go_);
  }
  void start() const {
    if (::write(go_, "", 1) != 1) give_up("the second process has gone");
  }
  /// A child that gave up has said why.
  void check_alive() const {
    if (::waitpid(pid_, nullptr, WNOHANG) != 0) give_up("the second process has ended");
  }

 private:
  pid_t pid_;
  int go_;
};

// ---- the client's process -----------------------------------------------------------------------

/// Polls through a slice; nanoseconds per round trip. Without any it answers 0: the other end did
/// not run at all.
template <typename Client, typename Poll>
double run_slice(Client& client, Poll&& poll, std::uint32_t window, double length_ns) {
  constexpr int kPollsPerLook = 128;
  constexpr double kWarmUp = 1e5;
  client.start(window);
  const auto run = [&](double ns) {
    const double begun = nanoseconds_now();
    double now = begun;
    for (; now - begun < ns; now = nanoseconds_now()) {
      for (int i = 0; i < kPollsPerLook; ++i) poll();
    }
    return now - begun;
  };
  run(kWarmUp);
  const std::uint64_t before = client.done();
  const double took = run(length_ns);
  const std::uint64_t done = client.done() - before;
  client.stop();
  run_until("the window is emptied", poll, [&] { return client.outstanding() == 0; });
  return done == 0 ? 0 : took / static_cast<double>(done);
}

/// Repeats `round` until every peer has enough slices of one placement, or time is up.
template <typename Round>
void repeat(const Options& o, const Comparison& c, Round&& round) {
  const double end = nanoseconds_now() + o.limit_seconds * 1e9;
  while (c.fewest(c.best_class()) < o.slices && nanoseconds_now() < end) round();
}

class OneThread {
 public:
  OneThread()
      : wires_(std::make_unique<RingWires>()),
        ring_server_(*wires_),
        ring_client_(*wires_),
        spinwire_(Config{}),
        calls_(Config{}) {
    ucx_server_.node().connect(ucx_client_.node().address());
    ucx_client_.node().connect(ucx_server_.node().address());
  }

  Comparison compare(const Options& o, std::uint32_t window) {
    Comparison c{"one thread", window, {}, 0, 0};
    const auto slice = [&](PeerIndex peer, auto& client, auto& server) {
      const std::uint64_t preempted = times_preempted();
      const double ns = run_slice(
          client,
          [&] {
            client.poll();
            server.poll();
          },
          window, o.slice_ms * 1e6);
      if (times_preempted() != preempted) {
        ++c.preempted;
        return;
      }
      c.slices[peer][static_cast<std::size_t>(Placement::together)].push_back(ns);
    };
    repeat(o, c, [&] {
      slice(kRing, ring_client_, ring_server_);
      slice(kUcx, ucx_client_, ucx_server_);
      slice(kSpinwire, spinwire_.client, spinwire_.server);
      slice(kCalls, calls_.client, calls_.server);
    });
    return c;
  }

 private:
  std::unique_ptr<RingWires> wires_;
  RingServer ring_server_;
  RingClient ring_client_;
  UcxServer ucx_server_;
  UcxClient ucx_client_;
  EchoPair spinwire_;
  CallPair calls_;
};

class TwoProcesses {
 public:
  TwoProcesses(Board& board, const Child& child) : board_(board), child_(child) {
    child_.start();
    run_until(
        "the second process sets up", [this] { child_.check_alive(); },
        [this] { return board_.ready.value.load(std::memory_order_acquire) != 0; });
    ring_ = std::make_unique<RingClient>(board.wires);
    ucx_ = std::make_unique<UcxClient>();
    board.ucx_client.set(ucx_->node().address());
    ucx_->node().connect(board.ucx_server.get());
    tell(Task::connect_ucx);
    tell(Task::spinwire);
    spinwire_ = std::make_unique<EchoClient>(Config{}, board.spinwire_server.get());
    run_until(
        "the echo client is connecting", [this] { drive(spinwire_->engine()); },
        [this] { return spinwire_->ready(); });
    tell(Task::calls);
    calls_ = std::make_unique<CallClient>(Config{}, board.call_server.get());
    run_until(
        "the session is being opened", [this] { drive(calls_->engine()); },
        [this] { return calls_->ready(); });
  }

  Comparison compare(const Options& o, std::uint32_t window) {
    Comparison c{"two processes", window, {}, 0, 0};
    Placement before = probe();
    const auto slice = [&](PeerIndex peer, Task task, auto& client) {
      const std::uint64_t preempted = times_preempted() + tell(task);
      const double ns = run_slice(
          client, [&] { client.poll(); }, window, o.slice_ms * 1e6);
      const std::uint64_t preempted_after = times_preempted() + tell(Task::probe);
      const Placement after = placement_of(ask_probe(board_.ping, board_.pong));
      if (preempted_after != preempted || ns == 0) {
        ++c.preempted;
      } else if (before != after) {
        ++c.moved;
      } else {
        c.slices[peer][static_cast<std::size_t>(after)].push_back(ns);
      }
      before = after;
    };
    repeat(o, c, [&] {
      slice(kRing, Task::ring, *ring_);
      slice(kUcx, Task::ucx, *ucx_);
      slice(kSpinwire, Task::spinwire, *spinwire_);
      slice(kCalls, Task::calls, *calls_);
    });
    tell(Task::wait);
    return c;
  }

 private:
  /// Waits until the server has taken it up; how often that was preempted until then.
  std::uint64_t tell(Task task) {
    const std::uint64_t word = ++serial_ << 8 | static_cast<std::uint64_t>(task);
    board_.task.value.store(word, std::memory_order_release);
    std::uint32_t turns = 0;
    run_until(
        "the second process takes up a task",
        [&] {
          if ((++turns & 0xfffff) == 0) child_.check_alive();
        },
        [&] { return board_.taken.value.load(std::memory_order_acquire) == word; });
    return board_.preempted.value.load(std::memory_order_relaxed);
  }
  Placement probe() {
    tell(Task::probe);
    return placement_of(ask_probe(board_.ping, board_.pong));
  }

  Board& board_;
  const Child& child_;
  std::uint64_t serial_ = 0;
  std::unique_ptr<RingClient> ring_;
  std::unique_ptr<UcxClient> ucx_;
  std::unique_ptr<EchoClient> spinwire_;
  std::unique_ptr<CallClient> calls_;
};

int compare_all(const Options& o) {
  Board& board = make_board();
  const std::vector<int> cpus = processors();
  const Child child(board, cpus.back());
  pin(cpus.front());
  print_head(o.json);
  bool measured_any = false;
  const auto show = [&](const Comparison& c) {
    print(c, o.slices, o.json);
    measured_any = measured_any || c.fewest(c.best_class()) != 0;
  };
  OneThread one;
  for (const std::uint32_t window : {32u, 1u}) show(one.compare(o, window));
  if (cpus.size() < 2) {
    fmt::print(stderr, "two processes: left out, there is one processor only\n");
  } else {
    TwoProcesses two(board, child);
    for (const std::uint32_t window : {1u, 32u}) show(two.compare(o, window));
  }
  return measured_any ? 0 : 1;
}

}  // namespace
}  // namespace spinwire::bench

int main(int argc, char** argv) {
  spinwire::bench::Options options;
  CLI::App app(
      "32-byte round trips: a bare ring, UCX active messages, Spinwire's messages and calls");
  app.add_option("--slices", options.slices, "slices of each peer to take the median of")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_option("--slice-ms", options.slice_ms, "length of a slice, milliseconds")
      ->check(CLI::Range(0.5, 1000.0))
      ->capture_default_str();
  app.add_option("--limit", options.limit_seconds, "most seconds for each mode and window")
      ->check(CLI::Range(0.1, 3600.0))
      ->capture_default_str();
  app.add_flag("--json", options.json, "one JSON object a line instead of a table");
  CLI11_PARSE(app, argc, argv);
  return spinwire::bench::compare_all(options);
}
