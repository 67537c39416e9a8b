// ConnectionHandlers::on_writable: connections that had no room for an operation, until they have
// room again. Cold: only an operation that is refused comes here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "agent/engine_context.h"

namespace spinwire::agent {

/// What a refused operation needs: a place in the send queue, a record, and more.
enum class Room : std::uint8_t {
  control,     ///< neither: fewer control messages that wait; refused was a call about a lease
  operation,   ///< no more
  message,     ///< credit
  notice,      ///< credit, and twice a place and a record
  rendezvous,  ///< credit, and a window or record of rendezvous messages
};

/// Answers would_block. If the connection has on_writable, the callback runs once there is room.
[[gnu::cold, gnu::noinline]] Status refuse_for_room(EngineContext& ctx, Agent& a,
                                                    Room needed) noexcept;
/// Answers no_buffer in the same way, for a message of `size` bytes that has no block.
[[gnu::cold, gnu::noinline]] Status refuse_for_block(EngineContext& ctx, Agent& a,
                                                     std::size_t size) noexcept;
/// Runs the callbacks of some connections that have room, in the order in which they were refused.
[[gnu::cold, gnu::noinline]] void run_room_callbacks(EngineContext& ctx) noexcept;
/// The connection ends, or is made again: on_closed or on_ready follows.
void stop_waiting_for_room(EngineContext& ctx, Agent& a) noexcept;

}  // namespace spinwire::agent
