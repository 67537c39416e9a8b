// Calls that a server has refused because the session ends, and calls that found no room to be sent
// before their server was lost: their handlers have not run. If the session reconnects and they may
// wait until it is ready, they wait in its backlog again, at their former place in the order, for
// the next server. Their time-outs go on, and they can be cancelled. Other calls end as
// not_connected. Cold.
//
// A refusal may overtake the goodbye. Then the session makes no further calls, and waits for the
// goodbye, which says whether and when it may come back. So a server that refuses all calls is
// asked once for each, and again only after the pauses of Reconnect.
#pragma once

#include <cstdint>

#include "rpc/rpc_state.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::rpc {

/// Moves the call in a slot, which has not run, to the backlog. Returns false if it must end: it
/// may not wait, or there is no memory. Runs no callback.
[[gnu::cold, gnu::noinline]] bool wait_again(Rpc& r, ClientSession& c, std::uint32_t slot) noexcept;
/// Moves a long call whose memory no peer uses.
[[gnu::cold, gnu::noinline]] bool wait_again(Rpc& r, ConnectionClient& b,
                                             ConnectionClientSlot& k) noexcept;
/// Tick until when a ready session waits for the goodbye of a server that has refused a call: for
/// connections.close_timeout. If it waits for none: after all others.
[[nodiscard]] std::uint64_t time_without_goodbye(const Rpc& r, const ClientSession& c) noexcept;
/// Gives up the server if that time is over. Returns whether it has.
bool end_without_goodbye(Rpc& r, ClientSession& c, std::uint64_t now) noexcept;

}  // namespace spinwire::rpc
