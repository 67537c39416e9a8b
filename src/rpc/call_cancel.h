// Calls that end without a reply. A call that the application ends, by Session::cancel() or
// Session::close(), keeps its slot or its place in the backlog, with its outcome, until its
// callback has run: at the end of the next poll, never inside the application's call. Cold.
#pragma once

#include "rpc/client_call.h"

namespace spinwire::rpc {

/// Cancels a call. Errors: invalid_argument (it is over).
Status cancel(Rpc& r, ClientSession& c, std::uint32_t id) noexcept;
/// Gives all short calls of a session an outcome, except those that have one.
void cancel_all(Rpc& r, ClientSession& c, Status outcome) noexcept;
/// Runs the callbacks of cancelled calls. What callbacks cancel may wait for the next poll.
void run_cancel_callbacks(Rpc& r) noexcept;
/// Ends the call in a slot: with its outcome, or else with the status.
void end_call_in_slot(Rpc& r, ClientSession& c, std::uint32_t slot, Status status) noexcept;
/// Ends all short calls of a session that is over.
void end_calls(Rpc& r, ClientSession& c, Status status) noexcept;

}  // namespace spinwire::rpc
