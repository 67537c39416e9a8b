// Receives the datagram port's datagrams.
#pragma once

#include <cstdint>

#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// Handles completions of the port's queue pair, up to the first of another queue pair. Returns the
/// first completion that was not handled, and adds to the number of events. Hot.
const ibv_wc* process_completions(Rpc& r, const ibv_wc* wcs, const ibv_wc* end,
                                  std::uint32_t& events) noexcept;

/// Handles the batches of direct datagrams that a completion reports. Returns the number of
/// datagrams. Hot.
std::uint32_t process_batches(Rpc& r) noexcept;

}  // namespace spinwire::rpc
