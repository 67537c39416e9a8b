// What a session's connection for long calls brings to the client: replies, as messages or written
// in place, what the server confirms, and the ends of keys and of the connection itself.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/internals.h"
#include "rpc/backlog.h"
#include "rpc/client_session.h"
#include "rpc/transport/connection_call.h"

namespace spinwire::rpc {

namespace {

using wire::RpcMessageHeader;
using wire::RpcMessageKind;
using Sent = ConnectionClientSlot::Sent;
using Cancel = ConnectionClientSlot::Cancel;

bool is_connection_of(const Rpc& r, const ConnectionClient& b, const Connection& named) noexcept {
  return b.agent != kNone &&
         detail::make<Connection>(r.context.slot, b.agent, b.agent_generation) == named;
}

/// Gives the rest of a call, such as closing its key, time of its own.
void extend_deadline(const Rpc& r, ConnectionClientSlot& k) noexcept {
  k.call.deadline = std::max(k.call.deadline, r.context.clock.now() + r.close_timeout);
}

/// A reply as a message.
void on_reply_message(Rpc& r, ConnectionClient& b, agent::Agent& a, const RpcMessageHeader& header,
                      Message& m, std::span<const std::byte> payload) noexcept {
  ConnectionClientSlot* const k = find_call(b, header.number);
  if (k == nullptr) {
    const ConnectionClientSlot& next = b.slots[header.number & (b.window - 1)];
    if (static_cast<std::int32_t>(header.number - next.number) >= 0)
      return fail_protocol(r, a, "a reply to a call that was never made");
    ++r.stats.late;
    return;
  }
  if (k->cancel != Cancel::none) return;  // the cancel and the reply crossed
  const auto status = static_cast<Status>(header.status);
  if (k->sent == Sent::nothing || (status == Status::ok && k->key_open))
    return fail_protocol(r, a, "a reply to no call, or one that was to be written");
  if (k->has_outcome) {  // the server refused to pull the request
    ++r.stats.late;
    return;
  }
  set_outcome(*k, status);
  if (!k->request_in_flight && !k->key_open) {  // the usual: in place
    const std::uint32_t session = b.session;
    ++r.stats.replies;
    const ConnectionCall call = release_slot(b, *k);
    Reply reply = detail::make<Reply>(status, detail::block_of(m), payload.data(), payload.size());
    call.done(reply);
    if (detail::Internals::is_kept(reply)) (void)m.take();  // the slice holds it now
    return advance_backlog(r, &b, session);
  }
  k->reply_message = m.take();
  extend_deadline(r, *k);
  try_finish(r, b, *k);
}

/// A reply was written to the call's memory.
void on_reply_write(Rpc& r, ConnectionClient& b, agent::Agent& a, const Message& m) noexcept {
  ConnectionClientSlot* const k = find_call(b, *m.immediate());
  if (k == nullptr || !k->key_open || k->sent == Sent::nothing ||
      (k->has_outcome && k->cancel == Cancel::none) || m.size() > k->call.reply.size())
    return fail_protocol(r, a, "a write that no call waits for");
  if (k->cancel != Cancel::none) return;  // it has crossed that
  set_outcome(*k, Status::ok);
  k->size = static_cast<std::uint32_t>(m.size());
  extend_deadline(r, *k);
  try_finish(r, b, *k);
}

/// The server has confirmed a cancel.
void on_cancelled(Rpc& r, ConnectionClient& b, agent::Agent& a,
                  const RpcMessageHeader& header) noexcept {
  ConnectionClientSlot* const k = find_call(b, header.number);
  if (k == nullptr || k->cancel != Cancel::sent)
    return fail_protocol(r, a, "the end of a call that was not cancelled");
  const std::uint32_t session = b.session;
  k->cancel = Cancel::none;
  try_finish(r, b, *k);
  advance_if_ready(r, &b, session);
}

void on_client_message(Rpc& r, std::uint32_t session, const Connection& from, Message& m) noexcept {
  ConnectionClient* const b = connection_of(r, session);
  if (b == nullptr || !is_connection_of(r, *b, from)) return;
  agent::Agent& a = *agent_of(r, *b);
  if (m.is_write()) return on_reply_write(r, *b, a, m);
  RpcMessageHeader header;
  std::span<const std::byte> payload;
  if (m.immediate() || !wire::decode(m.bytes(), header, payload))
    return fail_protocol(r, a, "a malformed one");
  if (header.kind == RpcMessageKind::reply) return on_reply_message(r, *b, a, header, m, payload);
  if (header.kind == RpcMessageKind::cancelled) return on_cancelled(r, *b, a, header);
  fail_protocol(r, a, "one that only clients send");
}

/// Refuses rendezvous messages longer than a reply without named memory may be.
void on_client_offer(Rpc& r, std::uint32_t session, const Connection& from, Offer& offer) noexcept {
  const ClientSession* const c = find_client(r, session);
  if (c == nullptr || c->connection == nullptr || !is_connection_of(r, *c->connection, from) ||
      offer.size() > wire::kRpcMessageHeaderBytes + std::size_t{kLongestDatagram})
    offer.refuse();
}

/// No peer can reach a reply's memory any more.
void on_reply_returned(Rpc& r, std::uint32_t session, const Connection& from,
                       const Returned& returned) noexcept {
  ConnectionClient* const b = connection_of(r, session);
  if (b == nullptr || !is_connection_of(r, *b, from)) return;
  for (std::uint32_t slot = 0; slot < b->window; ++slot) {
    ConnectionClientSlot& k = b->slots[slot];
    if (!is_active(*b, slot) || !k.key_open || k.lease != returned.lease.value) continue;
    k.key_open = k.key_closing = false;
    try_finish(r, *b, k);
    return advance_if_ready(r, b, session);
  }
}

void on_client_ready(Rpc& r, std::uint32_t session, const Connection& which) noexcept {
  ConnectionClient* const b = connection_of(r, session);
  if (b == nullptr || !is_connection_of(r, *b, which)) return;
  b->was_ready = true;
  b->ready_at = r.context.clock.now();
  ClientSession& c = *find_client(r, session);
  if (c.state == SessionState::opening) mark_ready(r, c);
  advance_if_ready(r, b, session);
}

/// Ends all calls of a connection that is gone: no peer can reach their memory any more.
void end_active_calls(Rpc& r, ConnectionClient& b, Status status) noexcept {
  const std::uint64_t ending = b.active;
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    if ((ending & bit(slot)) == 0 || !is_active(b, slot)) continue;
    ConnectionClientSlot& k = b.slots[slot];
    k.key_open = k.request_in_flight = false;
    k.cancel = Cancel::none;
    if (!k.has_outcome) set_outcome(k, status);
    try_finish(r, b, k);
  }
}

/// The error of a session whose connection could not be made again.
Error reconnect_error(const ClientSession& c, const Error& why) noexcept {
  return {Status::peer_lost, base::format("talk with {}", c.address),
          base::format("its connection was lost, and another could not be made: {}", why.found),
          why.remedy};
}

/// The connection of a session without datagrams has ended. A lost connection is made again, unless
/// it had replaced another one only shortly before.
void on_sole_connection_lost(Rpc& r, ClientSession& c, bool was_ready, const Error& why) noexcept {
  if (c.state == SessionState::closing) return close_session(r, c);
  if (c.state == SessionState::opening && why.status == Status::ok)
    return fail_session(r, c, Status::peer_lost, "the server has ended its connection");
  // Else the server has ended the session.
  if (c.state == SessionState::opening || why.status == Status::ok) return fail_session(r, c, why);
  ConnectionClient& b = *c.connection;
  if (!was_ready) return fail_session(r, c, reconnect_error(c, why));
  const bool brief = r.context.clock.now() - b.ready_at < r.close_timeout;
  if (std::exchange(b.had_connection, true) && brief) return fail_session(r, c, why);
  request_connection(r, b);
}

void on_client_closed(Rpc& r, std::uint32_t session, const Connection& gone,
                      const Error& why) noexcept {
  ClientSession* const c = find_client(r, session);
  ConnectionClient* const b = c != nullptr ? c->connection.get() : nullptr;
  if (b == nullptr || !is_connection_of(r, *b, gone)) return;
  b->agent = kNone;
  const bool was_ready = std::exchange(b->was_ready, false);
  const bool wanted = c->state == SessionState::ready;
  const bool sole_transport = c->transport == Transport::connection && !b->is_ending;
  Status status = wanted ? Status::peer_lost : Status::flushed;
  if (b->is_ending && b->why.status != Status::ok) status = b->why.status;
  if (sole_transport && why.status == Status::ok) status = Status::flushed;
  end_active_calls(r, *b, status);
  if (sole_transport) {
    if (find_client(r, session) == c && c->connection.get() == b)
      on_sole_connection_lost(r, *c, was_ready, why);
    return;
  }
  // A connection that could not be made would not be the next time.
  const bool tells = wanted && !b->had_connection && why.status != Status::ok;
  b->had_connection = b->had_connection || was_ready;
  if (!was_ready) end_backlogged(r, *b, tells ? why.status : status);
  if (find_client(r, session) != c || c->connection.get() != b) return;
  if (b->is_ending) {
    const Error left = std::move(b->why);
    return fail_session(r, *c, left);
  }
  if (b->backlog_count != 0 && c->state == SessionState::ready) request_connection(r, *b);
}

}  // namespace

void attach_connection(Rpc& r, ClientSession& c, agent::Agent& a) noexcept {
  ConnectionClient& b = *c.connection;
  withdraw_connection_request(r, b);
  b.agent = a.index;
  b.agent_generation = a.generation;
  b.was_ready = false;
  Rpc* const self = &r;
  const std::uint32_t session = c.name;
  a.handlers = {};
  a.handlers.on_ready = [self, session](Connection which) {
    on_client_ready(*self, session, which);
  };
  a.handlers.on_message = [self, session](Connection from, Message& m) {
    on_client_message(*self, session, from, m);
  };
  a.handlers.on_offer = [self, session](Connection from, Offer& offer) {
    on_client_offer(*self, session, from, offer);
  };
  a.handlers.on_returned = [self, session](Connection from, const Returned& returned) {
    on_reply_returned(*self, session, from, returned);
  };
  set_closed_handler(r, session, a);
}

void set_closed_handler(Rpc& r, std::uint32_t session, agent::Agent& a) noexcept {
  a.handlers.on_closed = [self = &r, session](Connection gone, const Error& why) {
    on_client_closed(*self, session, gone, why);
  };
}

}  // namespace spinwire::rpc
