// What a session's connection for long calls brings to the client: replies, as messages or written
// in place, what the server confirms, and the ends of keys and of the connection itself.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "rpc/bulk_call.h"

namespace spinwire::rpc {

namespace {

using wire::BulkHeader;
using wire::BulkKind;
using Told = BulkCall::Told;
using Cancel = BulkCall::Cancel;

bool is_connection_of(const Rpc& r, const BulkClient& b, const Connection& named) noexcept {
  return b.agent != kNone && Connection(r.context.core, b.agent, b.agent_generation) == named;
}

/// What is left to be waited for has time of its own.
void extend_deadline(const Rpc& r, BulkCall& k) noexcept {
  k.asked.deadline = std::max(k.asked.deadline, r.context.clock.now() + r.close_timeout);
}

/// The server has said how it ended, as a message.
void take_bulk_reply(Rpc& r, BulkClient& b, agent::Agent& a, const BulkHeader& header, Message& m,
                     std::span<const std::byte> payload) noexcept {
  BulkCall* const k = find_call(b, header.number);
  if (k == nullptr) {
    const BulkCall& next = b.calls[header.number & (b.window - 1)];
    if (static_cast<std::int32_t>(header.number - next.number) >= 0)
      return bulk_protocol_error(r, a, "a reply to a call that was never made");
    ++r.stats.late;
    return;
  }
  if (k->cancel != Cancel::no) return;  // it has crossed that
  const auto status = static_cast<Status>(header.status);
  if (k->told == Told::nothing || (status == Status::ok && k->exposed))
    return bulk_protocol_error(r, a, "a reply to no call, or one that was to be written");
  if (k->over) {  // by its request, which the server did not want
    ++r.stats.late;
    return;
  }
  settle(*k, status);
  if (!k->pulled_from && !k->exposed) {  // the usual: in place
    const std::uint32_t session = b.session;
    ++r.stats.replies;
    const BulkAsked asked = vacate_slot(b, *k);
    Reply reply(status, m.block(), payload.data(), payload.size());
    asked.done(reply);
    if (reply.kept()) (void)m.take();  // the slice holds it now
    return pump_waiting(r, &b, session);
  }
  k->message = m.take();
  extend_deadline(r, *k);
  try_end(r, b, *k);
}

/// The reply is in the call's memory.
void take_written(Rpc& r, BulkClient& b, agent::Agent& a, const Message& m) noexcept {
  BulkCall* const k = find_call(b, *m.immediate());
  if (k == nullptr || !k->exposed || k->told == Told::nothing ||
      (k->over && k->cancel == Cancel::no) || m.size() > k->asked.reply.size())
    return bulk_protocol_error(r, a, "a write that no call waits for");
  if (k->cancel != Cancel::no) return;  // it has crossed that
  settle(*k, Status::ok);
  k->size = static_cast<std::uint32_t>(m.size());
  extend_deadline(r, *k);
  try_end(r, b, *k);
}

/// Nothing about that call follows.
void take_confirmed(Rpc& r, BulkClient& b, agent::Agent& a, const BulkHeader& header) noexcept {
  BulkCall* const k = find_call(b, header.number);
  if (k == nullptr || k->cancel != Cancel::told)
    return bulk_protocol_error(r, a, "the end of a call that was not cancelled");
  const std::uint32_t session = b.session;
  k->cancel = Cancel::no;
  try_end(r, b, *k);
  pump_again(r, &b, session);
}

void on_client_message(Rpc& r, std::uint32_t session, const Connection& from, Message& m) noexcept {
  BulkClient* const b = bulk_of(r, session);
  if (b == nullptr || !is_connection_of(r, *b, from)) return;
  agent::Agent& a = *agent_of(r, *b);
  if (m.is_write()) return take_written(r, *b, a, m);
  BulkHeader header;
  std::span<const std::byte> payload;
  if (m.immediate() || !wire::decode(m.bytes(), header, payload))
    return bulk_protocol_error(r, a, "a malformed one");
  if (header.kind == BulkKind::reply) return take_bulk_reply(r, *b, a, header, m, payload);
  if (header.kind == BulkKind::cancelled) return take_confirmed(r, *b, a, header);
  bulk_protocol_error(r, a, "one that only clients send");
}

/// Servers announce nothing that would be longer than a reply without memory of its own.
void on_client_offer(Rpc& r, std::uint32_t session, const Connection& from, Offer& offer) noexcept {
  const ClientSession* const c = find_client(r, session);
  if (c == nullptr || c->bulk == nullptr || !is_connection_of(r, *c->bulk, from) ||
      offer.size() > wire::kBulkHeaderBytes + std::size_t{kLongestDatagram})
    offer.refuse();
}

/// No peer can reach a reply's memory any more.
void on_reply_returned(Rpc& r, std::uint32_t session, const Connection& from,
                       const Returned& returned) noexcept {
  BulkClient* const b = bulk_of(r, session);
  if (b == nullptr || !is_connection_of(r, *b, from)) return;
  for (std::uint32_t slot = 0; slot < b->window; ++slot) {
    BulkCall& k = b->calls[slot];
    if (!is_active(*b, slot) || !k.exposed || k.loan != returned.lease.value) continue;
    k.exposed = k.closing = false;
    try_end(r, *b, k);
    return pump_again(r, b, session);
  }
}

void on_client_ready(Rpc& r, std::uint32_t session, const Connection& which) noexcept {
  BulkClient* const b = bulk_of(r, session);
  if (b == nullptr || !is_connection_of(r, *b, which)) return;
  b->was_ready = true;
  b->ready_at = r.context.clock.now();
  ClientSession& c = *find_client(r, session);
  if (c.state == SessionState::opening) become_ready(r, c);
  pump_again(r, b, session);
}

/// There is no connection any more, so that nobody uses any memory.
void end_active(Rpc& r, BulkClient& b, Status status) noexcept {
  const std::uint64_t ending = b.active;
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    if ((ending & bit(slot)) == 0 || !is_active(b, slot)) continue;
    BulkCall& k = b.calls[slot];
    k.exposed = k.pulled_from = false;
    k.cancel = Cancel::no;
    if (!k.over) settle(k, status);
    try_end(r, b, k);
  }
}

/// Of a connection that could not be made again.
Error not_again(const ClientSession& c, const Error& why) noexcept {
  try {
    return {Status::peer_lost, "talk with " + c.address,
            "its connection was lost, and another could not be made: " + why.found, why.remedy};
  } catch (...) {
    return base::out_of_memory();
  }
}

/// What becomes of a session without datagrams when its connection has ended. One that was lost is
/// made again, unless it had hardly been made in the place of another: the next would be lost, too.
void lose_only_way(Rpc& r, ClientSession& c, bool was_ready, const Error& why) noexcept {
  if (c.state == SessionState::closing) return lose(r, c, Status::ok, nullptr);
  if (c.state == SessionState::opening && why.status == Status::ok)
    return lose(r, c, Status::peer_lost, "the server has ended its connection");
  // Else the server has ended the session.
  if (c.state == SessionState::opening || why.status == Status::ok) return lose(r, c, why);
  BulkClient& b = *c.bulk;
  if (!was_ready) return lose(r, c, not_again(c, why));
  const bool brief = r.context.clock.now() - b.ready_at < r.close_timeout;
  if (std::exchange(b.lost_one, true) && brief) return lose(r, c, why);
  want_connection(r, b);
}

void on_client_closed(Rpc& r, std::uint32_t session, const Connection& gone,
                      const Error& why) noexcept {
  ClientSession* const c = find_client(r, session);
  BulkClient* const b = c != nullptr ? c->bulk.get() : nullptr;
  if (b == nullptr || !is_connection_of(r, *b, gone)) return;
  b->agent = kNone;
  const bool was_ready = std::exchange(b->was_ready, false);
  const bool wanted = c->state == SessionState::ready;
  const bool only_way = !takes_datagrams(*c->route) && !b->leaving;
  Status status = wanted ? Status::peer_lost : Status::flushed;
  if (b->leaving && b->why.status != Status::ok) status = b->why.status;
  if (only_way && why.status == Status::ok) status = Status::flushed;
  end_active(r, *b, status);
  if (only_way) {
    if (find_client(r, session) == c && c->bulk.get() == b) lose_only_way(r, *c, was_ready, why);
    return;
  }
  // A connection that could not be made would not be the next time.
  const bool tells = wanted && !b->lost_one && why.status != Status::ok;
  b->lost_one = b->lost_one || was_ready;
  if (!was_ready) end_waiting(r, *b, tells ? why.status : status);
  if (find_client(r, session) != c || c->bulk.get() != b) return;
  if (b->leaving) {
    const Error left = std::move(b->why);
    return lose(r, *c, left);
  }
  if (b->waiting_count != 0 && c->state == SessionState::ready) want_connection(r, *b);
}

}  // namespace

void use_connection(Rpc& r, ClientSession& c, agent::Agent& a) noexcept {
  BulkClient& b = *c.bulk;
  drop_want(r, b);
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
  hear_end(r, session, a);
}

void hear_end(Rpc& r, std::uint32_t session, agent::Agent& a) noexcept {
  a.handlers.on_closed = [self = &r, session](Connection gone, const Error& why) {
    on_client_closed(*self, session, gone, why);
  };
}

}  // namespace spinwire::rpc
