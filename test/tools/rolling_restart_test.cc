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
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "eventually.h"
#include "tools/programs.h"

namespace rolling_restart_test {

using tools_test::bin;
using tools_test::Folder;
using tools_test::read_file;
using tools_test::Words;
using waiting::eventually;
using namespace std::chrono_literals;

constexpr std::size_t kNodes = 3;
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
  explicit Cluster(std::uint64_t seed) : random_(seed) {
    std::set<std::string> addresses;
    while (addresses.size() != kNodes) addresses.insert(free_address(random_));
    for (const std::string& address : addresses) {
      addresses_.push_back(address);
      nodes_ += (nodes_.empty() ? "" : ",") + address;
    }
    for (std::size_t i = 0; i != kNodes; ++i) start(i);
  }

  void start(std::size_t i) {
    running_[i] = Process(
        {bin() + "/replicated-log", "--id", std::to_string(i), "--nodes", nodes_, "--records",
         "8000000", "--file", file(i), "--journal", folder_ / ("journal." + std::to_string(i))},
        folder_ / ("node." + std::to_string(i)));
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
    std::uint64_t epoch = 0;
    std::uint64_t committed = 0;
  };
  [[nodiscard]] std::string file(std::size_t i) const {
    return folder_ / ("log." + std::to_string(i));
  }
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
  Cluster nodes(seed);
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

}  // namespace rolling_restart_test
