// Receives of connections with their own queue: all connections if there is no shared receive
// queue, else those with their own protection domain. Each queue has an equal number of the
// engine's slots, and a peer is granted no more than its queue holds. The agents are in a second
// map of queue-pair numbers, which is searched when the first map has no entry. So both kinds of
// connection work in one engine, and the common path has one lookup.
#pragma once

#include <cstdint>

#include "agent/qpn_map.h"
#include "base/index_pool.h"
#include "spinwire/buffer.h"
#include "spinwire/config.h"
#include "verbs/work_requests.h"

namespace spinwire::agent {

struct Agent;
struct EngineContext;

/// One connection's part of the engine's receives.
struct OwnShare {
  std::uint32_t slots = 0;
  std::uint32_t postlist = 0;  ///< receives that are posted together
  std::uint32_t credits = 0;   ///< most credit of the peer; one more receive is always posted
};
/// The share of a connection whose queue has `slots` slots. own_slots() is the number to ask a
/// device for.
OwnShare own_share(const Config& config, std::uint32_t slots) noexcept;
std::uint32_t own_slots(const Config& config) noexcept;

/// A queue, in use or free. Its slots are adjacent.
struct OwnQueue {
  Agent* agent = nullptr;
  verbs::ReceiveChain back;  ///< receives to be posted again
  std::uint32_t lkey = 0;    ///< of the slots' memory in the queue pair's domain
  bool failed = false;       ///< a receive failed: the queue pair is in ERR
  std::uint32_t next = 0;    ///< used by acquire_own_queue()
};

struct OwnQueues {
  OwnQueues(const OwnShare& each, std::uint32_t count) : share(each), queues(count) {}
  OwnShare share;
  std::uint32_t first = 0;              ///< slot of the first queue; slots before it are shared
  std::uint32_t reserved_receives = 0;  ///< receives of these queues reserved for all peers
  base::IndexPool<OwnQueue> queues;
};

/// Makes `count` queues of the slots from `first` on. The slots are filled later, and posted when a
/// connection uses the queue. May throw std::bad_alloc.
void make_own_queues(EngineContext& ctx, const OwnShare& share, std::uint32_t first,
                     std::uint32_t count);
/// Returns a slot to its queue, and posts a full list.
void repost_own(EngineContext& ctx, std::uint32_t slot) noexcept;
/// The key to the memory of a slot whose block is `block`.
std::uint32_t own_lkey(const EngineContext& ctx, std::uint32_t slot,
                       const detail::Block& block) noexcept;
/// Gives a new connection a queue. False: none is left, or its source has its share.
bool acquire_own_queue(EngineContext& ctx, Agent& a) noexcept;
/// Replaces the key to the memory of the agent's receives, before they are posted.
void aim_own_receives(EngineContext& ctx, const Agent& a, std::uint32_t lkey) noexcept;
/// Posts all receives to the agent's queue pair, which is at INIT. Returns 0 or an errno value.
int post_own_receives(EngineContext& ctx, Agent& a) noexcept;
/// Whether slots of the agent lack a block.
bool has_own_receive_shortage(EngineContext& ctx, const Agent& a) noexcept;
/// Receives of the agent that the device has.
std::uint32_t own_receives_posted(EngineContext& ctx, const Agent& a) noexcept;
/// Stops posting after a receive of the agent failed.
void stop_own_receives(EngineContext& ctx, const Agent& a) noexcept;
/// Frees the agent's queue after its queue pair is gone. Completions that still arrive are ignored.
void reclaim_own_receives(EngineContext& ctx, Agent& a) noexcept;

}  // namespace spinwire::agent
