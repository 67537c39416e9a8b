// Periodic work of a context outside its hot path: sleeping lanes, liveness of peers. Cold.
#pragma once

#include "softverbs/objects.h"

namespace spinwire::softverbs {

/// Detects peers that died or closed, opens new lanes, puts idle lanes to sleep. Makes system
/// calls, never blocks. The work per call is bounded.
void control(Context& c) noexcept;

/// Wakes the lanes whose doorbells rang, and records new lanes for control().
void wake_lanes(Context& c) noexcept;

/// Stops the queue pair's retry timer.
void stop_waiting(Qp& qp) noexcept;

/// Allocates a queue's arrays. May throw std::bad_alloc.
void make_receive_queue(ReceiveQueue& queue, std::uint32_t depth, std::uint32_t sges);

}  // namespace spinwire::softverbs
