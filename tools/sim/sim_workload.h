// A workload for simulations that checks the promises of remote calls and connections. Many nodes
// call each other in every way while the network and the nodes fail. Every call and message is
// accounted for.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "spinwire/sim.h"

namespace spinwire::tools {

struct SimWorkload {
  std::uint32_t calls = 240;  ///< least number of calls
};

/// Events that a run should contain; a run goes on for a while if one is missing. From
/// kFirstRareEvent on they belong to features that a run has by chance.
enum class SimEvent : std::uint8_t {
  dropped,  ///< datagrams, as in the next five
  duplicated,
  reordered,
  delayed,
  cut_off,           ///< datagrams lost on cut links
  not_ready,         ///< messages of connections that found no receive
  delayed_requests,  ///< delayed requests of connections
  lost,              ///< packets of connections, retransmitted
  failed,            ///< work requests
  cuts,              ///< of links
  kills,
  restarts,
  pauses,
  inline_calls,  ///< with status ok, as the next two
  long_calls,
  cancelled,  ///< calls
  timed_out,  ///< calls whose deadlines passed
  messages,   ///< delivered
  closed,     ///< sessions closed by their own end
  reopened,   ///< sessions that were interrupted, and ready again
  // Events that not every run can contain.
  drains,         ///< engines whose drain ended
  whole_drains,   ///< of these, drains that cut nothing off
  handovers,      ///< listeners taken over by a successor
  failovers,      ///< sessions and connections that became ready at another address than the last
  held_off,       ///< that came back to an address that had asked them to wait
  strangers,      ///< sessions and connections refused for want of the key
  rotations,      ///< nodes started again with newer keys
  wakeups,        ///< sleeps of nodes that something ended
  lapses,         ///< listeners that went away for a while
  port_failures,  ///< ports of devices whose links went down, or that fell silent
  port_moves,     ///< sessions and connections that became ready through another port than the last
  timers,         ///< runs of the application's timers
  cancelled_timers,
  renewals,         ///< leases that lasted for longer than one duration, since they were renewed
  expiries,         ///< leases that ended in their time, without a renewal
  refused_accesses  ///< with the keys of leases that were over
};
inline constexpr std::size_t kSimEvents = 36;
/// The first event that not every run can contain.
inline constexpr SimEvent kFirstRareEvent = SimEvent::drains;
[[nodiscard]] const char* name_of(SimEvent event) noexcept;

struct SimOutcome {
  std::uint64_t trace = 0;            ///< Simulation::trace_hash()
  std::vector<std::string> failures;  ///< empty if the run passed
  std::uint32_t nodes = 0;
  std::uint64_t calls = 0;     ///< accepted
  std::uint64_t orphans = 0;   ///< calls whose callers died
  std::uint64_t messages = 0;  ///< accepted
  std::uint64_t sessions = 0;
  std::array<std::uint64_t, kSimEvents> happened{};
  std::array<std::uint64_t, kStatusCount> ended{};  ///< calls by status
  Nanoseconds time{0};                              ///< virtual
  SimulationStats stats;
};

/// Does one run. A failure is the library's, unless the machine runs out of a resource.
SimOutcome run_sim_workload(std::uint64_t seed, const SimWorkload& workload);

}  // namespace spinwire::tools
