// The way out of a small call and of its answer, inlined into the public face. Hot.
#pragma once

#include <algorithm>
#include <bit>

#include "rpc/bulk.h"
#include "rpc/rpc.h"

namespace spinwire::rpc {

inline std::uint64_t bit(std::uint32_t slot) noexcept { return std::uint64_t{1} << slot; }

/// Whether there is a receive for one more reply.
[[gnu::cold, gnu::noinline]] bool cover_more(Rpc& r) noexcept;

/// Whether one more call may go out now, as far as its session and the engine are concerned.
[[gnu::always_inline]] inline bool may_start(Rpc& r, const ClientSession& c) noexcept {
  if (c.under_way >= c.allowed || r.port->full()) [[unlikely]]
    return false;
  return r.promised < r.covered || cover_more(r);
}

[[gnu::always_inline]] inline wire::RpcHeader header_of(const ClientSession& c,
                                                        const Call& call) noexcept {
  return {c.peer, call.number, call.method, wire::RpcKind::request, 0, call.size, 0};
}

/// The first call of a session that had none under way. A server that was asked nothing for a while
/// keeps no receives for us any more.
[[gnu::always_inline]] inline void begin_work(Rpc& r, ClientSession& c,
                                              std::uint64_t now) noexcept {
  if (now - c.last_heard > r.idle / 2) [[unlikely]] {
    c.granted = 1;
    allow(c);
  }
  watch_session(r, c, now);
}

/// Sends header and payload by a work request. Not while the port is full.
[[gnu::always_inline]] inline void put_on_list(Rpc& r, const Destination& to, wire::RpcWords words,
                                               std::uint16_t length,
                                               const Payload& payload) noexcept {
  if (payload.block == nullptr) [[likely]] {
    r.port->send(to, words, length, payload.text);
  } else {
    r.port->send(to, words, length, payload.block, payload.data);
  }
}
/// The same, out of the way of what is sent directly.
[[gnu::cold, gnu::noinline]] bool put_on_list_after_all(Rpc& r, const Destination& to,
                                                        wire::RpcWords words, std::uint16_t length,
                                                        const Payload& payload) noexcept;

/// Sends header and payload: directly if that can be. False, and nothing sent, if the port is full.
[[gnu::always_inline]] inline bool put_out(Rpc& r, const Destination& to, wire::RpcWords words,
                                           std::uint16_t length, const Payload& payload) noexcept {
  Port& port = *r.port;
  if (port.sends_directly()) [[likely]] {
    if (port.send_direct(to, words, length, payload.text)) [[likely]]
      return true;
    return put_on_list_after_all(r, to, words, length, payload);
  }
  if (port.full()) [[unlikely]]
    return ++r.stats.unsent, false;
  put_on_list(r, to, words, length, payload);
  return true;
}

/// Sends the call in a slot for the first time; it may_start().
[[gnu::always_inline]] inline void start(Rpc& r, ClientSession& c, Call& call, std::uint32_t slot,
                                         const wire::RpcHeader& header,
                                         std::uint64_t now) noexcept {
  if (c.under_way++ == 0) [[unlikely]]
    begin_work(r, c, now);
  c.free ^= bit(slot);
  ++r.promised;
  call.tries = 0;
  call.exact = false;
  call.sent_at = now;
  if (call.deadline < now + r.least_patience) [[unlikely]]
    look_early(r, c, call);
  (void)put_out(r, c.route->to, wire::pack(header), header.length, call.payload);
}

/// Of a session that may have one more call.
inline std::uint32_t free_slot(const ClientSession& c) noexcept {
  return static_cast<unsigned>(__builtin_ctzll(c.free));
}

/// Writes down what is asked, where it stays until the call is over or goes on. False, and nothing
/// is: the send pool is dry.
template <typename Kept>
[[gnu::always_inline]] inline bool note(Rpc& r, ClientSession& c, const Asked& asked,
                                        const ReplyCallback& done, Kept& k) noexcept {
  if (!fill(r, k.payload, asked.data, asked.size, asked.block)) [[unlikely]]
    return false;
  k.method = asked.method;
  k.size = static_cast<decltype(k.size)>(asked.size);
  k.id = ++c.last_call;
  k.deadline = asked.deadline;
  k.done = done;
  ++r.stats.calls;
  return true;
}

[[gnu::always_inline]] inline Status call(Rpc& r, ClientSession& c, const Asked& asked,
                                          const ReplyCallback& done) noexcept {
  if (asked.block != nullptr && asked.size > c.longest) [[unlikely]]  // what has none always fits
    return Status::message_too_long;
  if (c.waiting_count != 0 || !may_start(r, c)) [[unlikely]]
    return put_off(r, c, asked, done);
  const std::uint32_t slot = free_slot(c);
  Call& k = c.calls[slot];
  if (!note(r, c, asked, done, k)) [[unlikely]]
    return Status::no_buffer;
  const wire::RpcHeader header{c.peer,
                               k.number,
                               asked.method,
                               wire::RpcKind::request,
                               0,
                               static_cast<std::uint16_t>(asked.size),
                               0};
  start(r, c, k, slot, header, asked.now);
  return Status::ok;
}

/// The slot is free again; what comes for this call from now on is late.
inline void vacate(Rpc& r, ClientSession& c, Call& call, std::uint32_t slot) noexcept {
  c.free |= bit(slot);
  if (--c.under_way == 0) [[unlikely]]
    r.watch.end(c.watched);
  --r.promised;
  clear(call.payload);
  call.number += c.window;
}

inline void end_call(const ReplyCallback& done, Status status) noexcept {
  Reply reply(status, nullptr, nullptr, 0);
  done(reply);
}

/// For how long a request that is not answered yet has been here.
[[gnu::always_inline]] inline std::uint16_t held(const Rpc& r, const Service& v) noexcept {
  if (v.payload.since == r.context.now) [[likely]]
    return 0;
  const agent::EngineContext& s = r.context;
  const std::uint64_t now = s.clock.now();
  const auto time = s.clock.duration(now - std::min(now, v.payload.since));
  return static_cast<std::uint16_t>(std::min<std::int64_t>(time.count() >> kHeldShift, kHeldMost));
}

[[gnu::always_inline]] inline void send_answer(Rpc& r, const ServerSession& s, const Service& v,
                                               std::uint16_t time, std::uint32_t number,
                                               Status status, std::uint16_t size) noexcept {
  const wire::RpcHeader header{s.peer,
                               number,
                               time,
                               wire::RpcKind::reply,
                               static_cast<std::uint8_t>(status),
                               size,
                               static_cast<std::uint16_t>(s.granted)};
  (void)put_out(r, s.route->to, wire::pack(header), size, v.payload);
}

[[gnu::always_inline]] inline Status finish(Rpc& r, ServerSession& s, Service& v,
                                            std::uint32_t number, Status status,
                                            const std::byte* data, std::size_t size,
                                            Block* block) noexcept {
  const std::uint16_t time = held(r, v);
  if (!fill(r, v.payload, data, size, block)) [[unlikely]]
    return Status::no_buffer;
  v.state = ServiceState::answered;
  v.status = status;
  v.size = static_cast<std::uint16_t>(size);
  send_answer(r, s, v, time, number, status, v.size);
  return Status::ok;
}

[[gnu::always_inline]] inline Status answer(Rpc& r, std::uint32_t session, std::uint32_t number,
                                            Status status, const std::byte* data, std::size_t size,
                                            Block* block) noexcept {
  ServerSession* s = r.serving.session;
  Service* v = r.serving.service;
  if (r.serving.call != name_of(session, number)) [[unlikely]] {
    s = find_server(r, session);
    if (s == nullptr) return answer_bulk(r, session, number, status, data, size, block);
    v = &s->services[number & (s->window - 1)];
    if (v->number != number) return Status::not_connected;
  }
  if (v->state != ServiceState::running) [[unlikely]]
    return Status::not_connected;
  if (size > kShortCall && size > wire::rpc_payload(s->mtu)) [[unlikely]]
    return Status::message_too_long;
  return finish(r, *s, *v, number, status, data, size, block);
}

}  // namespace spinwire::rpc
