// Engines on softverbs as a device of libibverbs: the programs and suites of the embedded device
// run through libibverbs, under softverbs-preload.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

namespace preload_engine_test {

using Words = std::vector<std::string>;

constexpr auto kLimit = std::chrono::minutes(10);

std::string bin() {
  const char* folder = std::getenv("SPINWIRE_BIN");
  return folder != nullptr ? folder : "build/bin";
}

struct Outcome {
  int code = -1;  ///< -1 if it hung or a signal ended it
  std::string output;
};

/// Runs one of our programs to its end.
Outcome run(Words words) {
  words.insert(words.begin(), bin() + "/softverbs-preload");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const int output = ::memfd_create("output", MFD_CLOEXEC);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(output, STDOUT_FILENO);
    ::dup2(output, STDERR_FILENO);
    ::setenv("SPINWIRE_MEMORY_HUGEPAGES", "off", 1);
    ::setenv("SPINWIRE_DEVICE_NAME", "rdma-core:softverbs", 1);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  const int ended = static_cast<int>(::syscall(SYS_pidfd_open, child, 0));
  pollfd end{ended, POLLIN, 0};
  const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(kLimit);
  if (::poll(&end, 1, static_cast<int>(limit.count())) <= 0) ::kill(child, SIGKILL);
  ::close(ended);
  int status = -1;
  ::waitpid(child, &status, 0);
  Outcome outcome;
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  outcome.output.resize(static_cast<std::size_t>(::lseek(output, 0, SEEK_END)));
  (void)::pread(output, outcome.output.data(), outcome.output.size(), 0);
  ::close(output);
  return outcome;
}

void expect_said(const Outcome& outcome, const std::string& said) {
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_NE(outcome.output.find(said), std::string::npos) << outcome.output;
}

TEST(PreloadEngine, OpensWhatTheListShows) {
  const Outcome outcome = run({bin() + "/spinwire-devices", "--open", "--device", "auto"});
  expect_said(outcome, "* rdma-core:softverbs port 1 GID 0 (RoCEv2, fd53:5702:");
  expect_said(outcome, "opened rdma-core:softverbs, port 1, GID 0");
  expect_said(outcome, "memory windows yes");
}

TEST(PreloadEngine, TwoProcessesEcho) {
  expect_said(run({bin() + "/echo", "both", "-n", "300"}), "300 round trips of 32 bytes");
  expect_said(run({bin() + "/echo", "both", "-n", "50", "-s", "4096"}), "50 round trips of 4096");
}

TEST(PreloadEngine, OneSidedOperations) {
  for (const char* op : {"read", "write"}) {
    expect_said(
        run({bin() + "/spinwire-perf", "bw", "--one-thread", "-o", op, "-s", "64KiB", "-n", "40"}),
        "40 operations");
  }
}

/// The suites of engines, connections and credit. Two tests are left out, because the preloaded
/// device takes locks and has its own clock.
TEST(SlowPreloadEngine, AllSuitesOfEngines) {
  expect_said(run({"env", "SPINWIRE_TEST_DEVICE=rdma-core:softverbs", bin() + "/spinwire-tests",
                   "--gtest_filter=Engine*:Credits.*:PeerLoss*-EngineZeroCost.NoSystemCalls:"
                   "PeerLoss.OurOwnPause*",
                   "--gtest_brief=1"}),
              "PASSED");
}

}  // namespace preload_engine_test
