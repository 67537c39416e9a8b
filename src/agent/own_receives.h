// Receives where the device has no queue that connections share, or is not to use it: each
// connection has a queue of its own, with as many of the engine's slots as each other. Its peer is
// never granted more than what is posted there, so nothing is ever taken from one for another.
#pragma once

#include <cstdint>
#include <memory>

#include "base/index_pool.h"
#include "spinwire/config.h"
#include "verbs/work_requests.h"

namespace spinwire::agent {

struct Agent;
struct Shared;

/// What of the engine's receives is one connection's.
struct OwnShare {
  std::uint32_t slots = 0;
  std::uint32_t postlist = 0;  ///< reposted at once
  std::uint32_t credits = 0;   ///< most that the peer is granted: one more is always posted
};
/// `slots`: what the device gives; for that, a device is asked for own_slots().
OwnShare own_share(const Config& config, std::uint32_t slots) noexcept;
std::uint32_t own_slots(const Config& config) noexcept;

/// A connection's queue, or one that waits for a connection. Its slots are neighbours.
struct OwnQueue {
  Agent* agent = nullptr;
  verbs::ReceiveChain back;  ///< those that came back, to be posted again
  bool failed = false;       ///< a receive did: the queue pair is in ERR
  std::uint32_t next = 0;    ///< while one is looked for
};

struct OwnQueues {
  OwnQueues(const OwnShare& each, std::uint32_t count) : share(each), queues(count) {}
  OwnShare share;
  base::IndexPool<OwnQueue> queues;
};

/// Makes the queues, whose slots are filled; none is posted before there is a connection. May throw
/// std::bad_alloc.
void make_own_queues(Shared& s);
/// Hands each slot that came back to its queue, and posts what is worth it.
void sort_own_receives(Shared& s) noexcept;
/// A queue for a connection that begins; false if none is left.
bool take_own_queue(Shared& s, Agent& a) noexcept;
/// Posts everything to the agent's queue pair, which is at INIT. 0 or an errno value.
int post_own_receives(Shared& s, Agent& a) noexcept;
/// Whether slots of the agent's lack memory, so that less is posted than it might be granted.
bool lacks_own_receives(Shared& s, const Agent& a) noexcept;
/// How many of the agent's receives the device has.
std::uint32_t own_receives_posted(Shared& s, const Agent& a) noexcept;
/// A receive of the agent's failed: nothing is posted any more.
void stop_own_receives(Shared& s, const Agent& a) noexcept;
/// The agent's queue pair is gone, and with it what was posted: all slots are the queue's again.
/// Whatever of them still completes finds nobody.
void reclaim_own_receives(Shared& s, Agent& a) noexcept;

}  // namespace spinwire::agent
