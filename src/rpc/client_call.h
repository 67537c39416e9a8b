// Sends requests; inlined into the public API. Hot.
#pragma once

#include "base/internals.h"
#include "rpc/client_session.h"
#include "rpc/retransmission.h"
#include "rpc/room_for_calls.h"
#include "rpc/rpc_state.h"
#include "rpc/slots.h"
#include "rpc/transport/connection_transport.h"
#include "rpc/unsent.h"

namespace spinwire::rpc {

/// Posts more receives for replies. Returns false if the budget is used up.
[[gnu::cold, gnu::noinline]] bool try_post_more_receives(Rpc& r) noexcept;

/// Whether the session's window and the engine have room for one more call as a datagram.
[[gnu::always_inline]] inline bool can_send(Rpc& r, const ClientSession& c) noexcept {
  if (c.in_flight >= c.send_window || r.port->full()) [[unlikely]]
    return false;
  return r.reserved_receives < r.posted_receives || try_post_more_receives(r);
}

/// Whether earlier calls wait for the window.
inline bool has_backlog(const ClientSession& c) noexcept { return c.backlog_count != 0; }

[[gnu::always_inline]] inline wire::RpcHeader header_of(const ClientSession& c,
                                                        const ClientSlot& call) noexcept {
  return {c.peer_session, call.number, call.method, wire::RpcKind::request, 0, call.size, 0};
}

/// A session without calls in flight sends one. The server may have taken back its reservation of
/// receives in the meantime.
[[gnu::always_inline]] inline void on_first_call(Rpc& r, ClientSession& c,
                                                 std::uint64_t now) noexcept {
  if (now - c.last_heard > r.timeouts.idle / 2) [[unlikely]] {
    c.server_window = 1;
    update_send_window(c);
  }
  queue_for_retransmission(r, c, now);
}

/// Sends header and payload by a work request. The port must not be full.
[[gnu::always_inline]] inline void post_datagram(Rpc& r, const verbs::DatagramAddress& to,
                                                 wire::RpcWords words, std::uint16_t length,
                                                 const Payload& payload) noexcept {
  if (payload.block == nullptr) [[likely]] {
    r.port->send(to, words, length, payload.text);
  } else {
    r.port->send(to, words, length, payload.block, payload.in.data);
  }
}
/// The cold path of send_datagram() on a device with direct datagrams.
[[gnu::cold, gnu::noinline]] bool post_datagram_cold(Rpc& r, const verbs::DatagramAddress& to,
                                                     wire::RpcWords words, std::uint16_t length,
                                                     const Payload& payload) noexcept;

/// Sends header and payload, as a direct datagram if possible. Returns false, and sends nothing, if
/// there is no room now, or others to the peer wait for room.
[[gnu::always_inline]] inline bool send_datagram(Rpc& r, const verbs::DatagramAddress& to,
                                                 wire::RpcWords words, std::uint16_t length,
                                                 const Payload& payload) noexcept {
  DatagramPort& port = *r.port;
  if (port.sends_directly()) [[likely]] {
    if (port.send_direct(to, words, length, payload)) [[likely]]
      return true;
    return post_datagram_cold(r, to, words, length, payload);
  }
  if (port.full() || to.holds_back) [[unlikely]]
    return ++r.stats.send_queue_full, false;
  post_datagram(r, to, words, length, payload);
  return true;
}

/// Sends the call in a slot for the first time. can_send() must have been true.
[[gnu::always_inline]] inline void send_request(Rpc& r, ClientSession& c, ClientSlot& call,
                                                std::uint32_t slot, const wire::RpcHeader& header,
                                                std::uint64_t now) noexcept {
  if (c.in_flight++ == 0) [[unlikely]]
    on_first_call(r, c, now);
  c.free_slots ^= bit(slot);
  ++r.reserved_receives;
  call.resends = 0;
  call.flags = 0;
  call.sent_at = now;
  if (call.deadline < now + r.min_rto) [[unlikely]]
    schedule_early_check(r, c, call);
  if (!send_datagram(r, c.peer_address->destination, wire::pack(header), header.length,
                     call.payload)) [[unlikely]]
    defer_request(r, c, slot);
}

/// Whether a request is too long for a datagram.
[[gnu::always_inline]] inline bool exceeds_datagram(const ClientSession& c,
                                                    const CallRequest& call) noexcept {
  return call.size > kSlotPayloadBytes && call.size > c.max_inline_call;
}

/// Sends a call as a datagram. The backlog must be empty and can_send() true. `overrides_session`:
/// see kOverridesSession. Errors: no_buffer.
[[gnu::always_inline]] inline Status send_call(Rpc& r, ClientSession& c, const CallRequest& call,
                                               const ReplyCallback& done,
                                               bool overrides_session) noexcept {
  const std::uint32_t slot = free_slot(c);
  ClientSlot& k = c.slots[slot];
  if (!store_call(r, c, call, done, k)) [[unlikely]]
    return refuse_for_block(r, c, call.size);
  const wire::RpcHeader header{c.peer_session,
                               k.number,
                               call.method,
                               wire::RpcKind::request,
                               0,
                               static_cast<std::uint16_t>(call.size),
                               0};
  send_request(r, c, k, slot, header, call.now);
  if (overrides_session) [[unlikely]]
    k.flags |= kOverridesSession;
  return Status::ok;
}

inline void end_call(const ReplyCallback& done, Status status) noexcept {
  Reply reply = detail::make<Reply>(status, nullptr, nullptr, 0);
  detail::Internals::set_code(reply, {});
  done(reply);
}

}  // namespace spinwire::rpc
