// Upkeep of a context outside its hot path: sleeping lanes, liveness of peers. Cold.
#pragma once

#include "softverbs/objects.h"

namespace spinwire::softverbs {

/// Looks after peers that died or closed, puts idle lanes to sleep. Makes system calls, never
/// blocks; bounded work per call.
void control(Context& c) noexcept;

/// Takes the doorbells of lanes that were asleep or new.
void wake_lanes(Context& c) noexcept;

/// The queue pair no longer waits for its retry timer.
void stop_waiting(Qp& qp) noexcept;

/// May throw std::bad_alloc.
void make_receive_queue(ReceiveQueue& queue, std::uint32_t depth, std::uint32_t sges);

}  // namespace spinwire::softverbs
