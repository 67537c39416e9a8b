// Receives of connections that share no queue: all where the device has none to share, or is not to
// use it, else those with a protection domain of their own. Each such connection has a queue of its
// own, with as many of the engine's slots as each other. Its peer is never granted more than what
// is posted there, so nothing is ever taken from one for another.
#pragma once

#include <cstdint>
#include <memory>

#include "agent/qpn_map.h"
#include "base/index_pool.h"
#include "spinwire/buffer.h"
#include "spinwire/config.h"
#include "verbs/work_requests.h"

namespace spinwire::agent {

struct Agent;
struct EngineContext;

/// What of the engine's receives is one connection's.
struct OwnShare {
  std::uint32_t slots = 0;
  std::uint32_t postlist = 0;  ///< reposted at once
  std::uint32_t credits = 0;   ///< most that the peer is granted: one more is always posted
};
/// `slots`: what the device gives; for that, a device is asked for own_slots().
OwnShare own_share(const Config& config, std::uint32_t slots) noexcept;
std::uint32_t own_slots(const Config& config) noexcept;

/// A connection's queue, or one that waits for a connection. Its slots are qpn_map_of.
struct OwnQueue {
  Agent* agent = nullptr;
  verbs::ReceiveChain back;  ///< those that came back, to be posted again
  std::uint32_t lkey = 0;    ///< of the slots' memory, where the queue pair is
  bool failed = false;       ///< a receive did: the queue pair is in ERR
  std::uint32_t next = 0;    ///< while one is looked for
};

struct OwnQueues {
  OwnQueues(const OwnShare& each, std::uint32_t count) : share(each), queues(count) {}
  OwnShare share;
  QpnMap by_qpn;                        ///< the agents that have a queue
  std::uint32_t first = 0;              ///< slot of the first queue; slots before it are shared
  std::uint32_t reserved_receives = 0;  ///< of these queues, for all peers together
  base::IndexPool<OwnQueue> queues;
};

/// Makes `count` queues out of the slots from `first` on, which are filled later; none is posted
/// before there is a connection. May throw std::bad_alloc.
void make_own_queues(EngineContext& ctx, const OwnShare& share, std::uint32_t first,
                     std::uint32_t count);
/// Hands a slot that came back to its queue, and posts what is worth it.
void repost_own(EngineContext& ctx, std::uint32_t slot) noexcept;
/// The key by which a queue's receives name a slot's memory, whose block is `block`.
std::uint32_t own_lkey(const EngineContext& ctx, std::uint32_t slot,
                       const detail::Block& block) noexcept;
/// A queue for a connection that begins; false if none is left.
bool acquire_own_queue(EngineContext& ctx, Agent& a) noexcept;
/// The agent's receives name their memory by another key. Before they are posted.
void aim_own_receives(EngineContext& ctx, const Agent& a, std::uint32_t lkey) noexcept;
/// Posts everything to the agent's queue pair, which is at INIT. 0 or an errno value.
int post_own_receives(EngineContext& ctx, Agent& a) noexcept;
/// Whether slots of the agent's lack memory, so that less is posted than it might be granted.
bool has_own_receive_shortage(EngineContext& ctx, const Agent& a) noexcept;
/// How many of the agent's receives the device has.
std::uint32_t own_receives_posted(EngineContext& ctx, const Agent& a) noexcept;
/// A receive of the agent's failed: nothing is posted any more.
void stop_own_receives(EngineContext& ctx, const Agent& a) noexcept;
/// The agent's queue pair is gone, and with it what was posted: all slots are the queue's again.
/// Whatever of them still completes finds nobody.
void reclaim_own_receives(EngineContext& ctx, Agent& a) noexcept;

}  // namespace spinwire::agent
