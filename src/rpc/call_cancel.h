// Calls that end without a reply. A call that Session::cancel() or Session::close() ends keeps its
// outcome, and its slot or its place in the backlog, until its callback has run. The callback runs
// at the end of the next poll, never inside the application's call. Cold.
#pragma once

#include <cstdint>

#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// Cancels a call. Errors: invalid_argument (the call is over).
Status cancel(Rpc& r, ClientSession& c, std::uint32_t id) noexcept;
/// The id of the newest call that cancel() takes; empty if there is none.
CallId last_call(const ClientSession& c) noexcept;
/// Gives an outcome to all inline calls of a session that have none.
void cancel_all(Rpc& r, ClientSession& c, Status outcome) noexcept;
/// Ends the calls that wait in the backlogs with this outcome, by the end of the next poll.
void cancel_waiting(Rpc& r, ClientSession& c, Status outcome) noexcept;
/// Runs the callbacks of cancelled calls. Calls that these callbacks cancel may wait for the next
/// poll.
void run_cancel_callbacks(Rpc& r) noexcept;
/// Ends the call in a slot, with its own outcome if it has one, else with `status`.
void end_call_in_slot(Rpc& r, ClientSession& c, std::uint32_t slot, Status status) noexcept;
/// Ends all inline calls of a session that is over; those that were never sent with `unsent`.
void end_calls(Rpc& r, ClientSession& c, Status status, Status unsent) noexcept;

}  // namespace spinwire::rpc
