// What the parts of the client's end of long calls have in common: bulk_client.cc is what the
// application asks for, bulk_call.cc is a call's way, bulk_replies.cc what its connection brings.
#pragma once

#include <bit>
#include <cstdint>
#include <utility>

#include "rpc/bulk.h"
#include "rpc/calling.h"

namespace spinwire::rpc {

inline bool is_active(const BulkClient& b, std::uint32_t slot) noexcept {
  return (b.active & bit(slot)) != 0;
}
/// At least the window if there is none.
inline std::uint32_t free_slot(const BulkClient& b) noexcept {
  return static_cast<std::uint32_t>(std::countr_one(b.active));
}
/// The call of a number that the server, or a completion, names; null if it is over.
inline BulkCall* find_call(BulkClient& b, std::uint32_t number) noexcept {
  const std::uint32_t slot = number & (b.window - 1);
  BulkCall& k = b.calls[slot];
  return k.number == number && is_active(b, slot) ? &k : nullptr;
}
inline BulkClient* bulk_of(Rpc& r, std::uint32_t session) noexcept {
  ClientSession* const c = find_client(r, session);
  return c != nullptr ? c->bulk.get() : nullptr;
}

inline BulkAsked& waiting_at(const Rpc& r, BulkClient& b, std::uint32_t i) noexcept {
  return b.waiting[(b.waiting_first + i) % r.context.config.rpc.backlog];
}
/// Number `i` of those that wait does not any more.
inline BulkAsked take_waiting(const Rpc& r, BulkClient& b, std::uint32_t i) noexcept {
  return take_out(b.waiting.get(), r.context.config.rpc.backlog, b.waiting_first, b.waiting_count,
                  i);
}

/// Begins a call in a free slot, which takes no step yet.
inline BulkCall& occupy(BulkClient& b, std::uint32_t slot, BulkAsked&& asked) noexcept {
  BulkCall& k = b.calls[slot];
  const std::uint32_t number = k.number;
  k = {};
  k.number = number;
  k.asked = std::move(asked);
  b.active |= bit(slot);
  return k;
}

inline void want_connection(Rpc& r, BulkClient& b) noexcept {
  if (b.wants || b.agent != kNone) return;
  b.wants = true;
  ++r.wanting;
}
inline void drop_want(Rpc& r, BulkClient& b) noexcept {
  if (std::exchange(b.wants, false)) --r.wanting;
}

/// What the application may have done in a callback: whether all is as before.
inline bool goes_on(Rpc& r, const BulkClient* b, std::uint32_t session) noexcept {
  const ClientSession* const c = find_client(r, session);
  return c != nullptr && c->bulk.get() == b && c->state == SessionState::ready;
}
/// Goes on after an event: callbacks may have ended the session.
inline void pump_again(Rpc& r, const BulkClient* b, std::uint32_t session) noexcept {
  if (goes_on(r, b, session)) (void)pump_bulk(r, *find_client(r, session)->bulk);
}
/// The same when a slot has become free: those that have one and steps to take are due anyway.
inline void pump_waiting(Rpc& r, const BulkClient* b, std::uint32_t session) noexcept {
  if (goes_on(r, b, session) && b->waiting_count != 0) pump_again(r, b, session);
}

/// How it ends; with try_end() it does.
inline void settle(BulkCall& k, Status status) noexcept {
  k.over = true;
  k.status = status;
}

// In bulk_call.cc.
/// Ends it if it is settled and nothing has to be waited for, else begins the first that has to be.
void try_end(Rpc& r, BulkClient& b, BulkCall& k) noexcept;
/// Nobody wants an answer any more. What the server may be using is waited for.
void give_up_call(Rpc& r, ClientSession& c, BulkCall& k, Status status) noexcept;
/// The slot is free before its call's callback runs.
BulkAsked vacate_slot(BulkClient& b, BulkCall& k) noexcept;

/// The first steps of a call, with a doorbell; without room for them it is due.
void post_call(Rpc& r, BulkClient& b, agent::Agent& a, BulkCall& k) noexcept;

// In bulk_client.cc.
/// Ends those that wait, but for what callbacks begin meanwhile.
void end_waiting(Rpc& r, BulkClient& b, Status status) noexcept;

}  // namespace spinwire::rpc
