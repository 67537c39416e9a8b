// Receives reserved for the requests of served sessions and the replies of this engine's own calls.
#pragma once

#include <cstdint>

#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// Receives for pings, and for late or repeated datagrams.
inline constexpr std::uint32_t kUnsolicitedReceives = 24;
/// Receives that served sessions may reserve, of those that can be reserved. A quarter stays for
/// the engine's own calls, because handlers may call other servers.
constexpr std::uint32_t served_receive_budget(std::uint32_t budget) noexcept {
  return budget - budget / 4;
}
/// Reserves receives for the session's window, or for the half, a quarter and so on, if enough are
/// left and its source has not more than its share (control/source_share.h).
[[gnu::cold, gnu::noinline]] void reserve_window_receives(Rpc& r, ServerSession& s) noexcept;
void return_receives(Rpc& r, ServerSession& s) noexcept;

}  // namespace spinwire::rpc
