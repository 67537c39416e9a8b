// Attaches and releases the segments of other contexts. Cold.
#pragma once

#include <infiniband/verbs.h>

#include <string>

#include "softverbs/objects.h"

namespace spinwire::softverbs {

/// Returns the peer with this GID. Attaches it if necessary: maps its segment and claims a lane to
/// it. Returns null and sets errno and `why` if the peer cannot be reached. May allocate.
Peer* attach_peer(Context& c, const ibv_gid& gid, std::string& why) noexcept;

/// Handles the death or closing of a peer: completes the work that it acknowledged, and fails every
/// queue pair with more outstanding.
void handle_peer_gone(Peer& peer) noexcept;

/// Whether a process has ended, reaped or not. Makes one or two system calls.
bool process_ended(std::uint32_t pid) noexcept;

/// Whether a process has released its memory: it was just killed, or is a zombie. The kernel then
/// shows its files as another user's to all but root.
bool is_ending(std::uint32_t pid);

/// Unmaps and removes a peer without users.
void detach_peer(Context& c, Peer& peer) noexcept;

/// Opens a lane of this context for polls, and links it to its peer if the peer is attached. Null
/// without memory.
InLane* open_lane(Context& c, std::uint32_t index) noexcept;

void sleep_lane(Context& c, InLane& lane) noexcept;
void wake_lane(Context& c, InLane& lane) noexcept;

}  // namespace spinwire::softverbs
