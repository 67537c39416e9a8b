// on_writable of sessions that had no room for a call, and of replies that found no memory, until
// there is room again. Cold: only a call or an answer that is refused comes here.
#pragma once

#include <cstddef>

#include "rpc/rpc_state.h"

namespace spinwire::rpc {

enum class Backlog : std::uint8_t {
  inline_calls,
  long_calls,  ///< and all calls of a session without datagrams
};

/// Answers would_block, because the backlog is full. If the session has on_writable, the callback
/// runs once there is room.
[[gnu::cold, gnu::noinline]] Status refuse_for_backlog(Rpc& r, ClientSession& c,
                                                       Backlog which) noexcept;
/// Answers no_buffer in the same way: the send pool has no block of `size` bytes.
[[gnu::cold, gnu::noinline]] Status refuse_for_block(Rpc& r, ClientSession& c,
                                                     std::size_t size) noexcept;
/// Answers no_buffer for an answer to a call that needs a block of `size` bytes of the send pool.
/// If the engine has a handler, it runs once there is such a block.
[[gnu::cold, gnu::noinline]] Status refuse_reply_for_block(Rpc& r, std::size_t size) noexcept;
/// Runs the callbacks of some sessions that have room, in the order in which they were refused, and
/// that of replies.
[[gnu::cold, gnu::noinline]] void run_room_callbacks(Rpc& r) noexcept;
/// The session ends.
void stop_waiting_for_room(Rpc& r, ClientSession& c) noexcept;

}  // namespace spinwire::rpc
