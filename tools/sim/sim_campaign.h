// Many runs of the simulations' workload: shared among processes, counted together, and the first
// seed that failed.
#pragma once

#include <array>
#include <cstdint>

#include "sim/sim_workload.h"

namespace spinwire::tools {

inline constexpr std::uint32_t kMostSimJobs = 256;

struct SimCampaign {
  std::uint64_t seed = 1;     ///< of the first run; the next have the next
  std::uint64_t runs = 1;     ///< so many
  std::uint64_t seconds = 0;  ///< but none begins later; 0: no limit
  std::uint32_t jobs = 1;     ///< processes, each of which takes one seed of so many in a row
  SimWorkload workload;
  bool twice = false;    ///< each run twice, which must not differ
  bool verbose = false;  ///< a few lines for each run
};

/// What runs came to, together; in whatever order they were counted. Processes share it.
struct SimSum {
  std::uint64_t runs = 0;  ///< that came out even
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

/// Campaigns of so many runs have to meet with everything.
inline constexpr std::uint64_t kRunsOfAll = 1000;

/// Prints what failed, and the sums; answers the program's exit code. A run that begins is ended,
/// but not when one with a lower seed has failed.
int run_campaign(const SimCampaign& campaign);

}  // namespace spinwire::tools
