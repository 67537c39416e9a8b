// Tracks peers' accesses to local memory and finds when they have ended. Cold.
#pragma once

#include "softverbs/objects.h"
#include "spinwire/clock.h"

namespace spinwire::softverbs {

/// Issues a memory barrier in all threads of all processes; none if this thread drives all peers.
/// Afterwards a peer either sees this thread's earlier writes, or its `access_serial` word shows
/// its access. False if the kernel refuses.
bool fence_peers(const Context& c) noexcept;

/// The current access of `peer`. Call it after the barrier that follows a revocation.
PendingAccess current_access(const Context& c, const Peer& peer) noexcept;
/// Whether the recorded access has ended; the peer may have begun another. Spins for microseconds
/// at most: if false, call again later.
bool access_ended(const Context& c, const Peer& peer, const PendingAccess& recorded) noexcept;

/// Whether all accesses have ended that began while the queue pair responded, or before its rights
/// were revoked. Bounded: if false, call again later.
bool peer_accesses_ended(const Context& c, Qp& qp) noexcept;

/// Records the accesses in progress of all lanes, opened or not. May throw std::bad_alloc.
void record_accesses(Context& c, Mr& mr);

/// Whether all recorded accesses have ended. Spins for microseconds at most, because a peer may be
/// stopped or copy for long: if false, call again later.
bool accesses_ended(Context& c, Mr& mr) noexcept;

/// Waits for at most `timeout` until all threads of this process have ended their accesses to the
/// context's memory; the memory may then be unmapped. No queue pair may respond any more. Peers in
/// other processes have their own mappings. False if an access has not ended.
bool wait_for_local_accesses(ibv_context* context, Nanoseconds timeout) noexcept;

}  // namespace spinwire::softverbs
