// Unmodified third-party programs on the embedded device. Each test runs one as server and client,
// in two processes, as users do.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace preload_test {

using Clock = std::chrono::steady_clock;
using Words = std::vector<std::string>;

std::string bin() {
  const char* folder = std::getenv("SPINWIRE_BIN");
  return folder != nullptr ? folder : "build/bin";
}

bool installed(const std::string& program) {
  std::istringstream path(std::getenv("PATH"));
  for (std::string folder; std::getline(path, folder, ':');) {
    if (::access((folder + "/" + program).c_str(), X_OK) == 0) return true;
  }
  return false;
}

/// A program under softverbs-preload. Keeps its output; the destructor kills it.
class Program {
 public:
  explicit Program(Words words) {
    words.insert(words.begin(), bin() + "/softverbs-preload");
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    output_ = ::memfd_create("output", MFD_CLOEXEC);
    pid_ = ::fork();
    if (pid_ > 0) pidfd_ = static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));
    if (pid_ == 0) {
      ::dup2(output_, STDOUT_FILENO);
      ::dup2(output_, STDERR_FILENO);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ~Program() {
    if (!ended()) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    ::close(pidfd_);
    ::close(output_);
  }
  bool ended() {
    if (pid_ > 0 && ::waitpid(pid_, &status_, WNOHANG) == pid_) pid_ = -1;
    return pid_ < 0;
  }
  /// Waits until the program has ended or the time is over.
  void wait_for_end(Clock::time_point until) const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    pollfd end{pidfd_, POLLIN, 0};
    if (left > 0) (void)::poll(&end, 1, static_cast<int>(left));
  }
  /// Returns the exit code, -1 after the time limit, or -2 if a signal ended the program.
  int wait(Clock::time_point end) {
    wait_for_end(end);
    if (!ended()) return -1;
    return WIFEXITED(status_) ? WEXITSTATUS(status_) : -2;
  }
  [[nodiscard]] std::string output() const {
    std::string text(static_cast<std::size_t>(::lseek(output_, 0, SEEK_END)), '\0');
    const ssize_t got = ::pread(output_, text.data(), text.size(), 0);
    text.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
    return text;
  }

 private:
  pid_t pid_ = -1;
  int pidfd_ = -1;
  int output_ = -1;
  int status_ = 0;
};

std::uint16_t free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t length = sizeof address;
  (void)::bind(socket, reinterpret_cast<sockaddr*>(&address), length);
  (void)::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length);
  ::close(socket);
  return ntohs(address.sin_port);
}

/// Whether a process listens. Does not connect: the server would take that for its client.
bool listened_to(std::uint16_t port) {
  char wanted[16];
  std::snprintf(wanted, sizeof wanted, ":%04X", port);
  for (const char* file : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream table(file);
    for (std::string line; std::getline(table, line);) {
      std::istringstream words(line);
      std::string number, local, remote, state;
      words >> number >> local >> remote >> state;
      if (local.ends_with(wanted) && state == "0A") return true;
    }
  }
  return false;
}

struct Outcome {
  int server = -1;
  int client = -1;
  std::string server_output;
  std::string client_output;
};

Outcome run_pair(const Words& command, std::chrono::seconds limit) {
  const auto end = Clock::now() + limit;
  Outcome outcome;
  for (int attempt = 0; attempt < 3; ++attempt) {
    const std::uint16_t port = free_port();
    Words words = command;
    words.insert(words.end(), {"-p", std::to_string(port)});
    Program server(words);
    // A server does not report that it listens, so this polls for it, and for the server's end.
    while (!listened_to(port) && !server.ended() && Clock::now() < end)
      server.wait_for_end(Clock::now() + std::chrono::milliseconds(5));
    outcome.server_output = server.output();
    if (server.ended() && outcome.server_output.find("in use") != std::string::npos)
      continue;  // another process took the port
    words.emplace_back("localhost");
    Program client(words);
    outcome.client = client.wait(end);
    outcome.server = server.wait(end);
    outcome.server_output = server.output();
    outcome.client_output = client.output();
    return outcome;
  }
  return outcome;
}

void expect_good(const Words& command, const std::string& said = {}) {
  SCOPED_TRACE(testing::PrintToString(command));
  const Outcome outcome = run_pair(command, std::chrono::minutes(10));
  EXPECT_EQ(outcome.server, 0) << outcome.server_output;
  EXPECT_EQ(outcome.client, 0) << outcome.client_output;
  EXPECT_NE(outcome.client_output.find(said), std::string::npos) << outcome.client_output;
  // With -c the ping-pongs report wrong bytes but exit with 0.
  EXPECT_EQ(outcome.client_output.find("invalid data"), std::string::npos) << outcome.client_output;
  EXPECT_EQ(outcome.server_output.find("invalid data"), std::string::npos) << outcome.server_output;
}

#define SKIP_UNLESS_INSTALLED(program, package) \
  if (!installed(program)) GTEST_SKIP() << "install the package " package

TEST(Preload, ShowsTheDevice) {
  SKIP_UNLESS_INSTALLED("ibv_devinfo", "ibverbs-utils");
  Program info({"ibv_devinfo", "-v", "-d", "softverbs"});
  ASSERT_EQ(info.wait(Clock::now() + std::chrono::seconds(20)), 0) << info.output();
  const std::string text = info.output();
  for (const char* part : {"hca_id:\tsoftverbs", "PORT_ACTIVE", "GID[  0]:", "RoCE v2"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(Preload, WithoutItThereIsNone) {
  SKIP_UNLESS_INSTALLED("ibv_devinfo", "ibverbs-utils");
  Program info({"env", "-u", "LD_PRELOAD", "ibv_devinfo", "-d", "softverbs"});
  const int code = info.wait(Clock::now() + std::chrono::seconds(60));
  EXPECT_GT(code, 0) << info.output();
  EXPECT_NE(code, 127) << "softverbs-preload is not built";
}

TEST(Preload, PingPongs) {
  SKIP_UNLESS_INSTALLED("ibv_rc_pingpong", "ibverbs-utils");
  for (const Words& extra :
       {Words{}, Words{"-c", "-s", "1000000", "-n", "20"}, Words{"-c", "-s", "1", "-r", "10"},
        Words{"-c", "-e"}, Words{"-c", "-N"}}) {
    Words words{"ibv_rc_pingpong", "-d", "softverbs", "-g", "0"};
    words.insert(words.end(), extra.begin(), extra.end());
    expect_good(words, "iters in");
  }
  for (const char* program : {"ibv_ud_pingpong", "ibv_srq_pingpong"}) {
    for (const char* events : {"-c", "-e"})
      expect_good({program, "-d", "softverbs", "-g", "0", "-c", events}, "iters in");
  }
}

TEST(SlowPreload, TwoThatEndWithMessagesOnTheWayDoNotDisturbEachOther) {
  SKIP_UNLESS_INSTALLED("ibv_srq_pingpong", "ibverbs-utils");
  // 16 queue pairs; the end that has all its messages first leaves.
  for (int i = 0; i < 20 && !HasFailure(); ++i) {
    for (const char* size : {"64", "4096"}) {
      expect_good({"ibv_srq_pingpong", "-d", "softverbs", "-g", "0", "-e", "-n", "300", "-s", size},
                  "iters in");
    }
  }
}

TEST(Preload, ThreadsChannelsAndLeftovers) {
  Program program({bin() + "/preload-many-threads"});
  EXPECT_EQ(program.wait(Clock::now() + std::chrono::minutes(10)), 0) << program.output();
  EXPECT_EQ(program.output(), "done\n");
}

/// The names that a library defines.
std::vector<std::string> names_of(const std::string& library) {
  std::vector<std::string> names;
  const std::string command = "nm -D --defined-only --without-symbol-versions " + library;
  FILE* output = ::popen(command.c_str(), "r");
  char address[64], kind[8], name[256];
  while (std::fscanf(output, "%63s %7s %255s", address, kind, name) == 3) {
    if (kind[0] == 'T') names.emplace_back(name);
  }
  ::pclose(output);
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

TEST(Preload, NoNameReachesLibibverbsWithAnObjectOfOurs) {
  Dl_info libibverbs{};
  ASSERT_NE(::dladdr(reinterpret_cast<void*>(&::ibv_free_device_list), &libibverbs), 0);
  const std::vector<std::string> theirs = names_of(libibverbs.dli_fname);
  const std::vector<std::string> ours = names_of(bin() + "/../lib/libsoftverbs-preload.so");
  ASSERT_GT(theirs.size(), 80u);
  // Numbers, texts, plain structs and files; the acknowledging counts into fields of the object's
  // own.
  const std::set<std::string> harmless = {
      "ibv_ack_async_event",        "ibv_ack_cq_events",
      "ibv_copy_ah_attr_from_kern", "ibv_copy_path_rec_from_kern",
      "ibv_copy_path_rec_to_kern",  "ibv_copy_qp_attr_from_kern",
      "ibv_dofork_range",           "ibv_dontfork_range",
      "ibv_event_type_str",         "ibv_fork_init",
      "ibv_get_sysfs_path",         "ibv_is_fork_initialized",
      "ibv_node_type_str",          "ibv_port_state_str",
      "ibv_rate_to_mbps",           "ibv_rate_to_mult",
      "ibv_read_ibdev_sysfs_file",  "ibv_read_sysfs_file",
      "ibv_register_driver",        "ibv_wc_status_str",
      "mbps_to_ibv_rate",           "mult_to_ibv_rate"};
  for (const std::string& name : theirs) {
    // For drivers of other devices, which never get objects of softverbs.
    const bool of_drivers = name.starts_with("ibv_cmd_") || name.starts_with("verbs_") ||
                            name.starts_with("_verbs_") || name.starts_with("__") ||
                            name == "execute_ioctl";
    if (of_drivers || harmless.contains(name)) continue;
    EXPECT_TRUE(std::binary_search(ours.begin(), ours.end(), name)) << name;
  }
}

TEST(Preload, EveryCallAnswersOrIsRefused) {
  Program program({bin() + "/preload-every-call"});
  EXPECT_EQ(program.wait(Clock::now() + std::chrono::minutes(10)), 0) << program.output();
  EXPECT_EQ(program.output(), "done\n");
}

TEST(Preload, UcxUsesTheDevice) {
  SKIP_UNLESS_INSTALLED("ucx_info", "ucx-utils");
  Program info({"ucx_info", "-d"});
  ASSERT_EQ(info.wait(Clock::now() + std::chrono::minutes(10)), 0) << info.output();
  EXPECT_NE(info.output().find("Device: softverbs:1"), std::string::npos) << info.output();
  for (const char* transport : {"rc_verbs", "ud_verbs"}) {
    expect_good({"ucx_perftest", "-d", "softverbs:1", "-x", transport, "-t", "am_lat", "-n", "1000",
                 "-s", "32"},
                "Final:");
  }
}

Words perftest(const std::string& program, const Words& extra) {
  Words words{program, "-d", "softverbs", "-F", "-x", "0"};
  words.insert(words.end(), extra.begin(), extra.end());
  return words;
}

TEST(Preload, Measurements) {
  SKIP_UNLESS_INSTALLED("ib_send_lat", "perftest");
  for (const char* program :
       {"ib_send_lat", "ib_write_lat", "ib_read_lat", "ib_send_bw", "ib_write_bw", "ib_read_bw"})
    expect_good(perftest(program, {"-n", "40", "-s", "3000"}), "3000");
  for (const char* program : {"ib_atomic_lat", "ib_atomic_bw"})
    expect_good(perftest(program, {"-n", "40"}), " 8 ");
}

TEST(Preload, MeasurementsOfDatagrams) {
  SKIP_UNLESS_INSTALLED("ib_send_lat", "perftest");
  expect_good(perftest("ib_send_lat", {"-c", "UD", "-n", "40"}), " 2 ");
  // More bytes than a lane holds, with a receiver that waits for each datagram.
  expect_good(perftest("ib_send_bw", {"-c", "UD"}), " 4096 ");
}

TEST(SlowPreload, MeasurementsInOtherWays) {
  SKIP_UNLESS_INSTALLED("ib_send_bw", "perftest");
  for (const char* program : {"ib_send_bw", "ib_write_bw", "ib_read_bw"})
    expect_good(perftest(program, {"-a", "-n", "20"}), "8388608");
  // One size only: these programs measure the processor's frequency before each size.
  for (const char* program : {"ib_send_lat", "ib_write_lat", "ib_read_lat"})
    expect_good(perftest(program, {"-s", "8388608", "-n", "10"}), "8388608");
  expect_good(perftest("ib_send_bw", {"-c", "UD", "-b", "-n", "20000", "-s", "64"}), " 64 ");
  for (const Words& extra : {Words{"-q", "4"}, Words{"-b"}, Words{"-e"}, Words{"--use-srq"},
                             Words{"--use_old_post_send"}, Words{"-I", "200", "-s", "64"}}) {
    Words words = perftest("ib_send_bw", {"-n", "100"});
    words.insert(words.end(), extra.begin(), extra.end());
    expect_good(words);
  }
}

TEST(Preload, TheCommandTellsItsUse) {
  Program none({});
  EXPECT_EQ(none.wait(Clock::now() + std::chrono::seconds(20)), 2);
  EXPECT_NE(none.output().find("usage:"), std::string::npos);
  Program exits({"sh", "-c", "exit 7"});
  EXPECT_EQ(exits.wait(Clock::now() + std::chrono::seconds(20)), 7) << exits.output();
}

}  // namespace preload_test
