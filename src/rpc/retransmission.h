// Calls without a reply: the retransmission queue and its timer.
#pragma once

#include <cstdint>

#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// Makes room in the retransmission queue.
[[gnu::cold]] void grow_retransmission_queue(Rpc& r) noexcept;
/// Queues a session that sends its first call in flight.
[[gnu::always_inline]] inline void queue_for_retransmission(Rpc& r, ClientSession& c,
                                                            std::uint64_t now) noexcept {
  if (r.retransmission_queue.full()) [[unlikely]]
    grow_retransmission_queue(r);
  c.retransmission_place = r.retransmission_queue.add(now, c.name);
  if (!r.retransmission_timer.scheduled()) [[unlikely]]
    r.context.timers.schedule(r.retransmission_timer, now + r.min_rto);
}
/// Makes the session's timer check a call that is due before the retransmission timer.
[[gnu::cold, gnu::noinline]] void schedule_early_check(Rpc& r, ClientSession& c,
                                                       ClientSlot& call) noexcept;
/// Ends a call whose deadline has passed, or sends it again after its RTO. Returns the tick of the
/// next check, or the end of time if the retransmission timer checks early enough. The session may
/// be gone afterwards.
std::uint64_t check_slot(Rpc& r, ClientSession& c, std::uint32_t slot, std::uint64_t now) noexcept;
void on_retransmission_timer(Rpc& r) noexcept;

}  // namespace spinwire::rpc
