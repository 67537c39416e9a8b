// Datagrams that found no room in the lane to their peer, or in the send queue. Later ones to that
// peer wait behind them, unless a line holds them, so that none waits for ever. At the end of a
// poll some peers have a turn: their sessions send in turn, one datagram each. Cold.
#pragma once

#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// Remembers that a request was not sent. The call is in its slot.
[[gnu::cold, gnu::noinline]] void defer_request(Rpc& r, ClientSession& c,
                                                std::uint32_t slot) noexcept;
/// Remembers that the reply in a slot was not sent.
[[gnu::cold, gnu::noinline]] void defer_reply(Rpc& r, ServerSession& s,
                                              std::uint32_t slot) noexcept;
/// The session ends.
void forget_unsent(Rpc& r, ClientSession& c) noexcept;
void forget_unsent(Rpc& r, ServerSession& s) noexcept;
/// Sends to the first few peers that wait as much as their lanes have room for.
void send_unsent(Rpc& r) noexcept;

}  // namespace spinwire::rpc
