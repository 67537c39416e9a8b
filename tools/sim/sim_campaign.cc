#include "sim/sim_campaign.h"

#include <fmt/core.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "common/cli.h"
#include "spinwire/spinwire.h"

namespace spinwire::tools {

void SimSum::add(std::uint64_t seed, const SimOutcome& outcome) noexcept {
  ++runs;
  calls += outcome.calls;
  // The sum of traces depends only on the runs, not on the process that ran them.
  const std::uint64_t mixed = (outcome.trace ^ seed * 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
  trace += mixed ^ mixed >> 31;
  least_nodes = std::min(least_nodes, outcome.nodes);
  least_calls = std::min(least_calls, outcome.calls);
  for (std::size_t i = 0; i < ended.size(); ++i) ended[i] += outcome.ended[i];
  for (std::size_t i = 0; i < happened.size(); ++i) {
    happened[i] += outcome.happened[i];
    runs_with[i] += outcome.happened[i] != 0 ? 1 : 0;
  }
}

void SimSum::add(const SimSum& other) noexcept {
  runs += other.runs;
  calls += other.calls;
  trace += other.trace;
  least_nodes = std::min(least_nodes, other.least_nodes);
  least_calls = std::min(least_calls, other.least_calls);
  for (std::size_t i = 0; i < ended.size(); ++i) ended[i] += other.ended[i];
  for (std::size_t i = 0; i < happened.size(); ++i) {
    happened[i] += other.happened[i];
    runs_with[i] += other.runs_with[i];
  }
}

namespace {

using Watch = std::chrono::steady_clock;

constexpr std::uint64_t kNoSeed = ~std::uint64_t{0};

struct SimJob {
  SimSum sum;
  std::atomic<std::uint64_t> running{kNoSeed};  ///< the seed of its run
  pid_t process = 0;
};

/// Shared memory of the processes.
struct Board {
  std::atomic<std::uint64_t> first_failed{kNoSeed};
  std::atomic<std::uint32_t> failed{0};  ///< failed runs
  std::atomic<bool> stop{false};
  SimJob jobs[kMostSimJobs];

  void fail(std::uint64_t seed) noexcept {
    failed.fetch_add(1);
    std::uint64_t first = first_failed.load();
    while (seed < first && !first_failed.compare_exchange_weak(first, seed)) {
    }
  }
};

struct Unmap {
  void operator()(Board* board) const noexcept {
    ::munmap(static_cast<void*>(board), sizeof(Board));
  }
};
using BoardPtr = std::unique_ptr<Board, Unmap>;

BoardPtr make_board() {
  void* const at =
      ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return BoardPtr(at == MAP_FAILED ? nullptr : new (at) Board);
}

void print_run(std::uint64_t seed, const SimOutcome& o) {
  std::string text =
      fmt::format("seed {}: {} nodes, {} calls, {} sessions, {} ms, trace {:016x}\n ", seed,
                  o.nodes, o.calls, o.sessions, o.time.count() / 1'000'000, o.trace);
  for (std::size_t i = 0; i < kSimEvents; ++i)
    text += fmt::format(" {} {},", o.happened[i], name_of(static_cast<SimEvent>(i)));
  text.back() = '\n';
  fmt::print("{}", text);
  std::fflush(stdout);
}

/// Prints in one piece, as other processes print at the same time.
void tell(std::uint64_t seed, const std::vector<std::string>& failures) {
  std::string text;
  for (const std::string& failure : failures) text += fmt::format("seed {}: {}\n", seed, failure);
  fmt::print(stderr, "{}", text);
}

bool run_seed(const SimCampaign& campaign, std::uint64_t seed, SimSum& sum) {
  const SimOutcome outcome = run_sim_workload(seed, campaign.workload);
  std::vector<std::string> failures = outcome.failures;
  if (failures.empty() && campaign.twice) {
    const std::uint64_t again = run_sim_workload(seed, campaign.workload).trace;
    if (again != outcome.trace)
      failures.push_back(
          fmt::format("two runs differ: traces {:016x} and {:016x}", outcome.trace, again));
  }
  if (campaign.verbose) print_run(seed, outcome);
  if (failures.empty()) {
    sum.add(seed, outcome);
  } else {
    tell(seed, failures);
  }
  return failures.empty();
}

/// Keeps freed memory in the heap: the next run needs it, and page faults cost time.
void keep_heap() noexcept {
  constexpr int kMost = 1 << 28;
  (void)::mallopt(M_TRIM_THRESHOLD, kMost);
  (void)::mallopt(M_MMAP_THRESHOLD, 1 << 25);
}

/// Runs every campaign.jobs-th seed, starting at this job's number.
void work(const SimCampaign& campaign, Board& board, std::uint32_t number,
          Watch::time_point begun) {
  SimJob& job = board.jobs[number];
  keep_heap();
  const auto over = [&] {
    return stop_requested() || board.stop.load() ||
           (campaign.seconds != 0 && Watch::now() - begun > std::chrono::seconds(campaign.seconds));
  };
  for (std::uint64_t i = number; i < campaign.runs && !over(); i += campaign.jobs) {
    const std::uint64_t seed = campaign.seed + i;
    if (seed > board.first_failed.load()) break;
    job.running.store(seed);
    if (!run_seed(campaign, seed, job.sum)) return board.fail(seed);
  }
}

/// Records the end of a process: a failure, unless it exited with 0.
void record_exit(Board& board, pid_t process, int status) {
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
  const auto* const job = std::find_if(std::begin(board.jobs), std::end(board.jobs),
                                       [=](const SimJob& j) { return j.process == process; });
  if (job == std::end(board.jobs)) return;
  const std::uint64_t seed = job->running.load();
  tell(seed, {WIFSIGNALED(status)
                  ? fmt::format("the process that ran it died of signal {}", WTERMSIG(status))
                  : fmt::format("the process that ran it ended with {}", WEXITSTATUS(status))});
  board.fail(seed);
}

void share_out(const SimCampaign& campaign, Board& board, Watch::time_point begun) {
  std::fflush(nullptr);
  const pid_t parent = ::getpid();
  std::uint32_t running = 0;
  for (std::uint32_t i = 0; i < campaign.jobs; ++i) {
    const pid_t process = ::fork();
    if (process == 0) {
      // A child must not outlive its parent.
      ::prctl(PR_SET_PDEATHSIG, SIGTERM);
      if (::getppid() == parent) work(campaign, board, i, begun);
      std::fflush(nullptr);
      ::_exit(kDone);
    }
    if (process < 0) {
      (void)fail(Error{Status::system, "share runs among processes", "fork() failed", ""});
      board.stop.store(true);
      board.fail(campaign.seed + i);
      break;
    }
    board.jobs[i].process = process;
    ++running;
  }
  while (running != 0) {
    int status = 0;
    const pid_t ended = ::waitpid(-1, &status, WNOHANG);
    if (ended < 0 && errno != EINTR) break;
    if (ended > 0) {
      --running;
      record_exit(board, ended, status);
    } else {
      if (stop_requested()) board.stop.store(true);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
}

/// Prints what happened. A campaign of kRunsOfAll runs or more fails if an event never occurred.
bool complete(const SimSum& sum) {
  bool all = true;
  for (std::size_t i = 0; i < kSimEvents; ++i) {
    const char* const name = name_of(static_cast<SimEvent>(i));
    fmt::print("  {:>10} {} in {} runs\n", sum.happened[i], name, sum.runs_with[i]);
    if (sum.runs < kRunsOfAll || sum.runs_with[i] != 0) continue;
    (void)fail(fmt::format("none in {} runs: {}", sum.runs, name));
    all = false;
  }
  return all;
}

}  // namespace

int run_campaign(const SimCampaign& campaign) {
  const BoardPtr board = make_board();
  if (board == nullptr)
    return fail(Error{Status::no_memory, "run simulations", "mmap: no memory", "free some"});
  const auto begun = Watch::now();
  share_out(campaign, *board, begun);  // forks even for one job, to survive a crash
  const double seconds = std::chrono::duration<double>(Watch::now() - begun).count();
  SimSum sum;
  for (std::uint32_t i = 0; i < campaign.jobs; ++i) sum.add(board->jobs[i].sum);
  for (std::size_t i = 0; i < sum.ended.size(); ++i) {
    if (sum.ended[i] != 0)
      fmt::print("  {:>10} calls ended with {}\n", sum.ended[i], to_string(static_cast<Status>(i)));
  }
  int code = complete(sum) ? kDone : kFailed;
  if (sum.runs != 0)
    fmt::print("{} calls, at least {} nodes and {} calls in each run; trace {:016x}\n", sum.calls,
               sum.least_nodes, sum.least_calls, sum.trace);
  std::fflush(stdout);
  if (const std::uint64_t seed = board->first_failed.load(); seed != kNoSeed) {
    fmt::print(stderr,
               "seed {} is the first that failed; again: spinwire-sim --seed {} --calls {}{}\n",
               seed, seed, campaign.workload.calls, campaign.twice ? " --twice" : "");
    code = kFailed;
  }
  fmt::print("{} runs passed, {} failed, {:.1f} s, {:.1f} a second\n", sum.runs,
             board->failed.load(), seconds, static_cast<double>(sum.runs) / seconds);
  return code;
}

}  // namespace spinwire::tools
