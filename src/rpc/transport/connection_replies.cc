// Events on the client's end of a session's connection: replies as messages or WRITEs, confirmed
// cancels, closed keys, and the end of the connection.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/internals.h"
#include "rpc/backlog.h"
#include "rpc/client_session.h"
#include "rpc/refused_calls.h"
#include "rpc/session_goodbye.h"
#include "rpc/session_liveness.h"
#include "rpc/session_reconnect.h"
#include "rpc/transport/connection_call.h"

namespace spinwire::rpc {

namespace {

using wire::RpcMessageHeader;
using wire::RpcMessageKind;
using Sent = ConnectionClientSlot::Sent;
using Cancel = ConnectionClientSlot::Cancel;

/// The end of a callback's connection; null if the session is gone, or has another connection now.
ConnectionClient* connection_of(Rpc& r, std::uint32_t session, const Connection& named) noexcept {
  ConnectionClient* const b = connection_of(r, session);
  return b != nullptr && is_connection_of(r, *b, named) ? b : nullptr;
}

/// Gives the steps after a reply, such as closing a key, a deadline of their own.
void extend_deadline(const Rpc& r, ConnectionClientSlot& k) noexcept {
  if (k.asked_deadline == 0) k.asked_deadline = k.call.deadline;
  k.call.deadline = std::max(k.call.deadline, r.context.clock.now() + r.timeouts.close);
}

/// Ends a call whose reply is in its memory.
void end_in_memory(Rpc& r, ConnectionClient& b, ConnectionClientSlot& k,
                   std::size_t size) noexcept {
  k.call.outcome = Status::ok;
  k.size = static_cast<std::uint32_t>(size);
  if (k.request_in_flight || k.key_open) extend_deadline(r, k);
  try_finish(r, b, k);
}

/// Copies a short reply to the call's memory.
void copy_reply(Rpc& r, ConnectionClient& b, agent::Agent& a, ConnectionClientSlot& k,
                std::span<const std::byte> payload) noexcept {
  if (payload.size() > k.call.reply.size())
    return fail_protocol(r, a, "a reply that its memory cannot take");
  if (!payload.empty()) std::memcpy(k.call.reply.data(), payload.data(), payload.size());
  const std::uint32_t session = b.session;
  end_in_memory(r, b, k, payload.size());
  advance_if_ready(r, session);
}

/// Whether a number that is of no call in a slot was of one before.
bool was_made(const ConnectionClient& b, std::uint32_t number) noexcept {
  return static_cast<std::int32_t>(number - b.slots[number & (b.window - 1)].number) < 0;
}

/// Finds the call that a reply is for; null if it is over, which is no fault of the server's.
ConnectionClientSlot* find_call_of_reply(Rpc& r, ConnectionClient& b, agent::Agent& a,
                                         std::uint32_t number) noexcept {
  if (ConnectionClientSlot* const k = find_call(b, number); k != nullptr) return k;
  if (was_made(b, number))
    ++r.stats.late_replies;
  else
    fail_protocol(r, a, "a reply to a call that was never made");
  return nullptr;
}

/// Handles a reply without a header: a short one, or one that place_reply() has placed.
void on_bare_reply(Rpc& r, ConnectionClient& b, agent::Agent& a, const Message& m) noexcept {
  ConnectionClientSlot* const k = find_call_of_reply(r, b, a, *m.immediate());
  if (k == nullptr) return;
  if (!k->places_reply || k->sent == Sent::nothing)
    return fail_protocol(r, a, "a reply that no call waits for");
  // Another message may arrive before the one that is being placed.
  const bool is_placed = k->placing && m.data() == k->call.reply.data();
  if (k->placing && !is_placed) return fail_protocol(r, a, "a second reply");
  k->placing = false;
  if (k->cancel != Cancel::none) return;  // the cancel and the reply crossed
  if (k->call.outcome) {
    ++r.stats.late_replies;
    return is_placed ? try_finish(r, b, *k) : void();
  }
  if (!is_placed) return copy_reply(r, b, a, *k, m.bytes());
  const std::uint32_t session = b.session;
  end_in_memory(r, b, *k, m.size());
  advance_if_ready(r, session);
}

/// Handles a reply that came as a message.
void on_reply_message(Rpc& r, ConnectionClient& b, agent::Agent& a, const RpcMessageHeader& header,
                      Message& m, std::span<const std::byte> payload) noexcept {
  ConnectionClientSlot* const k = find_call_of_reply(r, b, a, header.number);
  if (k == nullptr) return;
  if (k->cancel != Cancel::none) return;  // the cancel and the reply crossed
  const Status status = wire::status_in(header.status);
  if (k->sent == Sent::nothing || (status == Status::ok && k->key_open))
    return fail_protocol(r, a, "a reply to no call, or one that was to be written");
  if (k->placing) return fail_protocol(r, a, "a second reply");
  if (k->call.outcome) {  // the server refused to pull the request
    ++r.stats.late_replies;
    return;
  }
  if (status == Status::ok && k->places_reply) return copy_reply(r, b, a, *k, payload);
  k->call.outcome = status;
  if (wire::has_code(header.status)) k->code = header.code;
  if (!k->request_in_flight && !k->key_open) {  // the usual case: complete at once
    const std::uint32_t session = b.session;
    if (complete_call(r, b, *k, detail::block_of(m), payload))
      (void)m.take();  // the slice now holds the block
    if (is_ready(r, session) && b.backlog_count != 0) advance(r, b);
    return;
  }
  k->reply_message = m.take();
  extend_deadline(r, *k);
  try_finish(r, b, *k);
}

/// Handles a reply that was written to the call's memory.
void on_reply_write(Rpc& r, ConnectionClient& b, agent::Agent& a, const Message& m) noexcept {
  ConnectionClientSlot* const k = find_call(b, *m.immediate());
  if (k == nullptr || !k->key_open || k->sent == Sent::nothing ||
      (k->call.outcome && k->cancel == Cancel::none) || m.size() > k->call.reply.size())
    return fail_protocol(r, a, "a write that no call waits for");
  if (k->cancel != Cancel::none) return;  // the write crossed the cancel
  end_in_memory(r, b, *k, m.size());
}

/// Handles the server's confirmation of a cancel.
void on_cancelled(Rpc& r, ConnectionClient& b, agent::Agent& a,
                  const RpcMessageHeader& header) noexcept {
  ConnectionClientSlot* const k = find_call(b, header.number);
  if (k == nullptr || k->cancel != Cancel::sent)
    return fail_protocol(r, a, "the end of a call that was not cancelled");
  const std::uint32_t session = b.session;
  k->cancel = Cancel::none;
  try_finish(r, b, *k);
  advance_if_ready(r, session);
}

void on_client_message(Rpc& r, std::uint32_t session, const Connection& from, Message& m) noexcept {
  ConnectionClient* const b = connection_of(r, session, from);
  if (b == nullptr) return;
  wake_blocked(r, *b);
  agent::Agent& a = *agent_of(r, *b);
  if (m.is_write()) return on_reply_write(r, *b, a, m);
  if (m.immediate()) return on_bare_reply(r, *b, a, m);
  RpcMessageHeader header;
  std::span<const std::byte> payload;
  if (!wire::decode(m.bytes(), header, payload)) return fail_protocol(r, a, "a malformed one");
  if (header.kind == RpcMessageKind::reply) return on_reply_message(r, *b, a, header, m, payload);
  if (header.kind == RpcMessageKind::cancelled) return on_cancelled(r, *b, a, header);
  if (header.kind == RpcMessageKind::goodbye)
    return (void)on_goodbye(r, *find_client(r, session), header.number);
  fail_protocol(r, a, "one that only clients send");
}

/// Places a reply in its call's memory. False: no call waits for such a one.
bool place_reply(Rpc& r, ConnectionClient& b, Offer& offer) noexcept {
  const std::uint32_t number = *offer.immediate();
  ConnectionClientSlot* const k = find_call(b, number);
  const bool is_late = k != nullptr ? k->call.outcome.has_value() : was_made(b, number);
  if (is_late) ++r.stats.late_replies;
  if (k == nullptr || is_late || !k->places_reply || k->placing || k->sent == Sent::nothing ||
      offer.place(k->call.reply) != Status::ok)
    return false;
  k->placing = true;
  return true;
}

/// Refuses rendezvous messages that exceed the longest reply without named memory.
void on_client_offer(Rpc& r, std::uint32_t session, const Connection& from, Offer& offer) noexcept {
  ConnectionClient* const b = connection_of(r, session, from);
  if (b != nullptr) wake_blocked(r, *b);
  if (b != nullptr && offer.immediate()) return place_reply(r, *b, offer) ? void() : offer.refuse();
  if (b == nullptr ||
      offer.size() > wire::kRpcMessageHeaderBytes + std::size_t{wire::kBlockDatagramBytes})
    offer.refuse();
}

/// No peer can reach a reply's memory any more.
void on_reply_returned(Rpc& r, std::uint32_t session, const Connection& from,
                       const Returned& returned) noexcept {
  ConnectionClient* const b = connection_of(r, session, from);
  if (b == nullptr) return;
  for (std::uint32_t slot = 0; slot < b->window; ++slot) {
    ConnectionClientSlot& k = b->slots[slot];
    if (!is_active(*b, slot) || !k.key_open || k.lease != returned.lease.value) continue;
    k.key_open = k.key_closing = false;
    try_finish(r, *b, k);
    return advance_if_ready(r, session);
  }
}

void on_client_ready(Rpc& r, std::uint32_t session, const Connection& which) noexcept {
  ConnectionClient* const b = connection_of(r, session, which);
  if (b == nullptr) return;
  b->was_ready = true;
  b->is_retried = false;
  b->ready_at = r.context.clock.now();
  ClientSession& c = *find_client(r, session);
  if (c.state == SessionState::opening) mark_ready(r, c);
  advance_if_ready(r, session);
}

/// Ends all calls in the slots of a connection that is gone: no peer can reach their memory any
/// more. `unsent`: the status of those whose handler cannot have run, because their request was not
/// sent.
void end_active_calls(Rpc& r, ConnectionClient& b, Status status, Status unsent) noexcept {
  const std::uint64_t ending = b.active;
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    if ((ending & bit(slot)) == 0 || !is_active(b, slot)) continue;
    ConnectionClientSlot& k = b.slots[slot];
    k.key_open = k.request_in_flight = k.placing = false;
    k.cancel = Cancel::none;
    if (!k.call.outcome) k.call.outcome = k.sent == Sent::all ? status : unsent;
    try_finish(r, b, k);
  }
}

/// The connection of a session without datagrams has ended. Makes a lost connection again, unless
/// it had replaced another one only shortly before.
void on_mandatory_connection_lost(Rpc& r, ClientSession& c, bool was_ready,
                                  const EndReason& why) noexcept {
  if (c.state == SessionState::closing || (c.is_leaving && !comes_back(c)))
    return end_session_in_order(r, c);
  if (c.is_leaving) return on_closed_by_server(r, c);
  if (c.state == SessionState::opening && !why)
    return end_session(r, c, Status::peer_lost, "the server has ended its connection");
  // Otherwise the server has ended the session.
  if (!why) return on_closed_by_server(r, c);
  if (c.state == SessionState::opening) return end_session(r, c, why);
  ConnectionClient& b = *c.connection;
  if (!was_ready) {
    return end_session(
        r, c, Status::peer_lost,
        base::format("its connection was lost, and another could not be made: {}", why->found),
        why->remedy.c_str());
  }
  const bool brief = r.context.clock.now() - b.ready_at < r.timeouts.close;
  if (std::exchange(b.had_connection, true) && brief) return end_session(r, c, why);
  request_connection(r, b);
}

void on_client_closed(Rpc& r, std::uint32_t session, const Connection& gone,
                      const Error& error) noexcept {
  ConnectionClient* const b = connection_of(r, session, gone);
  if (b == nullptr) return;
  ClientSession& c = *find_client(r, session);
  const EndReason why =  // none: the server has closed the connection
      error.status != Status::ok ? EndReason(error) : EndReason();
  b->agent = {};
  if (!why && c.state == SessionState::ready && c.transport == Transport::connection &&
      c.goodbye.reason == GoodbyeReason::none)
    c.goodbye = error.goodbye;
  const bool was_ready = std::exchange(b->was_ready, false);
  if (std::exchange(b->is_interrupted, false) && c.state == SessionState::opening)
    return end_active_calls(r, *b, b->interrupted_as, Status::not_connected);
  const bool wanted = c.state == SessionState::ready;
  const bool has_moved = wanted && !was_ready && why && why->goodbye.invites_back();
  const bool sole_transport = c.transport == Transport::connection && !b->is_ending;
  Status status = wanted ? Status::peer_lost : Status::flushed;
  if (b->is_ending && b->why) status = status_of_calls(b->why);
  if (sole_transport && !why) status = Status::flushed;
  if (wanted && !b->is_ending && (!c.is_leaving || comes_back(c))) keep_unsent_calls(r, c);
  end_active_calls(r, *b, status, status);
  if (sole_transport) {
    if (connection_of(r, session) == b) on_mandatory_connection_lost(r, c, was_ready, why);
    return;
  }
  if (has_moved && is_ready(r, session)) {
    if (!c.is_leaving) on_goodbye(r, c, why->goodbye);  // what the server has said itself stays
    return;
  }
  if (is_ready(r, session) && doubt_server(r, c, why)) return;
  // A connection that could not be made would fail again. Its status says nothing of the calls that
  // waited for it: `refused` and `limit` would say that their handlers have run.
  if (!was_ready) end_backlog(*b, wanted ? Status::not_connected : status);
  if (connection_of(r, session) != b) return;
  if (b->is_ending) return end_session(r, c, EndReason(std::move(b->why)));
  if (b->backlog_count != 0 && state_of(c) == SessionState::ready) request_connection(r, *b);
}

}  // namespace

void attach_connection(Rpc& r, ClientSession& c, agent::Agent& a) noexcept {
  ConnectionClient& b = *c.connection;
  withdraw_connection_request(r, b);
  b.was_ready = false;
  ConnectionHandlers handlers;
  handlers.on_ready = session_handler<on_client_ready>(r, c.name);
  handlers.on_message = session_handler<on_client_message>(r, c.name);
  handlers.on_offer = session_handler<on_client_offer>(r, c.name);
  handlers.on_returned = session_handler<on_reply_returned>(r, c.name);
  handlers.on_closed = session_handler<on_client_closed>(r, c.name);
  attach(b, a, handlers);
}

void keep_closed_handler(Rpc& r, std::uint32_t session, agent::Agent& a) noexcept {
  ConnectionHandlers handlers;
  handlers.on_closed = session_handler<on_client_closed>(r, session);
  agent::replace_handlers(a, handlers);
}

}  // namespace spinwire::rpc
