// Which peers are accessing our memory, and whether they have finished. Cold.
#pragma once

#include "softverbs/objects.h"

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

}  // namespace spinwire::softverbs
