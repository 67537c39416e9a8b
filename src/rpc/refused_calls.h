// Calls whose handlers have not run, although they were under way: their server has refused them
// because it ends the session, or their requests were not sent before the server or the connection
// was lost. Such a call goes back to the backlog of its session, to its former place in the order,
// and waits for the next server or connection. Its time-out goes on, and it can be cancelled. It
// ends instead if the session does not reconnect, without memory, or if the session is no longer
// ready and the call may not wait until it is: as not_connected, but as peer_lost with a connection
// that is lost alone. Cold.
//
// A refusal may overtake the goodbye. After a refusal the session sends no further calls, and waits
// for the goodbye, which says whether and when the client may come back. Without a goodbye for
// connections.close_timeout, the session gives the server up. So a server that refuses all calls
// gets each of them once, and again only after the next pause of Reconnect.
#pragma once

#include <cstdint>

#include "rpc/rpc_state.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::rpc {

/// Moves an inline call, whose handler has not run, from its slot to the backlog. Returns false if
/// the call must end. Runs no callback.
[[gnu::cold, gnu::noinline]] bool wait_again(Rpc& r, ClientSession& c, std::uint32_t slot) noexcept;
/// Moves a long call, whose memory no peer uses.
[[gnu::cold, gnu::noinline]] bool wait_again(Rpc& r, ConnectionClient& b,
                                             ConnectionClientSlot& k) noexcept;
/// The connection of a ready session has ended. If the session reconnects, moves its calls of which
/// nothing was sent to its backlog: the next connection takes them, whether to this server or to
/// the next one.
void keep_unsent_calls(Rpc& r, ClientSession& c) noexcept;
/// Tick at which a ready session gives up a server that has refused a call and says no goodbye. If
/// no server has refused one: after all others.
[[nodiscard]] std::uint64_t time_without_goodbye(const Rpc& r, const ClientSession& c) noexcept;
/// Gives up the server if that tick has come. Returns whether it did.
bool end_without_goodbye(Rpc& r, ClientSession& c, std::uint64_t now) noexcept;

}  // namespace spinwire::rpc
