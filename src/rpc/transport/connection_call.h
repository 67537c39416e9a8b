// The client's end of long calls. connection_client.cc starts and cancels them, connection_call.cc
// moves them forward, connection_replies.cc ends them.
#pragma once

#include <bit>
#include <cstdint>
#include <utility>

#include "rpc/backlog.h"
#include "rpc/client_call.h"
#include "rpc/client_session.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::rpc {

inline bool is_active(const ConnectionClient& b, std::uint32_t slot) noexcept {
  return (b.active & bit(slot)) != 0;
}
/// Slots with a call. The bits of `active` beyond the window are set.
inline std::uint32_t active_calls(const ConnectionClient& b) noexcept {
  return static_cast<std::uint32_t>(std::popcount(b.active)) - (kWindowMax - b.window);
}
/// A free slot; the window or more if there is none.
inline std::uint32_t free_slot(const ConnectionClient& b) noexcept {
  return static_cast<std::uint32_t>(std::countr_one(b.active));
}
/// The call of a number from the server or a completion; null if the call is over.
inline ConnectionClientSlot* find_call(ConnectionClient& b, std::uint32_t number) noexcept {
  const std::uint32_t slot = number & (b.window - 1);
  ConnectionClientSlot& k = b.slots[slot];
  return k.number == number && is_active(b, slot) ? &k : nullptr;
}
inline ConnectionClient* connection_of(Rpc& r, std::uint32_t session) noexcept {
  ClientSession* const c = find_client(r, session);
  return c != nullptr ? c->connection.get() : nullptr;
}

/// Puts a call into a free slot. Sends nothing.
inline ConnectionClientSlot& occupy_slot(Rpc& r, ConnectionClient& b, std::uint32_t slot,
                                         ConnectionCall&& call) noexcept {
  ++r.stats.long_calls;
  ConnectionClientSlot& k = b.slots[slot];
  const std::uint32_t number = k.number;
  k = {};
  k.number = number;
  k.call = std::move(call);
  b.active |= bit(slot);
  return k;
}

inline void request_connection(Rpc& r, ConnectionClient& b) noexcept {
  if (b.wants_connection || b.agent) return;
  b.wants_connection = true;
  r.connection_requests.push_back(b);
  r.dialogues.request_connection();
}
inline void withdraw_connection_request(Rpc& r, ConnectionClient& b) noexcept {
  if (std::exchange(b.wants_connection, false)) r.connection_requests.erase(b);
}

/// Advances the calls after an event, unless a callback has ended the session. A ready session
/// keeps the record of its connection.
inline void advance_if_ready(Rpc& r, std::uint32_t session) noexcept {
  if (is_ready(r, session)) advance(r, *find_client(r, session)->connection);
}

// In connection_call.cc.
/// Ends a call with an outcome if no peer uses its memory. Otherwise begins to close its key.
void try_finish(Rpc& r, ConnectionClient& b, ConnectionClientSlot& k) noexcept;
/// Gives a call up after a cancel or a time-out. Runs no callback: try_finish() does, when the
/// server does not use the call's memory any more.
void abandon_call(Rpc& r, ClientSession& c, ConnectionClientSlot& k, Status status) noexcept;
/// Frees the slot of a call with an outcome, and runs the callback. Returns whether the reply's
/// block was kept.
bool complete_call(Rpc& r, ConnectionClient& b, ConnectionClientSlot& k, Block* block,
                   std::span<const std::byte> bytes) noexcept;

/// Posts the first steps of a call, with a doorbell. Without room, queues them.
void post_call(Rpc& r, ConnectionClient& b, agent::Agent& a, ConnectionClientSlot& k) noexcept;

}  // namespace spinwire::rpc
