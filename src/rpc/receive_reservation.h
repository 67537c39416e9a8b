// Receives that are reserved for the requests of served sessions.
#pragma once

#include <cstdint>

#include "rpc/rpc.h"

namespace spinwire::rpc {

/// Receives for pings, and for datagrams that come late or twice.
inline constexpr std::uint32_t kUnsolicitedReceives = 24;
/// Reserves as many receives as the session may send requests at once, if there are any left.
[[gnu::cold, gnu::noinline]] void reserve_window_receives(Rpc& r, ServerSession& s) noexcept;
void return_receives(Rpc& r, ServerSession& s) noexcept;

}  // namespace spinwire::rpc
