// Calls that wait. A ClientSession has a backlog of inline calls, which wait for the session's
// window or for receives and send entries of the engine. A ConnectionClient has a backlog of long
// calls, which wait for its window or for the connection. Each is a ring of `backlog_room` entries.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "rpc/client_call.h"
#include "rpc/client_session.h"
#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// Stores an inline call until it can be sent. `waits_until_ready`: also beyond an interruption of
/// the session. Errors: would_block (rpc.backlog calls wait), no_buffer. Cold unless the window is
/// full.
Status enqueue_call(Rpc& r, ClientSession& c, CallRequest call, const ReplyCallback& done,
                    bool waits_until_ready) noexcept;
/// Sends inline calls from the backlog while the session and the engine have room.
void send_backlog(Rpc& r, ClientSession& c) noexcept;
/// Sends from the backlogs of sessions that wait for receives or send entries of the engine.
[[gnu::cold, gnu::noinline]] void resume_blocked_sessions(Rpc& r) noexcept;
/// The ring of a session exists only while calls wait: the pool could not hold one for each of many
/// sessions. Returns false without memory.
[[gnu::cold, gnu::noinline]] bool allocate_backlog(Rpc& r, ClientSession& c) noexcept;
/// Releases the ring of an empty backlog.
void release_backlog(ClientSession& c) noexcept;
/// The ring of a connection stays.
inline void release_backlog(ConnectionClient&) noexcept {}

// For both backlogs.

template <typename Owner>
auto& backlog_at(const Owner& o, std::uint32_t i) noexcept {
  const std::uint32_t place = o.backlog_first + i;
  return o.backlog[place < o.backlog_room ? place : place - o.backlog_room];
}
/// Removes entry `i`: later entries move up.
template <typename Owner>
void erase_from_backlog(Owner& o, std::uint32_t i) noexcept {
  --o.backlog_count;
  if (i == 0) {
    if (++o.backlog_first == o.backlog_room) o.backlog_first = 0;
  } else {
    for (; i != o.backlog_count; ++i) backlog_at(o, i) = std::exchange(backlog_at(o, i + 1), {});
  }
  if (o.backlog_count == 0) release_backlog(o);
}
template <typename Owner>
auto remove_from_backlog(Owner& o, std::uint32_t i) noexcept {
  auto call = std::exchange(backlog_at(o, i), {});
  erase_from_backlog(o, i);
  return call;
}
/// Ends entry `i`, with its own outcome if it has one, else with `status`.
template <typename Owner>
void end_backlogged(Owner& o, std::uint32_t i, Status status) noexcept {
  auto call = remove_from_backlog(o, i);  // keeps the reply's memory until the callback is over
  release_payload(call.payload);
  end_call(call.done, call.outcome.value_or(status));
}
/// Ends all entries, except calls that callbacks add meanwhile.
template <typename Owner>
void end_backlog(Owner& o, Status status) noexcept {
  for (std::uint32_t most = o.backlog_count; most != 0 && o.backlog_count != 0; --most)
    end_backlogged(o, 0, status);
}
/// Cancels the call with this id; see call_cancel.h. Returns false if it does not wait here.
template <typename Owner>
bool cancel_in_backlog(Owner& o, std::uint32_t id) noexcept {
  for (std::uint32_t i = 0; i < o.backlog_count; ++i) {
    auto& call = backlog_at(o, i);
    if (call.id != id || call.outcome) continue;
    call.outcome = Status::cancelled;
    return true;
  }
  return false;
}
/// How many ids before `last_id` the newest call is that cancel_in_backlog() takes; kNone if there
/// is none.
template <typename Owner>
std::uint32_t age_of_newest(const Owner& o, std::uint32_t last_id) noexcept {
  for (std::uint32_t i = o.backlog_count; i != 0; --i) {
    const auto& call = backlog_at(o, i - 1);
    if (!call.outcome) return last_id - call.id;
  }
  return kNone;
}
/// Gives an outcome to all entries that have none.
template <typename Owner>
void cancel_backlog(Owner& o, Status outcome) noexcept {
  for (std::uint32_t i = 0; i < o.backlog_count; ++i) {
    auto& call = backlog_at(o, i);
    if (!call.outcome) call.outcome = outcome;
  }
}
/// Runs the callbacks of entries with an outcome. Callbacks only add calls to the end.
template <typename Owner>
void run_backlog_callbacks(Owner& o) noexcept {
  std::uint32_t i = 0;
  for (std::uint32_t most = o.backlog_count; most != 0; --most)
    backlog_at(o, i).outcome ? end_backlogged(o, i, Status::cancelled) : void(++i);
}
/// Ends entries that may not wait for an interrupted session. Returns false if a callback has
/// closed the session.
template <typename Owner>
bool end_calls_that_may_not_wait(Rpc& r, Owner& o, std::uint32_t session) noexcept {
  for (std::uint32_t i = 0; i < o.backlog_count;) {
    const auto& call = backlog_at(o, i);
    if (call.waits_until_ready || call.outcome) {  // a cancelled call's callback is due
      ++i;
      continue;
    }
    end_backlogged(o, i, Status::not_connected);
    if (!is_opening(r, session)) return false;
  }
  return true;
}
/// Ends entries that have timed out. Returns the tick of the next check, at most `next`. The
/// session may be gone or closing afterwards; then further entries may have timed out. Also while
/// the session is being opened.
template <typename Owner>
std::uint64_t check_backlog(Rpc& r, Owner& o, std::uint32_t session, std::uint64_t now,
                            std::uint64_t next) noexcept {
  for (std::uint32_t i = 0; i < o.backlog_count;) {
    const std::uint64_t due = backlog_at(o, i).deadline;
    if (now < due) {
      next = std::min(next, due);
      ++i;
      continue;
    }
    end_backlogged(o, i, Status::timed_out);
    if (!is_ready(r, session) && !is_opening(r, session)) return next;
    i = 0;  // the callback may have ended others
  }
  return next;
}

}  // namespace spinwire::rpc
