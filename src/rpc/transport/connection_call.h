// The client's end of long calls: connection_client.cc is what the application asks for,
// connection_call.cc a call's way, connection_replies.cc what the connection brings.
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
/// A free slot; at least the window if there is none.
inline std::uint32_t free_slot(const ConnectionClient& b) noexcept {
  return static_cast<std::uint32_t>(std::countr_one(b.active));
}
/// The call of a number that the server, or a completion, names; null if it is over.
inline ConnectionClientSlot* find_call(ConnectionClient& b, std::uint32_t number) noexcept {
  const std::uint32_t slot = number & (b.window - 1);
  ConnectionClientSlot& k = b.slots[slot];
  return k.number == number && is_active(b, slot) ? &k : nullptr;
}
inline ConnectionClient* connection_of(Rpc& r, std::uint32_t session) noexcept {
  ClientSession* const c = find_client(r, session);
  return c != nullptr ? c->connection.get() : nullptr;
}

inline ConnectionCall& backlog_at(const Rpc& r, ConnectionClient& b, std::uint32_t i) noexcept {
  return b.backlog[place_in_ring(r.context.config.rpc.backlog, b.backlog_first, i)];
}
/// Removes entry `i` of the backlog.
inline ConnectionCall remove_from_backlog(const Rpc& r, ConnectionClient& b,
                                          std::uint32_t i) noexcept {
  ConnectionCall call = std::exchange(backlog_at(r, b, i), {});
  erase_from_ring(b.backlog.get(), r.context.config.rpc.backlog, b.backlog_first, b.backlog_count,
                  i);
  return call;
}

/// Puts a call into a free slot. Sends nothing.
inline ConnectionClientSlot& occupy_slot(ConnectionClient& b, std::uint32_t slot,
                                         ConnectionCall&& call) noexcept {
  ConnectionClientSlot& k = b.slots[slot];
  const std::uint32_t number = k.number;
  k = {};
  k.number = number;
  k.call = std::move(call);
  b.active |= bit(slot);
  return k;
}

inline void request_connection(Rpc& r, ConnectionClient& b) noexcept {
  if (b.wants_connection || b.agent != kNone) return;
  b.wants_connection = true;
  ++r.connections_wanted;
  r.dialogues.request_connection();
}
inline void withdraw_connection_request(Rpc& r, ConnectionClient& b) noexcept {
  if (std::exchange(b.wants_connection, false)) --r.connections_wanted;
}

/// Whether session and connection are still there and ready after a callback.
inline bool is_still_ready(Rpc& r, const ConnectionClient* b, std::uint32_t session) noexcept {
  const ClientSession* const c = find_client(r, session);
  return c != nullptr && c->connection.get() == b && c->state == SessionState::ready;
}
/// Advances the calls after an event, unless a callback has ended the session.
inline void advance_if_ready(Rpc& r, const ConnectionClient* b, std::uint32_t session) noexcept {
  if (is_still_ready(r, b, session)) (void)advance(r, *find_client(r, session)->connection);
}
/// Advances the backlog after a slot has become free.
inline void advance_backlog(Rpc& r, const ConnectionClient* b, std::uint32_t session) noexcept {
  if (is_still_ready(r, b, session) && b->backlog_count != 0) advance_if_ready(r, b, session);
}

/// Sets the outcome of a call; try_finish() ends it.
inline void set_outcome(ConnectionClientSlot& k, Status status) noexcept {
  k.has_outcome = true;
  k.status = status;
}

// In connection_call.cc.
/// Ends a call whose outcome is set if no peer uses its memory; else begins to close its key.
void try_finish(Rpc& r, ConnectionClient& b, ConnectionClientSlot& k) noexcept;
/// Gives a call up after a cancel or a time-out. Runs no callback: try_finish() does, as soon as
/// the server does not use the call's memory.
void abandon_call(Rpc& r, ClientSession& c, ConnectionClientSlot& k, Status status) noexcept;
/// The slot is free before its call's callback runs.
ConnectionCall release_slot(ConnectionClient& b, ConnectionClientSlot& k) noexcept;

/// The first steps of a call, with a doorbell; without room for them it is due.
void post_call(Rpc& r, ConnectionClient& b, agent::Agent& a, ConnectionClientSlot& k) noexcept;

// In connection_client.cc.
/// Ends those that wait, but for what callbacks begin meanwhile.
void end_backlogged(Rpc& r, ConnectionClient& b, Status status) noexcept;

}  // namespace spinwire::rpc
