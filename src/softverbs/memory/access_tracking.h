// Which peers are accessing our memory, and whether they have finished. Cold.
#pragma once

#include "softverbs/objects.h"
#include "spinwire/clock.h"

namespace spinwire::softverbs {

/// A memory barrier in all threads of all processes; none if this thread drives all peers.
/// Afterwards a peer either sees what we wrote before, or its `busy` word shows the access that
/// does not. False if the kernel refuses.
bool fence_peers(const Context& c) noexcept;

/// The access that `peer` is in now. Call it after the barrier that follows a revocation.
PendingAccess current_access(const Context& c, const Peer& peer) noexcept;
/// Whether the recorded access has ended; the peer may be in another one. Spins for microseconds at
/// most: if false, call again later.
bool access_ended(const Context& c, const Peer& peer, const PendingAccess& recorded) noexcept;

/// Whether every access has ended that began while the queue pair answered, or before its rights
/// were revoked. Bounded: if false, call again later.
bool accesses_drained(const Context& c, Qp& qp) noexcept;

/// Waits until every thread of this process has ended the access to our memory that it was in, for
/// at most `timeout`: the memory may be unmapped afterwards. No queue pair may answer any more.
/// Peers of other processes have mappings of their own. False: one has not ended.
bool wait_for_local_accesses(ibv_context* context, Nanoseconds timeout) noexcept;

}  // namespace spinwire::softverbs
