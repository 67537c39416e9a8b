// Other contexts: attaching to their segments, and letting go of them. Cold.
#pragma once

#include <infiniband/verbs.h>

#include <string>

#include "softverbs/objects.h"

namespace spinwire::softverbs {

/// The peer with this GID, attached now if it was not: its segment mapped, a lane to it claimed.
/// Null and errno (with the reason in words in `why`) if it cannot be reached. May allocate.
Peer* attach_peer(Context& c, const ibv_gid& gid, std::string& why) noexcept;

/// The peer died or closed: what it still acknowledged completes, and every queue pair with more
/// outstanding fails.
void handle_peer_gone(Peer& peer) noexcept;

/// Whether a process has ended, reaped or not. A system call or two.
bool process_ended(std::uint32_t pid) noexcept;

/// Unmaps and forgets a peer without users.
void detach_peer(Context& c, Peer& peer) noexcept;

/// Makes a lane of our directory known to the polls, linking it to its peer if that is attached.
/// Null if memory ran out.
InLane* open_lane(Context& c, std::uint32_t index) noexcept;

void sleep_lane(Context& c, InLane& lane) noexcept;
void wake_lane(Context& c, InLane& lane) noexcept;

}  // namespace spinwire::softverbs
