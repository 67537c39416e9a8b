// The way out of a small call and of its answer, inlined into the public face. Hot.
#pragma once

#include <algorithm>
#include <bit>

#include "rpc/rpc.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::rpc {

inline std::uint64_t bit(std::uint32_t slot) noexcept { return std::uint64_t{1} << slot; }

/// Whether there is a receive for one more reply.
[[gnu::cold, gnu::noinline]] bool try_post_more_receives(Rpc& r) noexcept;

/// Whether one more call may go out now, as far as its session and the engine are concerned.
[[gnu::always_inline]] inline bool can_send(Rpc& r, const ClientSession& c) noexcept {
  if (c.in_flight >= c.send_window || r.port->full()) [[unlikely]]
    return false;
  return r.reserved_receives < r.posted_receives || try_post_more_receives(r);
}

[[gnu::always_inline]] inline wire::RpcHeader header_of(const ClientSession& c,
                                                        const ClientSlot& call) noexcept {
  return {c.peer_session, call.number, call.method, wire::RpcKind::request, 0, call.size, 0};
}

/// The first call of a session that had none under way. A server that was asked nothing for a while
/// keeps no receives for us any more.
[[gnu::always_inline]] inline void on_first_call(Rpc& r, ClientSession& c,
                                                 std::uint64_t now) noexcept {
  if (now - c.last_heard > r.idle_timeout / 2) [[unlikely]] {
    c.server_window = 1;
    update_send_window(c);
  }
  queue_for_retransmission(r, c, now);
}

/// Sends header and payload by a work request. Not while the port is full.
[[gnu::always_inline]] inline void post_datagram(Rpc& r, const base::DatagramAddress& to,
                                                 wire::RpcWords words, std::uint16_t length,
                                                 const Payload& payload) noexcept {
  if (payload.block == nullptr) [[likely]] {
    r.port->send(to, words, length, payload.text);
  } else {
    r.port->send(to, words, length, payload.block, payload.data);
  }
}
/// The same, out of the way of what is sent directly.
[[gnu::cold, gnu::noinline]] bool post_datagram_cold(Rpc& r, const base::DatagramAddress& to,
                                                     wire::RpcWords words, std::uint16_t length,
                                                     const Payload& payload) noexcept;

/// Sends header and payload: directly if that can be. False, and nothing sent, if the port is full.
[[gnu::always_inline]] inline bool send_datagram(Rpc& r, const base::DatagramAddress& to,
                                                 wire::RpcWords words, std::uint16_t length,
                                                 const Payload& payload) noexcept {
  DatagramPort& port = *r.port;
  if (port.sends_directly()) [[likely]] {
    if (port.send_direct(to, words, length, payload.text)) [[likely]]
      return true;
    return post_datagram_cold(r, to, words, length, payload);
  }
  if (port.full()) [[unlikely]]
    return ++r.stats.unsent, false;
  post_datagram(r, to, words, length, payload);
  return true;
}

/// Sends the call in a slot for the first time; it may_start().
[[gnu::always_inline]] inline void send_request(Rpc& r, ClientSession& c, ClientSlot& call,
                                                std::uint32_t slot, const wire::RpcHeader& header,
                                                std::uint64_t now) noexcept {
  if (c.in_flight++ == 0) [[unlikely]]
    on_first_call(r, c, now);
  c.free_slots ^= bit(slot);
  ++r.reserved_receives;
  call.resends = 0;
  call.on_session_timer = false;
  call.sent_at = now;
  if (call.deadline < now + r.min_rto) [[unlikely]]
    schedule_early_check(r, c, call);
  (void)send_datagram(r, c.peer_address->destination, wire::pack(header), header.length,
                      call.payload);
}

/// Of a session that may have one more call.
inline std::uint32_t free_slot(const ClientSession& c) noexcept {
  return static_cast<unsigned>(__builtin_ctzll(c.free_slots));
}

/// Writes down what is asked, where it stays until the call is over or goes on. False, and nothing
/// is: the send pool is dry.
template <typename Kept>
[[gnu::always_inline]] inline bool store_call(Rpc& r, ClientSession& c, const CallRequest& call,
                                              const ReplyCallback& done, Kept& k) noexcept {
  if (!store_payload(r, k.payload, call.data, call.size, call.block)) [[unlikely]]
    return false;
  k.method = call.method;
  k.size = static_cast<decltype(k.size)>(call.size);
  k.id = ++c.last_call_id;
  k.deadline = call.deadline;
  k.done = done;
  ++r.stats.calls;
  return true;
}

/// Whether a request has to go over a connection for its length. One without a block always fits.
[[gnu::always_inline]] inline bool exceeds_datagram(const ClientSession& c,
                                                    const CallRequest& call) noexcept {
  return call.block != nullptr && call.size > c.max_inline_call;
}

/// Whether a call may go out at once as a datagram: none waits before it, and there is room.
[[gnu::always_inline]] inline bool can_send_at_once(Rpc& r, const ClientSession& c) noexcept {
  return c.backlog_count == 0 && can_send(r, c);
}

/// Sends a call as a datagram; can_send_at_once(). Errors: no_buffer.
[[gnu::always_inline]] inline Status send_call(Rpc& r, ClientSession& c, const CallRequest& call,
                                               const ReplyCallback& done) noexcept {
  const std::uint32_t slot = free_slot(c);
  ClientSlot& k = c.slots[slot];
  if (!store_call(r, c, call, done, k)) [[unlikely]]
    return Status::no_buffer;
  const wire::RpcHeader header{c.peer_session,
                               k.number,
                               call.method,
                               wire::RpcKind::request,
                               0,
                               static_cast<std::uint16_t>(call.size),
                               0};
  send_request(r, c, k, slot, header, call.now);
  return Status::ok;
}

/// The slot is free again; what comes for this call from now on is late.
inline void release_slot(Rpc& r, ClientSession& c, ClientSlot& call, std::uint32_t slot) noexcept {
  c.free_slots |= bit(slot);
  if (--c.in_flight == 0) [[unlikely]]
    r.retransmission_queue.end(c.retransmission_place);
  --r.reserved_receives;
  release_payload(call.payload);
  call.number += c.window;
}

inline void end_call(const ReplyCallback& done, Status status) noexcept {
  Reply reply(status, nullptr, nullptr, 0);
  done(reply);
}

/// For how long a request that is not answered yet has been here.
[[gnu::always_inline]] inline std::uint16_t server_time(const Rpc& r,
                                                        const ServerSlot& v) noexcept {
  if (v.payload.arrived_at == r.context.now) [[likely]]
    return 0;
  const agent::EngineContext& s = r.context;
  const std::uint64_t now = s.clock.now();
  const auto time = s.clock.duration(now - std::min(now, v.payload.arrived_at));
  return static_cast<std::uint16_t>(
      std::min<std::int64_t>(time.count() >> kServerTimeShift, kServerTimeMax));
}

[[gnu::always_inline]] inline void send_reply(Rpc& r, const ServerSession& s, const ServerSlot& v,
                                              std::uint16_t time, std::uint32_t number,
                                              Status status, std::uint16_t size) noexcept {
  const wire::RpcHeader header{s.peer_session,
                               number,
                               time,
                               wire::RpcKind::reply,
                               static_cast<std::uint8_t>(status),
                               size,
                               static_cast<std::uint16_t>(s.advertised_window)};
  (void)send_datagram(r, s.peer_address->destination, wire::pack(header), size, v.payload);
}

[[gnu::always_inline]] inline Status finish_reply(Rpc& r, ServerSession& s, ServerSlot& v,
                                                  std::uint32_t number, Status status,
                                                  const std::byte* data, std::size_t size,
                                                  Block* block) noexcept {
  const std::uint16_t time = server_time(r, v);
  if (!store_payload(r, v.payload, data, size, block)) [[unlikely]]
    return Status::no_buffer;
  v.state = ServerSlotState::answered;
  v.status = status;
  v.size = static_cast<std::uint16_t>(size);
  send_reply(r, s, v, time, number, status, v.size);
  return Status::ok;
}

[[gnu::always_inline]] inline Status answer_call(Rpc& r, std::uint32_t session,
                                                 std::uint32_t number, Status status,
                                                 const std::byte* data, std::size_t size,
                                                 Block* block) noexcept {
  ServerSession* s = r.current_call.session;
  ServerSlot* v = r.current_call.service;
  if (r.current_call.call != call_key(session, number)) [[unlikely]] {
    s = find_server(r, session);
    if (s == nullptr) return answer_over_connection(r, session, number, status, data, size, block);
    v = &s->slots[number & (s->window - 1)];
    if (v->number != number) return Status::not_connected;
  }
  if (v->state != ServerSlotState::running) [[unlikely]]
    return Status::not_connected;
  if (size > kShortCall && size > wire::rpc_payload(s->mtu)) [[unlikely]]
    return Status::message_too_long;
  return finish_reply(r, *s, *v, number, status, data, size, block);
}

}  // namespace spinwire::rpc
