// spinwire-sim: runs the simulations' workload for one seed after another, and says which failed.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "common/cli.h"
#include "common/sim_workload.h"
#include "spinwire/spinwire.h"

namespace {

using namespace spinwire;  // NOLINT: a program of one file

struct Options {
  std::uint64_t seed = 1;
  std::uint64_t runs = 1;
  std::uint64_t seconds = 0;
  std::uint32_t calls = 240;
  bool twice = false;
  bool verbose = false;
};

/// What all runs came to.
struct Sum {
  std::uint64_t runs = 0;
  std::uint64_t calls = 0;
  std::uint64_t messages = 0;
  std::uint64_t kills = 0;
  std::uint64_t trace = 0;
  std::array<std::uint64_t, kStatusCount> ended{};
};

void print_run(std::uint64_t seed, const tools::SimOutcome& o) {
  fmt::print("seed {}: {} nodes, {} calls, {} messages, {} sessions, {} ms, trace {:016x}\n", seed,
             o.nodes, o.calls, o.messages, o.sessions, o.time.count() / 1'000'000, o.trace);
  const SimulationStats& s = o.stats;
  fmt::print(
      "  {} kills, {} restarts; datagrams: {} dropped, {} duplicated, {} reordered, {} "
      "delayed, {} cut, {} overflowed; connections: {} not ready, {} late, {} unanswered, {} "
      "failed\n",
      s.kills, s.restarts, s.dropped, s.duplicated, s.reordered, s.delayed, s.cut, s.overflowed,
      s.not_ready, s.late, s.unanswered, s.failed);
}

int complain(const Options& options, std::uint64_t seed, const std::vector<std::string>& failures) {
  for (const std::string& failure : failures) fmt::print(stderr, "seed {}: {}\n", seed, failure);
  fmt::print(stderr, "again: spinwire-sim --seed {} --calls {}{}\n", seed, options.calls,
             options.twice ? " --twice" : "");
  return tools::kFailed;
}

int run_one(const Options& options, std::uint64_t seed, Sum& sum) {
  const tools::SimWorkload workload{options.calls};
  const tools::SimOutcome outcome = tools::run_sim_workload(seed, workload);
  if (!outcome.failures.empty()) return complain(options, seed, outcome.failures);
  if (options.twice) {
    const std::uint64_t again = tools::run_sim_workload(seed, workload).trace;
    if (again != outcome.trace)
      return complain(
          options, seed,
          {fmt::format("two runs differ: traces {:016x} and {:016x}", outcome.trace, again)});
  }
  if (options.verbose) print_run(seed, outcome);
  ++sum.runs;
  sum.calls += outcome.calls;
  sum.messages += outcome.messages;
  sum.kills += outcome.stats.kills;
  sum.trace = sum.trace * 31 + outcome.trace;
  for (std::size_t i = 0; i < sum.ended.size(); ++i) sum.ended[i] += outcome.ended[i];
  return tools::kDone;
}

int run(const Options& options) {
  using Watch = std::chrono::steady_clock;
  const auto begun = Watch::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Watch::now() - begun).count(); };
  Sum sum;
  for (std::uint64_t i = 0; i < options.runs && !tools::stop_requested(); ++i) {
    if (options.seconds != 0 && seconds() > static_cast<double>(options.seconds)) break;
    if (const int code = run_one(options, options.seed + i, sum); code != tools::kDone) return code;
  }
  fmt::print("{} runs, {} calls, {} messages, {} kills, {:.1f} runs/s; trace {:016x}\n", sum.runs,
             sum.calls, sum.messages, sum.kills, static_cast<double>(sum.runs) / seconds(),
             sum.trace);
  for (std::size_t i = 0; i < sum.ended.size(); ++i) {
    if (sum.ended[i] != 0)
      fmt::print("  {} calls ended with {}\n", sum.ended[i], to_string(static_cast<Status>(i)));
  }
  return tools::kDone;
}

}  // namespace

int main(int argc, char** argv) {
  tools::set_program("spinwire-sim");
  Options options;
  CLI::App app{
      "Simulates nodes that call each other over a bad network and die, and checks that each call "
      "ended once, no handler ran twice, and all memory came back. The same seed is the same run."};
  app.add_option("--seed", options.seed, "of the first run; the next have the next")
      ->capture_default_str();
  app.add_option("--runs", options.runs, "seeds to try, one after another")->capture_default_str();
  app.add_option("--seconds", options.seconds, "after which no further run begins; 0: no limit")
      ->capture_default_str();
  app.add_option("--calls", options.calls, "that a run begins at least")
      ->capture_default_str()
      ->check(CLI::Range(1u, 1'000'000u));
  app.add_flag("--twice", options.twice, "each run twice, which must not differ");
  app.add_flag("--verbose", options.verbose, "a few lines for each run");
  int code = 0;
  if (!tools::parse_arguments(app, argc, argv, code)) return code;
  tools::catch_stop_signals();
  return run(options);
}
