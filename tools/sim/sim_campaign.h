// Many runs of the simulated workload: shared among processes, counted together, with the first
// failed seed.
#pragma once

#include <array>
#include <cstdint>

#include "sim/sim_workload.h"

namespace spinwire::tools {

inline constexpr std::uint32_t kMostSimJobs = 256;

struct SimCampaign {
  std::uint64_t seed = 1;     ///< of the first run; each further run adds 1
  std::uint64_t runs = 1;     ///< number of runs
  std::uint64_t seconds = 0;  ///< no run begins later; 0: no limit
  std::uint32_t jobs = 1;     ///< processes; each takes every jobs-th seed
  SimWorkload workload;
  bool twice = false;    ///< do each run twice and compare them
  bool verbose = false;  ///< print a few lines for each run
};

/// Sums over runs, independent of their order. In memory that the processes share.
struct SimSum {
  std::uint64_t runs = 0;  ///< passed
  std::uint64_t calls = 0;
  std::uint64_t trace = 0;
  std::uint32_t least_nodes = ~0u;
  std::uint64_t least_calls = ~std::uint64_t{0};
  std::array<std::uint64_t, kStatusCount> ended{};
  std::array<std::uint64_t, kSimEvents> happened{};
  std::array<std::uint64_t, kSimEvents> runs_with{};

  void add(std::uint64_t seed, const SimOutcome& outcome) noexcept;
  void add(const SimSum& other) noexcept;
};

/// In a campaign of this many runs, every event must have occurred.
inline constexpr std::uint64_t kRunsOfAll = 1000;

/// Prints the failures and the sums; returns the exit code. A run that has begun is finished,
/// unless a run with a lower seed has failed.
int run_campaign(const SimCampaign& campaign);

}  // namespace spinwire::tools
