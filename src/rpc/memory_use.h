// What calls and replies do with memory, for checked accesses. Cold.
#pragma once

#include "agent/memory_use.h"

namespace spinwire::rpc {

struct Rpc;

/// Sees the memory of calls that are not over, and of replies that are sent or kept. Takes time in
/// proportion to the sessions and their calls.
void see_calls(Rpc& r, agent::MemorySearch& search) noexcept;

}  // namespace spinwire::rpc
