// spinwire-sim: runs the simulations' workload for one seed after another, and says which failed.
#include <CLI/CLI.hpp>

#include "common/cli.h"
#include "sim/sim_campaign.h"

int main(int argc, char** argv) {
  using namespace spinwire;  // NOLINT: a program of one file
  tools::set_program("spinwire-sim");
  tools::SimCampaign campaign;
  CLI::App app{
      "Simulates nodes that call each other over a bad network and die, and checks that each call "
      "ended once, no handler ran twice, and all memory came back. The same seed is the same run."};
  app.add_option("--seed", campaign.seed, "of the first run; the next have the next")
      ->capture_default_str();
  app.add_option("--runs", campaign.runs, "so many")
      ->capture_default_str()
      ->check(CLI::Range(tools::kOne, tools::kMostCount));
  app.add_option("--seconds", campaign.seconds, "but none begins later; 0: no limit");
  app.add_option("--jobs", campaign.jobs, "processes that share the seeds, one core each")
      ->capture_default_str()
      ->check(CLI::Range(1u, tools::kMostSimJobs));
  app.add_option("--calls", campaign.workload.calls, "that a run begins at least")
      ->capture_default_str()
      ->check(CLI::Range(1u, 1'000'000u));
  app.add_flag("--twice", campaign.twice, "each run twice, which must not differ");
  app.add_flag("--verbose", campaign.verbose, "a few lines for each run");
  int code = 0;
  if (!tools::parse_arguments(app, argc, argv, code)) return code;
  tools::catch_stop_signals();
  return tools::run_campaign(campaign);
}
