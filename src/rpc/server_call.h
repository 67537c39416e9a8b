// Runs the handler of a call at its server, and sends the reply. Hot.
#pragma once

#include <algorithm>
#include <string_view>

#include "base/internals.h"
#include "rpc/at_most_once.h"
#include "rpc/call_samples.h"
#include "rpc/client_call.h"
#include "rpc/receive_reservation.h"
#include "rpc/room_for_calls.h"
#include "rpc/server_session.h"
#include "rpc/session_goodbye.h"
#include "rpc/unsent.h"

namespace spinwire::rpc {

/// Time since the arrival of an unanswered request, in units of 2^kServerTimeShift ns;
/// kServerTimeMax if nobody knows.
[[gnu::always_inline]] inline std::uint16_t server_time(const Rpc& r,
                                                        const ServerSlot& v) noexcept {
  if (v.payload.arrived_at == r.context.now) [[likely]]
    return 0;
  // The time from the client's sending to the end of the sleep is neither network delay nor known.
  // kServerTimeMax has the client judge neither delay nor loss by it.
  if (v.payload.arrived_at == kUnknownArrival) return kServerTimeMax;
  const agent::EngineContext& ctx = r.context;
  const std::uint64_t now = ctx.clock.now();
  const auto time = ctx.clock.duration(now - std::min(now, v.payload.arrived_at));
  return static_cast<std::uint16_t>(
      std::min<std::int64_t>(time.count() >> kServerTimeShift, kServerTimeMax));
}

/// Returns false, and sends nothing, if there is no room.
[[gnu::always_inline]] inline bool try_to_send_reply(Rpc& r, const ServerSession& s,
                                                     const ServerSlot& v, std::uint16_t time,
                                                     std::uint32_t number, std::uint8_t status,
                                                     std::uint16_t size) noexcept {
  const wire::RpcHeader header{s.peer_session,
                               number,
                               time,
                               wire::RpcKind::reply,
                               status,
                               size,
                               static_cast<std::uint16_t>(s.advertised_window)};
  return send_datagram(r, s.peer_address->destination, wire::pack(header), size, v.payload);
}
/// Sends a reply now or, if there is no room, in a later poll.
[[gnu::always_inline]] inline void send_reply(Rpc& r, ServerSession& s, const ServerSlot& v,
                                              std::uint16_t time, std::uint32_t number,
                                              std::uint8_t status, std::uint16_t size) noexcept {
  if (!try_to_send_reply(r, s, v, time, number, status, size)) [[unlikely]]
    defer_reply(r, s, number & (s.window - 1));  // which sets another state
}

[[gnu::always_inline]] inline Status finish_reply(Rpc& r, ServerSession& s, ServerSlot& v,
                                                  std::uint32_t number, std::uint8_t status,
                                                  const std::byte* data, std::size_t size,
                                                  Block* block) noexcept {
  const std::uint16_t time = server_time(r, v);
  if (!store_payload(r, v.payload, data, size, block)) [[unlikely]]
    return refuse_reply_for_block(r, size);
  v.state = ServerSlotState::answered;
  v.status = status;
  v.size = static_cast<std::uint16_t>(size);
  send_reply(r, s, v, time, number, status, v.size);
  return Status::ok;
}

[[gnu::always_inline]] inline Status answer_call(Rpc& r, CallRef call, Status status,
                                                 const std::byte* data, std::size_t size,
                                                 Block* block) noexcept {
  ServerSession* s = r.current_call.session;
  ServerSlot* v = r.current_call.slot;
  if (!is_same(r.current_call.call, call)) [[unlikely]] {
    if (call.transport == Transport::connection)
      return answer_over_connection(r, call, status, data, size, block);
    s = find_server(r, call.session);
    v = s != nullptr ? find_slot(*s, call.number) : nullptr;
    if (v == nullptr) return Status::not_connected;
  }
  if (v->state != ServerSlotState::running) [[unlikely]]
    return Status::not_connected;
  if (size > kSlotPayloadBytes && size > wire::rpc_payload(s->longest_datagram)) [[unlikely]]
    return Status::message_too_long;
  return finish_reply(r, *s, *v, call.number, static_cast<std::uint8_t>(status), data, size, block);
}

/// Refuses a call for its handler, with a code for clients that take codes. Cold.
Status refuse_with_code(Rpc& r, CallRef call, std::uint32_t code, std::string_view text) noexcept;

[[gnu::cold, gnu::noinline]] inline void refuse(Rpc& r, CallRef call, Status status,
                                                std::string_view text) noexcept {
  const std::size_t size = std::min(text.size(), kSlotPayloadBytes);
  (void)answer_call(r, call, status, reinterpret_cast<const std::byte*>(text.data()), size,
                    nullptr);
}

/// Runs the handler of a new request. Returns whether the block was kept.
[[gnu::always_inline]] inline bool run_request(Rpc& r, ServerSession& s, wire::RpcWords words,
                                               Block* block, std::byte* payload,
                                               std::uint64_t now) noexcept {
  const wire::RpcHeader header = wire::unpack(words);
  s.last_heard = now;
  ServerSlot& v = s.slots[header.number & (s.window - 1)];
  if (!is_new_request(v, header.number)) [[unlikely]]
    return on_duplicate_request(r, s, v, header.number), false;
  end_payload(r, v.payload);
  v.number = header.number;
  v.state = ServerSlotState::running;
  v.payload.arrived_at = r.oldest_arrival;
  if (s.advertised_window != s.window) [[unlikely]] {
    reserve_window_receives(r, s);
    if (is_leaving(s)) return refuse_late_call(r, call_of(words)), false;
  }
  if (header.method >= r.method_count || !r.handlers[header.method]) [[unlikely]] {
    refuse(r, call_of(words), Status::unsupported, "no such method");
    return false;
  }
  ++r.stats.served;
  Request request = detail::make<Request>(detail::make<PendingCall>(r.context.slot, call_of(words)),
                                          header.method, block, payload, header.length);
  // One by one: a copy of the whole reads what has just been written in parts, and waits for it.
  r.current_call.call = call_of(words);
  r.current_call.session = &s;
  r.current_call.slot = &v;
  if (observe::kObservesHotPath) r.current_call.method = header.method;
  if (is_sample_due(r)) [[unlikely]] {
    run_sampled_handler(r, request);
  } else {
    r.handlers[header.method](request);
  }
  if (!detail::Internals::is_answered(request)) [[unlikely]]
    refuse(r, call_of(words), Status::refused, "the handler has not answered");
  return detail::Internals::is_kept(request);
}

}  // namespace spinwire::rpc
