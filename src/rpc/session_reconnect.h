// A client's session that is opened again after a loss: SessionOptions::reconnect. Cold.
//
// end_session() asks can_reconnect(), and interrupts the session instead of ending it. The session
// keeps its record, its name and the calls that may wait. Calls that may have been sent end, unless
// their server has refused to run them (refused_calls.h): the next server must never get them.
#pragma once

#include <cstdint>

#include "rpc/client_session.h"
#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// Whether a session that ends for this reason is opened again instead.
[[nodiscard]] bool can_reconnect(const Rpc& r, const ClientSession& c,
                                 const EndReason& why) noexcept;
/// Gives up the server, runs on_interrupted, and waits for the next attempt. A callback may close
/// the session.
void interrupt_session(Rpc& r, ClientSession& c, const Error& reason) noexcept;
/// Begins the attempt that has been waited for.
void start_next_attempt(Rpc& r, ClientSession& c) noexcept;
/// The server has closed the session.
void on_closed_by_server(Rpc& r, ClientSession& c) noexcept;
/// The reason that on_closed reports after the last attempt.
[[nodiscard]] EndReason final_reason(const ClientSession& c, const EndReason& why) noexcept;

}  // namespace spinwire::rpc
