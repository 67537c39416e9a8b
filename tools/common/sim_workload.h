// A workload for simulations that tries what remote calls and connections promise: many nodes that
// call each other in every way that there is, while their network and they themselves fail, and an
// account of every call and message that has to come out even.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "spinwire/sim.h"

namespace spinwire::tools {

struct SimWorkload {
  std::uint32_t calls = 240;  ///< that are begun at least
};

struct SimOutcome {
  std::uint64_t trace = 0;            ///< Simulation::trace_hash()
  std::vector<std::string> failures;  ///< what did not come out even; empty if all did
  std::uint32_t nodes = 0;
  std::uint64_t calls = 0;     ///< accepted
  std::uint64_t orphans = 0;   ///< of those: died with their callers
  std::uint64_t messages = 0;  ///< accepted
  std::uint64_t sessions = 0;
  std::array<std::uint64_t, kStatusCount> ended{};  ///< calls, by how
  Nanoseconds time{0};                              ///< virtual
  SimulationStats stats;
};

/// One run. Its failures are those of the library, unless the seed's machine runs out of something.
SimOutcome run_sim_workload(std::uint64_t seed, const SimWorkload& workload);

}  // namespace spinwire::tools
