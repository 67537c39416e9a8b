// spinwire-sim: runs the simulated workload for a range of seeds and reports those that failed.
#include <CLI/CLI.hpp>

#include "common/cli.h"
#include "sim/sim_campaign.h"

int main(int argc, char** argv) {
  using namespace spinwire;  // NOLINT: a program of one file
  tools::set_program("spinwire-sim");
  tools::SimCampaign campaign;
  CLI::App app{
      "Simulates nodes that call each other and die, over a faulty network. Checks that each call "
      "ended once, no handler ran twice and no memory leaked. A seed always gives the same run."};
  app.add_option("--seed", campaign.seed, "seed of the first run; each further run adds 1")
      ->capture_default_str();
  app.add_option("--runs", campaign.runs, "number of runs")
      ->capture_default_str()
      ->check(CLI::Range(tools::kOne, tools::kMostCount));
  app.add_option("--seconds", campaign.seconds, "begin no run after this time; 0: no limit");
  app.add_option("--jobs", campaign.jobs, "processes that share the seeds, one core each")
      ->capture_default_str()
      ->check(CLI::Range(1u, tools::kMostSimJobs));
  app.add_option("--calls", campaign.workload.calls, "least number of calls in a run")
      ->capture_default_str()
      ->check(CLI::Range(1u, 1'000'000u));
  app.add_flag("--twice", campaign.twice, "do each run twice and compare them");
  app.add_flag("--verbose", campaign.verbose, "print a few lines for each run");
  int code = 0;
  if (!tools::parse_arguments(app, argc, argv, code)) return code;
  tools::catch_stop_signals();
  return tools::run_campaign(campaign);
}
