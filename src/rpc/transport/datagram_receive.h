// What the datagram port has received.
#pragma once

#include <cstdint>

#include "rpc/rpc.h"

namespace spinwire::rpc {

/// Handles the completions of the port's queue pair, from the first up to one of another queue
/// pair. Returns where it stopped, and adds to the number of events. Hot.
const ibv_wc* process_completions(Rpc& r, const ibv_wc* wcs, const ibv_wc* end,
                                  std::uint32_t& events) noexcept;

}  // namespace spinwire::rpc
