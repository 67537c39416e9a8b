// The way out of a small call and of its answer, inlined into the public face. Hot.
#pragma once

#include <algorithm>
#include <bit>

#include "rpc/bulk.h"
#include "rpc/rpc.h"

namespace spinwire::rpc {

inline std::uint64_t bit(std::uint32_t slot) noexcept { return std::uint64_t{1} << slot; }

/// Whether one more call may go out now, as far as its session and the engine are concerned.
inline bool may_start(const Rpc& r, const ClientSession& c) noexcept {
  return c.under_way < c.allowed && r.promised < r.budget && !r.port->full();
}

[[gnu::always_inline]] inline wire::RpcHeader header_of(const ClientSession& c,
                                                        const Call& call) noexcept {
  return {c.peer, call.number, call.method, wire::RpcKind::request, 0, call.size, 0};
}

/// A server that was asked nothing for a while keeps no receives for us any more.
[[gnu::always_inline]] inline void mind_idleness(const Rpc& r, ClientSession& c,
                                                 std::uint64_t now) noexcept {
  if (c.under_way == 0 && now - c.last_heard > r.idle / 2) [[unlikely]] {
    c.granted = 1;
    allow(c);
  }
}

/// Sends header and payload by a work request. Not while the port is full.
[[gnu::always_inline]] inline void put_on_list(Rpc& r, const Destination& to,
                                               const wire::RpcHeader& header,
                                               const Payload& payload) noexcept {
  const wire::RpcWords words = wire::pack(header);
  if (payload.block == nullptr) [[likely]] {
    r.port->send(to, words, header.length, payload.text);
  } else {
    r.port->send(to, words, header.length, payload.block, payload.data);
  }
}
/// The same, out of the way of what is sent directly.
[[gnu::noinline]] void put_on_list_after_all(Rpc& r, const Destination& to,
                                             const wire::RpcHeader& header,
                                             const Payload& payload) noexcept;

/// Sends what `header()` says, and the payload: directly if that can be. Not while the port is
/// full.
template <typename Header>
[[gnu::always_inline]] inline void put_out(Rpc& r, const Destination& to, const Header& header,
                                           const Payload& payload) noexcept {
  const wire::RpcHeader first = header();
  if (!r.port->sends_directly()) return put_on_list(r, to, first, payload);
  if (payload.block != nullptr ||
      !r.port->send_direct(to, wire::pack(first), first.length, payload.text)) [[unlikely]] {
    put_on_list_after_all(r, to, header(), payload);  // so that nothing has to be kept till here
  }
}

/// The same; false, and nothing sent, if the port is full.
template <typename Header>
[[gnu::always_inline]] inline bool transmit(Rpc& r, const Destination& to, const Header& header,
                                            const Payload& payload) noexcept {
  if (r.port->full()) [[unlikely]]
    return ++r.stats.unsent, false;
  put_out(r, to, header, payload);
  return true;
}

/// Sends the call in a slot for the first time; it may_start().
[[gnu::always_inline]] inline void start(Rpc& r, ClientSession& c, Call& call, std::uint32_t slot,
                                         std::uint64_t now) noexcept {
  mind_idleness(r, c, now);
  c.active |= bit(slot);
  ++c.under_way;
  if (++r.promised > r.covered) [[unlikely]]
    cover(r);
  call.tries = 0;
  call.sent_at = now;
  const auto header = [&] { return header_of(c, call); };
  put_out(r, c.route->to, header, call.payload);
  look_for_answer(r, c, call, now);
}

inline std::uint32_t free_slot(const ClientSession& c) noexcept {
  return static_cast<std::uint32_t>(std::countr_one(c.active));
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
  if (c.state != SessionState::ready) [[unlikely]]
    return Status::not_connected;
  if (asked.size > c.longest) [[unlikely]]
    return Status::message_too_long;
  if (c.waiting_count != 0 || !may_start(r, c)) [[unlikely]]
    return put_off(r, c, asked, done);
  const std::uint32_t slot = free_slot(c);
  Call& k = c.calls[slot];
  if (!note(r, c, asked, done, k)) [[unlikely]]
    return Status::no_buffer;
  start(r, c, k, slot, asked.now);
  return Status::ok;
}

/// The slot is free again; what comes for this call from now on is late.
inline void vacate(Rpc& r, ClientSession& c, Call& call, std::uint32_t slot) noexcept {
  r.watch.end(call.watched);
  c.active &= ~bit(slot);
  --c.under_way;
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
  if (v.payload.since == r.shared.now) [[likely]]
    return 0;
  const agent::Shared& s = r.shared;
  const std::uint64_t now = s.clock.now();
  const auto time = s.clock.duration(now - std::min(now, v.payload.since));
  return static_cast<std::uint16_t>(std::min<std::int64_t>(time.count() >> kHeldShift, kHeldMost));
}

[[gnu::always_inline]] inline void send_answer(Rpc& r, const ServerSession& s, const Service& v,
                                               std::uint16_t time) noexcept {
  const auto header = [&] {
    return wire::RpcHeader{s.peer,
                           v.number,
                           time,
                           wire::RpcKind::reply,
                           static_cast<std::uint8_t>(v.status),
                           v.size,
                           static_cast<std::uint16_t>(s.granted)};
  };
  (void)transmit(r, s.route->to, header, v.payload);
}

[[gnu::always_inline]] inline Status finish(Rpc& r, ServerSession& s, Service& v, Status status,
                                            const std::byte* data, std::size_t size,
                                            Block* block) noexcept {
  const std::uint16_t time = held(r, v);
  if (!fill(r, v.payload, data, size, block)) [[unlikely]]
    return Status::no_buffer;
  v.state = ServiceState::answered;
  v.status = status;
  v.size = static_cast<std::uint16_t>(size);
  send_answer(r, s, v, time);
  return Status::ok;
}

[[gnu::always_inline]] inline Status answer(Rpc& r, std::uint32_t session, std::uint32_t number,
                                            Status status, const std::byte* data, std::size_t size,
                                            Block* block) noexcept {
  ServerSession* const s = find_server(r, session);
  if (s == nullptr) [[unlikely]]
    return answer_bulk(r, session, number, status, data, size, block);
  Service& v = s->services[number & (s->window - 1)];
  if (v.number != number || v.state != ServiceState::running) [[unlikely]]
    return Status::not_connected;
  if (size > wire::rpc_payload(s->mtu)) [[unlikely]]
    return Status::message_too_long;
  return finish(r, *s, v, status, data, size, block);
}

}  // namespace spinwire::rpc
