// Sessions that end in order, because their server or their own engine drains. Cold.
//
// The server tells the client, and refuses new calls; calls in progress go on. The client makes no
// new calls, waits for those under way, and then closes the session as Session::close() does. So
// each call either has its reply, or its handler has not run: it ends as not_connected, or waits
// for the next server (refused_calls.h). The server repeats its goodbye until the close comes. A
// client of an older release is told when none of its calls is in progress.
//
// A server that has handed its listener over cannot be reached by a connection for long calls. Its
// successor refuses the connection with a goodbye, and the client ends the session in order, too.
#pragma once

#include <cstdint>

#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// The text of a call that was refused.
inline constexpr const char* kTakesNoCallsText = "the server takes no more calls";

// The server's end.

/// Calls whose handler runs or has deferred them, and replies that wait to be sent.
std::uint32_t calls_in_progress(const ServerSession& s) noexcept;
/// Begins to end a session, at tick `deadline` at the latest.
void begin_leaving(Rpc& r, ServerSession& s, const Goodbye& goodbye,
                   std::uint64_t deadline) noexcept;
/// Takes the next step of a session that is leaving. Returns the tick of the next; 0 if the session
/// is over.
std::uint64_t continue_leaving(Rpc& r, ServerSession& s, std::uint64_t now) noexcept;
/// Sends the client of a session that ends now the goodbye, and closes the session's connection.
void send_last_goodbye(Rpc& r, const ServerSession& s, const Goodbye& goodbye) noexcept;
/// Ends a session that is leaving at once, with its goodbye.
void end_served_session(Rpc& r, ServerSession& s) noexcept;
/// Refuses a request that came after the goodbye. Cold, out of the hot path.
[[gnu::cold, gnu::noinline]] void refuse_late_call(Rpc& r, CallRef call) noexcept;

// The client's end.

/// Makes no new calls, and closes the session when none is under way. Runs no callback.
void begin_leaving(Rpc& r, ClientSession& c) noexcept;
/// Closes the session without waiting for its calls or for an answer. Runs callbacks.
void close_at_once(Rpc& r, ClientSession& c) noexcept;
/// Whether a call of the session has not ended.
bool has_calls(const ClientSession& c) noexcept;
/// The calls under way of a session that leaves have ended: closes it, or has it opened again.
void finish_leaving(Rpc& r, ClientSession& c) noexcept;
/// The server takes no more calls. A session that awaits its proof has it by the goodbye, and ends
/// or is opened again at once, with callbacks. False: the number is malformed.
bool on_goodbye(Rpc& r, ClientSession& c, std::uint32_t number) noexcept;
/// The server of a ready session takes no more calls, or no more long ones. Runs no callback.
void on_goodbye(Rpc& r, ClientSession& c, const Goodbye& goodbye) noexcept;

// For Engine::drain().

/// Begins to end all served sessions.
void end_served_in_order(Rpc& r, const Goodbye& goodbye) noexcept;
/// Begins to end all sessions that are open here.
void end_own_in_order(Rpc& r) noexcept;
/// Ends all sessions of both kinds at once, with callbacks.
void end_all_sessions(Rpc& r) noexcept;

}  // namespace spinwire::rpc
