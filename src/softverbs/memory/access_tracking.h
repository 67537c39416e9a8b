// Tracks peers' accesses to local memory and finds when they have ended. Cold.
//
// Peers in other processes mark their accesses in their lanes, where any peer can write. So only
// the lanes of attached peers are read, and a mark that stays too long ends the peer that has the
// lane. Contexts of this process mark their accesses in private memory.
#pragma once

#include "softverbs/objects.h"
#include "spinwire/clock.h"

namespace spinwire::softverbs {

/// The longest access of a peer in another process. An access is a copy of 2 GiB at most, so only a
/// process that is stopped, or lies, takes longer. control() then gives the peer up, and the access
/// counts as ended. Should the process continue, it finishes its copy in its own mapping.
inline constexpr Nanoseconds kLongestAccess = std::chrono::seconds(60);

/// Issues a memory barrier in all threads of all processes; none if this thread drives all peers.
/// Afterwards a peer either sees this thread's earlier writes, or its `access_serial` word shows
/// its access. False if the kernel refuses.
bool fence_peers(const Context& c) noexcept;

/// The current access of `peer`. Call it after the barrier that follows a revocation.
PendingAccess current_access(Context& c, const Peer& peer) noexcept;
/// Whether the recorded access has ended; the peer may have begun another. Spins for microseconds
/// at most: if false, call again later.
bool access_ended(Context& c, const PendingAccess& recorded) noexcept;

/// Whether all accesses have ended that began while the queue pair responded, or before its rights
/// were revoked. Bounded: if false, call again later.
bool peer_accesses_ended(Context& c, Qp& qp) noexcept;

/// Records the accesses in progress of the peers that the registration was open to. May throw
/// std::bad_alloc.
void record_accesses(Context& c, Mr& mr);

/// Whether all recorded accesses have ended. Spins for microseconds at most, because a peer may be
/// stopped or copy for long: if false, call again later.
bool accesses_ended(Context& c, Mr& mr) noexcept;

/// Waits for at most `timeout` until all threads of this process have ended their accesses to the
/// context's memory; the memory may then be unmapped. No queue pair may respond any more. Peers in
/// other processes have their own mappings. False if an access has not ended.
bool wait_for_local_accesses(ibv_context* context, Nanoseconds timeout) noexcept;

}  // namespace spinwire::softverbs
