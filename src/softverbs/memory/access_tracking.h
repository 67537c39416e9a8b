// What peers are at in our memory, and whether they have left. Cold.
#pragma once

#include "softverbs/objects.h"

namespace spinwire::softverbs {

/// Whoever of our peers does not see yet what we wrote before this was at something then that it
/// tells of: a barrier in all threads of all processes, or none where all peers are of this thread.
/// False if the kernel refuses.
bool reach_all(const Context& c) noexcept;

/// What `peer` is at now. To be asked when it cannot have missed any more that something has ended.
BusyLane busy_now(const Context& c, const Peer& peer) noexcept;
/// Whether the peer has left the access that was noted; it may be in another by now. Bounded to
/// microseconds: the caller comes back.
bool has_left(const Context& c, const Peer& peer, const BusyLane& noted) noexcept;

/// Whether nobody can be in an access any more that it began while the queue pair answered, or
/// while it gave rights that were taken from it since. Bounded: the caller comes back.
bool nobody_in(const Context& c, Qp& qp) noexcept;

}  // namespace spinwire::softverbs
