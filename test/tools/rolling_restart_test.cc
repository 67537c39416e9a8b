// The replicated log, under load, while its nodes are restarted, killed and stopped at random.
// SPINWIRE_TEST_RESTARTS says how many restarts there are, and as many kills; a fifth as many
// times, a node stops for three seconds.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "eventually.h"
#include "spinwire/spinwire.h"
#include "tools/programs.h"

namespace rolling_restart_test {

using tools_test::bin;
using tools_test::Folder;
using tools_test::read_file;
using tools_test::Words;
using waiting::eventually;
using namespace std::chrono_literals;

constexpr std::size_t kNodes = 3;
constexpr std::size_t kRecord = 64;  // bytes
constexpr auto kStop = 3s;
constexpr auto kAlone = 200ms;  // less than a lease

/// A program whose output goes to files.
class Process {
 public:
  Process() = default;
  Process(Words words, const std::string& out) {
    std::vector<char*> argv;
    for (std::string& w : words) argv.push_back(w.data());
    argv.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ != 0) return;
    (void)::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const auto open_as = [](const std::string& path, int as) {
      ::dup2(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600), as);
    };
    open_as(out, STDOUT_FILENO);
    open_as(out + ".err", STDERR_FILENO);
    ::setenv("SPINWIRE_MEMORY_HUGEPAGES", "off", 1);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  Process(Process&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
  Process& operator=(Process&& other) noexcept {
    std::swap(pid_, other.pid_);
    return *this;
  }
  ~Process() {
    if (pid_ > 0) signal(SIGKILL), (void)end();
  }

  void signal(int number) const { ::kill(pid_, number); }
  /// Waits until it catches the signal.
  [[nodiscard]] bool catches(int number) const {
    return eventually([&] {
      const std::string status = tools_test::read_process_file(pid_, "status");
      const std::size_t at = status.find("SigCgt:");
      return at != std::string::npos &&
             (std::stoull(status.substr(at + 7), nullptr, 16) >> (number - 1) & 1) != 0;
    });
  }
  /// Waits for its end. Answers the exit code, or minus the signal; none: it does not end.
  std::optional<int> end() {
    int status = 0;
    if (!eventually([&] { return ::waitpid(pid_, &status, WNOHANG) == pid_; }, 120s))
      return std::nullopt;
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t pid_ = -1;
};

/// A loopback address that nothing else uses: outside of the ports that the system gives.
std::string free_address(std::mt19937_64& random) {
  for (;;) {
    const auto port = static_cast<std::uint16_t>(10'000 + random() % 20'000);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int bound = ::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address);
    ::close(fd);
    if (bound == 0) return "127.0.0.1:" + std::to_string(port);
  }
}

/// The nodes of a log.
class Cluster {
 public:
  Cluster(std::uint64_t seed, std::uint64_t records) : random_(seed) {
    std::set<std::string> addresses;
    while (addresses.size() != kNodes) addresses.insert(free_address(random_));
    for (const std::string& address : addresses) {
      addresses_.push_back(address);
      nodes_ += (nodes_.empty() ? "" : ",") + address;
    }
    for (std::size_t i = 0; i != kNodes; ++i)
      start(i, {"--new", "--records", std::to_string(records)});
  }

  /// Waits until all files have been made.
  [[nodiscard]] bool are_made() const {
    return eventually([&] { return head(0).magic && head(1).magic && head(2).magic; });
  }
  void start(std::size_t i, const Words& more = {}) {
    Words words{bin() + "/replicated-log",
                "--id",
                std::to_string(i),
                "--nodes",
                nodes_,
                "--file",
                file(i),
                "--journal",
                folder_ / ("journal." + std::to_string(i))};
    words.insert(words.end(), more.begin(), more.end());
    running_[i] = Process(std::move(words), folder_ / ("node." + std::to_string(i)));
  }
  /// Leaves a node's log no room, and gives its first record a text that is no text.
  void fill_up(std::size_t i) const {
    Head full = head(i);
    full.capacity = full.committed;
    std::string text = "\x1b[2J" + std::string(28, 'x');
    std::fstream out(file(i), std::ios::in | std::ios::out | std::ios::binary);
    out.write(reinterpret_cast<const char*>(&full), sizeof full);
    out.seekp(kRecord + 24).write(text.data(), static_cast<std::streamsize>(text.size()));
    out.close();
    std::filesystem::resize_file(file(i), (full.capacity + 1) * kRecord);
  }
  /// A node to disturb: the leader half the time.
  std::size_t choose() { return random_() % 2 != 0 ? random_() % kNodes : leader(); }
  [[nodiscard]] std::size_t leader() const {
    std::uint64_t epoch = 0;
    for (std::size_t i = 0; i != kNodes; ++i) epoch = std::max(epoch, head(i).epoch);
    return epoch % kNodes;
  }
  /// Whether records are committed from now on.
  bool makes_progress(std::uint64_t records = 20) {
    const std::uint64_t before = committed();
    return eventually([&] { return committed() >= before + records; }, 120s);
  }
  /// Whether all nodes know the same records to be committed.
  bool is_even() {
    return eventually([&] {
      return head(0).committed == head(1).committed && head(1).committed == head(2).committed;
    });
  }

  Process& operator[](std::size_t i) { return running_[i]; }
  [[nodiscard]] const std::string& address(std::size_t i) const { return addresses_[i]; }
  [[nodiscard]] const std::string& nodes() const { return nodes_; }
  [[nodiscard]] const Folder& folder() const { return folder_; }
  [[nodiscard]] std::string file(std::size_t i) const {
    return folder_ / ("log." + std::to_string(i));
  }
  std::mt19937_64& random() { return random_; }
  /// What went to stderr.
  [[nodiscard]] std::string errors() const {
    std::string all;
    for (std::size_t i = 0; i != kNodes; ++i)
      all += read_file(folder_ / ("node." + std::to_string(i) + ".err"));
    return all;
  }

 private:
  /// The first bytes of a node's file.
  struct Head {
    std::uint64_t magic = 0;
    std::uint64_t capacity = 0;
    std::uint64_t epoch = 0;
    std::uint64_t committed = 0;
  };
  [[nodiscard]] Head head(std::size_t i) const {
    Head head;
    std::ifstream(file(i), std::ios::binary).read(reinterpret_cast<char*>(&head), sizeof head);
    return head;
  }
  [[nodiscard]] std::uint64_t committed() const {
    std::uint64_t most = 0;
    for (std::size_t i = 0; i != kNodes; ++i) most = std::max(most, head(i).committed);
    return most;
  }

  std::mt19937_64 random_;
  Folder folder_;
  std::vector<std::string> addresses_;
  std::string nodes_;
  std::array<Process, kNodes> running_;
};

enum class Event { restart, kill, stop };

/// Kills a node after the others have stopped for a time: what it answers meanwhile, nobody else
/// has.
void kill_alone(Cluster& nodes, std::size_t i) {
  const std::array others{(i + 1) % kNodes, (i + 2) % kNodes};
  for (const std::size_t other : others) nodes[other].signal(SIGSTOP);
  const auto end = std::chrono::steady_clock::now() + kAlone;
  EXPECT_TRUE(eventually([&] { return std::chrono::steady_clock::now() >= end; }));
  nodes[i].signal(SIGKILL);
  EXPECT_EQ(nodes[i].end(), -SIGKILL) << nodes.errors();
  for (const std::size_t other : others) nodes[other].signal(SIGCONT);
  nodes.start(i);
}

void disturb(Cluster& nodes, Event event) {
  const std::size_t i = nodes.choose();
  std::vector<std::size_t> victims{i};
  if (nodes.random()() % 3 == 0) victims.push_back((i + 1) % kNodes);
  const auto begin = std::chrono::steady_clock::now();
  switch (event) {
    case Event::restart:
      ASSERT_TRUE(nodes[i].catches(SIGTERM)) << nodes.errors();
      nodes[i].signal(SIGTERM);
      EXPECT_EQ(nodes[i].end(), 0) << nodes.errors();
      return nodes.start(i);
    case Event::kill:
      if (nodes.random()() % 3 == 0) return kill_alone(nodes, nodes.leader());
      // One time in three a majority dies at once.
      for (const std::size_t v : victims) nodes[v].signal(SIGKILL);
      for (const std::size_t v : victims) {
        EXPECT_EQ(nodes[v].end(), -SIGKILL) << nodes.errors();
      }
      for (const std::size_t v : victims) nodes.start(v);
      return;
    case Event::stop:
      nodes[i].signal(SIGSTOP);
      // The others go on without it.
      EXPECT_TRUE(nodes.makes_progress());
      EXPECT_TRUE(eventually([&] { return std::chrono::steady_clock::now() - begin >= kStop; }));
      return nodes[i].signal(SIGCONT);
  }
}

/// What the writers of a client were told: their last numbers.
std::map<std::string, std::uint64_t> answered_of(const std::string& output) {
  std::map<std::string, std::uint64_t> writers;
  std::istringstream in(output);
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("writer "))
      writers[line.substr(7, 16)] = std::stoull(line.substr(line.find(':') + 1));
  }
  return writers;
}

/// Each record of each writer must be in the log once, in order, and no other.
void check_log(const std::string& log, const std::map<std::string, std::uint64_t>& answered) {
  std::map<std::string, std::uint64_t> found;
  std::istringstream in(log);
  std::uint64_t index = 0, epoch = 0, number = 0;
  std::string writer, hash, text;
  for (std::uint64_t expected = 0; in >> index >> epoch >> writer >> number >> hash; ++expected) {
    std::getline(in, text);
    ASSERT_EQ(index, expected);
    if (writer == std::string(16, '0')) continue;  // a leader's own
    ASSERT_TRUE(answered.contains(writer)) << writer;
    ASSERT_EQ(number, ++found[writer]) << "writer " << writer << ", record " << index;
    ASSERT_EQ(text, " record " + std::to_string(number));
  }
  EXPECT_EQ(found, answered);
}

/// No call may have run twice: neither at one node nor at two.
void check_calls(const Cluster& nodes) {
  struct Call {
    std::uint64_t client, number, attempt;
  };
  std::set<std::pair<std::uint64_t, std::uint64_t>> calls;
  for (std::size_t i = 0; i != kNodes; ++i) {
    const std::string journal = read_file(nodes.folder() / ("journal." + std::to_string(i)));
    EXPECT_EQ(journal.size() % sizeof(Call), 0u);
    for (std::size_t at = 0; at + sizeof(Call) <= journal.size(); at += sizeof(Call)) {
      Call call{};
      std::memcpy(&call, journal.data() + at, sizeof call);
      EXPECT_TRUE(calls.emplace(call.client, call.attempt).second)
          << "attempt " << call.attempt << ", record " << call.number;
    }
  }
  std::printf("  %zu calls ran\n", calls.size());
}

class SlowRollingRestart : public tools_test::Tools {};

TEST_F(SlowRollingRestart, NoAnsweredRecordIsLostAndNoCallRunsTwice) {
  const char* const given = std::getenv("SPINWIRE_TEST_RESTARTS");
  const int count = given != nullptr ? std::atoi(given) : 5;
  const std::uint64_t seed = std::random_device()();
  std::printf("  seed %" PRIu64 "\n", seed);
  Cluster nodes(seed, 1'000'000 + 20'000 * static_cast<std::uint64_t>(count));
  ASSERT_TRUE(nodes.are_made()) << nodes.errors();
  std::vector<Event> events;
  for (int i = 0; i != count; ++i) events.insert(events.end(), {Event::restart, Event::kill});
  events.insert(events.end(), static_cast<std::size_t>(std::max(count / 5, 2)), Event::stop);
  std::shuffle(events.begin(), events.end(), nodes.random());

  std::array<Process, 2> clients;
  for (std::size_t i = 0; i != clients.size(); ++i)
    clients[i] =
        Process({bin() + "/log-client", "append", "--nodes", nodes.nodes(), "--interval", "4ms"},
                nodes.folder() / ("client." + std::to_string(i)));
  ASSERT_TRUE(nodes.makes_progress()) << nodes.errors();
  for (const Event event : events) {
    disturb(nodes, event);
    // One of four events comes while the nodes still recover from the one before.
    if (nodes.random()() % 4 != 0) {
      ASSERT_TRUE(nodes.makes_progress()) << nodes.errors();
    }
    if (HasFailure()) return;
  }

  std::map<std::string, std::uint64_t> answered;
  for (std::size_t i = 0; i != clients.size(); ++i) {
    clients[i].signal(SIGTERM);  // the last records are answered, too
    const std::string output = nodes.folder() / ("client." + std::to_string(i));
    ASSERT_EQ(clients[i].end(), 0) << read_file(output + ".err");
    answered.merge(answered_of(read_file(output)));
    const std::string text = read_file(output);
    std::printf("  client %zu: %s", i, text.substr(text.rfind('\n', text.size() - 2) + 1).c_str());
  }
  ASSERT_EQ(answered.size(), 8u);
  ASSERT_TRUE(nodes.is_even()) << nodes.errors();
  for (std::size_t i = 0; i != kNodes; ++i) {
    const std::string output = nodes.folder() / ("read." + std::to_string(i));
    Process reader({bin() + "/log-client", "read", nodes.address(i)}, output);
    ASSERT_EQ(reader.end(), 0) << read_file(output + ".err");
    if (i == 0) check_log(read_file(output), answered);
    // All nodes have the same records, and so a majority has.
    EXPECT_TRUE(read_file(output) == read_file(nodes.folder() / "read.0")) << "node " << i;
  }
  check_calls(nodes);
  for (std::size_t i = 0; i != kNodes; ++i) {
    nodes[i].signal(SIGTERM);
    EXPECT_EQ(nodes[i].end(), 0) << nodes.errors();
  }
}

tools_test::Outcome append(const Cluster& nodes, const char* count, const char* interval = "2ms") {
  return tools_test::run(
      "log-client", {"append", "--nodes", nodes.nodes(), "--count", count, "--interval", interval});
}

TEST_F(SlowRollingRestart, ALostFileIsMadeAgainFromTheOtherTwo) {
  Cluster nodes(std::random_device{}(), 10'000);
  ASSERT_TRUE(nodes.are_made()) << nodes.errors();
  ASSERT_EQ(append(nodes, "200").code, 0) << nodes.errors();
  const std::size_t lost = nodes.leader();
  nodes[lost].signal(SIGKILL);
  ASSERT_EQ(nodes[lost].end(), -SIGKILL) << nodes.errors();
  ASSERT_EQ(::unlink(nodes.file(lost).c_str()), 0);
  // The node does not start as if it had never had a file.
  nodes.start(lost);
  ASSERT_EQ(nodes[lost].end(), 1);
  EXPECT_NE(nodes.errors().find("there is no such file"), std::string::npos) << nodes.errors();

  ASSERT_EQ(append(nodes, "1").code, 0) << nodes.errors();
  nodes.start(lost, {"--new", "--records", "10000"});
  ASSERT_TRUE(nodes.is_even()) << nodes.errors();
  // From now on it is as good as the others: with one of them it has everything.
  const std::size_t next = nodes.leader();
  nodes[next].signal(SIGKILL);
  ASSERT_EQ(nodes[next].end(), -SIGKILL) << nodes.errors();
  ASSERT_EQ(append(nodes, "1").code, 0) << nodes.errors();
  const tools_test::Outcome read = tools_test::run("log-client", {"read", nodes.address(lost)});
  std::size_t records = 0;
  for (std::size_t at = 0; (at = read.out.find(" record ", at)) != std::string::npos; ++at)
    ++records;
  EXPECT_GE(records, 201u) << nodes.errors();  // it may not know yet that the last one is committed
}

TEST_F(SlowRollingRestart, AFullLogRefusesAndIsRead) {
  Cluster nodes(std::random_device{}(), 8192);
  ASSERT_TRUE(nodes.are_made()) << nodes.errors();
  const tools_test::Outcome most = append(nodes, "5000", "10us");
  EXPECT_EQ(most.code, 1) << most.out;
  EXPECT_NE(most.err.find(": the log is full"), std::string::npos) << most.err;
  ASSERT_TRUE(nodes.is_even()) << nodes.errors();
  for (std::size_t i = 0; i != kNodes; ++i) {
    nodes[i].signal(SIGTERM);
    EXPECT_EQ(nodes[i].end(), 0) << nodes.errors();
    nodes.fill_up(i);
    nodes.start(i);
  }
  // There is no room for a leader's own record either, but there is a leader.
  const tools_test::Outcome more = append(nodes, "1");
  EXPECT_EQ(more.code, 1) << more.out;
  EXPECT_NE(more.err.find(": the log is full"), std::string::npos) << more.err;
  const tools_test::Outcome read = tools_test::run("log-client", {"read", nodes.address(0)});
  EXPECT_EQ(read.code, 0) << read.err;
  EXPECT_NE(read.out.find(" ?[2J" + std::string(28, 'x') + '\n'), std::string::npos);
}

TEST_F(SlowRollingRestart, WhatIsNoRecordIsRefused) {
  struct Append {  // as in the example
    std::uint64_t client, number, attempt;
    char text[32];
  };
  const Cluster nodes(std::random_device{}(), 8192);
  spinwire::Config config = *spinwire::Config::load();
  config.engine.control = spinwire::ControlMode::automatic;
  config.memory.hugepages = spinwire::HugepagePolicy::off;
  std::string answer;
  spinwire::Engine engine = *spinwire::Engine::open(config);
  spinwire::SessionOptions options;
  options.reconnect = {.attempts = ~0u, .first_delay = 5ms, .max_delay = 50ms};
  options.when_not_ready = spinwire::WhenNotReady::wait;
  spinwire::Session session = *engine.open_session(nodes.address(0), options);
  bool is_under_way = false;
  const auto done = [&](spinwire::Reply& reply) {
    is_under_way = false;
    answer = reply.text();
  };
  for (const Append& append : {Append{0, 1, 1, "a leader's own"}, Append{5, 0, 2, "no number"},
                               Append{5, 1, 3, "\x1b[2J"}, Append{5, 1, 4, "two\nlines"}}) {
    answer.clear();
    EXPECT_TRUE(eventually([&] {
      if (!is_under_way)
        is_under_way =
            session.call(1, std::as_bytes(std::span(&append, 1)), done) == spinwire::Status::ok;
      (void)engine.poll();
      return !answer.empty();
    })) << nodes.errors();
    EXPECT_EQ(answer, "this is no record") << append.text;
  }
  engine = spinwire::Engine();
}

}  // namespace rolling_restart_test
