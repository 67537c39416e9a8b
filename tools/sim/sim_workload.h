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

/// What a run is to meet with. Each is possible in each run, which goes on for a while when one is
/// still missing.
enum class SimEvent : std::uint8_t {
  dropped,  ///< datagrams, the first six
  duplicated,
  reordered,
  delayed,
  cut_off,    ///< lost on links that were cut
  not_ready,  ///< messages of connections that found no receive
  late,       ///< requests of connections that were held up
  lost,       ///< packets of connections, which were sent again
  failed,     ///< work requests
  cuts,       ///< of links
  kills,
  restarts,
  pauses,
  short_calls,  ///< that ended well, as the next
  long_calls,
  cancelled,  ///< calls
  timed_out,  ///< calls, whose deadlines passed
  messages,   ///< that were delivered
  closed      ///< sessions, by their own end
};
inline constexpr std::size_t kSimEvents = 19;
[[nodiscard]] const char* name_of(SimEvent event) noexcept;

struct SimOutcome {
  std::uint64_t trace = 0;            ///< Simulation::trace_hash()
  std::vector<std::string> failures;  ///< what did not come out even; empty if all did
  std::uint32_t nodes = 0;
  std::uint64_t calls = 0;     ///< accepted
  std::uint64_t orphans = 0;   ///< of those: died with their callers
  std::uint64_t messages = 0;  ///< accepted
  std::uint64_t sessions = 0;
  std::array<std::uint64_t, kSimEvents> happened{};
  std::array<std::uint64_t, kStatusCount> ended{};  ///< calls, by how
  Nanoseconds time{0};                              ///< virtual
  SimulationStats stats;
};

/// One run. Its failures are those of the library, unless the seed's machine runs out of something.
SimOutcome run_sim_workload(std::uint64_t seed, const SimWorkload& workload);

}  // namespace spinwire::tools
