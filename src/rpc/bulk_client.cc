// The client's end of long calls. One ends, with its memory its own again, when it is settled how,
// its request is not pulled from any more, the key to its reply's memory is dead and, if it was
// cancelled while the server might have used any of that, the server has confirmed that.
#include <algorithm>
#include <bit>
#include <new>

#include "agent/leases.h"
#include "agent/submit.h"
#include "rpc/bulk.h"

namespace spinwire::rpc {

namespace {

using wire::BulkHeader;
using wire::BulkKind;
using Told = BulkCall::Told;
using Cancel = BulkCall::Cancel;

constexpr std::uint64_t slot_bit(std::uint32_t slot) noexcept { return std::uint64_t{1} << slot; }

inline bool is_active(const BulkClient& b, std::uint32_t slot) noexcept {
  return (b.active & slot_bit(slot)) != 0;
}

inline BulkAsked& waiting_at(const Rpc& r, BulkClient& b, std::uint32_t i) noexcept {
  return b.waiting[(b.waiting_first + i) % r.shared.config.rpc.backlog];
}

/// The call of a number that the server, or a completion, names; null if it is over.
BulkCall* find_call(BulkClient& b, std::uint32_t number) noexcept {
  const std::uint32_t slot = number & (b.window - 1);
  BulkCall& k = b.calls[slot];
  return k.number == number && is_active(b, slot) ? &k : nullptr;
}

BulkClient* bulk_of(Rpc& r, std::uint32_t session) noexcept {
  ClientSession* const c = find_client(r, session);
  return c != nullptr ? c->bulk.get() : nullptr;
}

bool is_connection_of(const Rpc& r, const BulkClient& b, const Connection& named) noexcept {
  return b.agent != kNone && Connection(r.shared.core, b.agent, b.agent_generation) == named;
}

/// The session has to be looked at by then.
void look_at(Rpc& r, ClientSession& c, std::uint64_t tick) noexcept {
  if (!c.timer.scheduled() || c.timer.deadline > tick) r.shared.timers.reschedule(c.timer, tick);
}

void end_bulk_call(BulkAsked& asked, Status status) noexcept {
  clear(asked.payload);
  const ReplyCallback done = std::exchange(asked.done, nullptr);
  const BufferSlice reply = std::move(asked.reply);  // goes after the callback
  Reply told(status, nullptr, nullptr, 0);
  done(told);
}

/// The slot is free before its call's callback runs.
BulkAsked vacate_slot(BulkClient& b, BulkCall& k) noexcept {
  BulkAsked asked = std::move(k.asked);
  k.asked = {};
  const std::uint32_t slot = k.number & (b.window - 1);
  b.active &= ~slot_bit(slot);
  k.number += b.window;
  clear(asked.payload);
  return asked;
}

/// Tells the application how it ended.
void finish_call(Rpc& r, BulkClient& b, BulkCall& k) noexcept {
  const bool answered =
      k.status == Status::ok || k.status == Status::refused || k.status == Status::unsupported;
  r.stats.replies += answered ? 1 : 0;
  const Status status = k.status;
  const std::uint32_t size = k.size;
  const Buffer message = std::move(k.message);
  const BulkAsked asked = vacate_slot(b, k);
  Block* block = nullptr;
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
  if (message) {
    block = message.block();
    data = message.data() + wire::kBulkHeaderBytes;
    bytes = message.size() - wire::kBulkHeaderBytes;
  } else if (status == Status::ok && asked.reply) {
    block = asked.reply.block();
    data = asked.reply.data();
    bytes = size;
  }
  Reply reply(status, block, data, bytes);
  asked.done(reply);
}

/// Ends it if nothing has to be waited for, else the first that has to be is begun.
void settle_call(Rpc& r, BulkClient& b, BulkCall& k) noexcept {
  if (!k.over || k.cancel != Cancel::no) return;
  agent::Agent* const a = agent_of(r, b);
  if (k.exposed) {
    if (std::exchange(k.closing, true)) return;
    // on_returned() follows, maybe at once; if the connection goes first, then by that.
    if (a != nullptr) (void)agent::close_by_hand(r.shared, *a, k.rkey);
    return;
  }
  if (!k.pulled_from) finish_call(r, b, k);
}

void settle(BulkCall& k, Status status) noexcept {
  k.over = true;
  k.status = status;
}

/// Nobody wants an answer any more. What the server may be using is waited for.
void give_up_call(Rpc& r, ClientSession& c, BulkCall& k, Status status) noexcept {
  BulkClient& b = *c.bulk;
  settle(k, status);
  k.size = 0;
  k.message = {};
  const bool may_be_used = k.pulled_from || (k.exposed && k.told != Told::nothing);
  if (may_be_used && k.cancel == Cancel::no && !k.closing) {
    k.cancel = Cancel::due;
    make_due(r, b);
  }
  k.asked.deadline = r.shared.clock.now() + r.close_timeout;
  look_at(r, c, k.asked.deadline);
  settle_call(r, b, k);
}

/// A key to the memory of the reply.
Status expose_reply(Rpc& r, agent::Agent& a, BulkCall& k) noexcept {
  RemoteRegion region;
  const Status status =
      agent::open_by_hand(r.shared, a, k.asked.reply, Access::remote_write, region);
  if (status != Status::ok) return status;
  k.exposed = true;
  k.rkey = region.rkey;
  k.loan = a.leases.loans->id;  // the newest
  return status;
}

Status send_head(Rpc& r, agent::Agent& a, BulkCall& k) noexcept {
  if (k.asked.reply && !k.exposed) {
    if (const Status status = expose_reply(r, a, k); status != Status::ok) return status;
  }
  BulkHeader header{k.number, k.asked.method, BulkKind::call, 0, k.asked.size, 0, 0, 0};
  if (k.exposed) {
    header.room = static_cast<std::uint32_t>(k.asked.reply.size());
    header.address = reinterpret_cast<std::uint64_t>(k.asked.reply.data());
    header.rkey = k.rkey;
  }
  const bool within = k.asked.payload.block == nullptr && is_eager(a, k.asked.size);
  const auto* text = reinterpret_cast<const std::byte*>(&k.asked.payload.text);
  const Status status =
      send_bulk(r, a, header, {text, within ? std::size_t{k.asked.size} : std::size_t{0}});
  if (status == Status::ok) k.told = within || k.asked.size == 0 ? Told::all : Told::header;
  return status;
}

void on_request_sent(Rpc& r, std::uint32_t session, std::uint32_t number, Status status) noexcept;

/// The request as a message of its own.
Status send_body(Rpc& r, const BulkClient& b, agent::Agent& a, BulkCall& k) noexcept {
  Payload& payload = k.asked.payload;
  if (payload.block == nullptr) {
    Block* const copy = copy_to_block(r, payload.text, k.asked.size);
    if (copy == nullptr) return Status::no_buffer;
    payload.block = copy;
    payload.data = copy->payload;
  }
  Rpc* const self = &r;
  const std::uint32_t session = b.session;
  const std::uint32_t number = k.number;
  const CompletionCallback done = [self, session, number](const Completion& c) {
    on_request_sent(*self, session, number, c.status);
  };
  const Status status = agent::submit_any<agent::OperationKind::send_imm>(
      r.shared, a,
      {payload.block, const_cast<std::byte*>(payload.data), k.asked.size, nullptr, number, done,
       true});
  if (status == Status::ok) {
    k.told = Told::all;
    k.pulled_from = true;
  }
  return status;
}

/// Takes the next steps of a call, as far as there is room for them. Any status but ok and those
/// that pass ends it.
Status push_call(Rpc& r, const BulkClient& b, agent::Agent& a, BulkCall& k) noexcept {
  if (k.cancel == Cancel::due) {
    const Status status = send_bulk(r, a, {k.number, 0, BulkKind::cancel}, {});
    if (status == Status::ok) k.cancel = Cancel::told;
    return status;
  }
  if (k.over) return Status::ok;
  if (k.told == Told::nothing) {
    if (const Status status = send_head(r, a, k); status != Status::ok) return status;
  }
  return k.told == Told::header ? send_body(r, b, a, k) : Status::ok;
}

/// Moves the call that has waited longest into a slot; null if there is none, or no room.
BulkCall* take_waiting(const Rpc& r, BulkClient& b) noexcept {
  while (b.waiting_count != 0) {
    const auto slot = static_cast<std::uint32_t>(std::countr_one(b.active));
    BulkAsked& w = waiting_at(r, b, 0);
    if (w.done && slot >= b.window) return nullptr;
    const bool lives = static_cast<bool>(w.done);
    BulkCall* const k = lives ? &b.calls[slot] : nullptr;
    if (lives) {
      const std::uint32_t number = k->number;
      *k = {};
      k->number = number;
      k->asked = std::move(w);
      b.active |= slot_bit(slot);
    }
    w = {};
    b.waiting_first = (b.waiting_first + 1) % r.shared.config.rpc.backlog;
    --b.waiting_count;
    if (lives) return k;
  }
  return nullptr;
}

/// What the application may have done in a callback: whether all is as before.
bool goes_on(Rpc& r, const BulkClient* b, std::uint32_t session) noexcept {
  const ClientSession* const c = find_client(r, session);
  return c != nullptr && c->bulk.get() == b && c->state == SessionState::ready;
}

void want_connection(Rpc& r, BulkClient& b) noexcept {
  if (b.wants || b.agent != kNone) return;
  b.wants = true;
  ++r.wanting;
}

void drop_want(Rpc& r, BulkClient& b) noexcept {
  if (!std::exchange(b.wants, false)) return;
  --r.wanting;
}

/// Goes on after an event: callbacks may have ended the session.
void pump_again(Rpc& r, const BulkClient* b, std::uint32_t session) noexcept {
  if (goes_on(r, b, session)) (void)pump_bulk(r, *find_client(r, session)->bulk);
}

/// Its completion; also when the connection ends, and then what becomes of the call is seen there.
void on_request_sent(Rpc& r, std::uint32_t session, std::uint32_t number, Status status) noexcept {
  BulkClient* const b = bulk_of(r, session);
  BulkCall* const k = b != nullptr ? find_call(*b, number) : nullptr;
  if (k == nullptr) return;
  k->pulled_from = false;
  if (!k->over && (status == Status::no_buffer || status == Status::refused)) settle(*k, status);
  settle_call(r, *b, *k);
  pump_again(r, b, session);
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
    return pump_again(r, &b, session);
  }
  k->message = m.take();
  k->asked.deadline = std::max(k->asked.deadline, r.shared.clock.now() + r.close_timeout);
  settle_call(r, b, *k);
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
  k->asked.deadline = std::max(k->asked.deadline, r.shared.clock.now() + r.close_timeout);
  settle_call(r, b, *k);
}

/// Nothing about that call follows.
void take_confirmed(Rpc& r, BulkClient& b, agent::Agent& a, const BulkHeader& header) noexcept {
  BulkCall* const k = find_call(b, header.number);
  if (k == nullptr || k->cancel != Cancel::told)
    return bulk_protocol_error(r, a, "the end of a call that was not cancelled");
  const std::uint32_t session = b.session;
  k->cancel = Cancel::no;
  settle_call(r, b, *k);
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
    settle_call(r, *b, k);
    return pump_again(r, b, session);
  }
}

void on_client_ready(Rpc& r, std::uint32_t session, const Connection& which) noexcept {
  BulkClient* const b = bulk_of(r, session);
  if (b == nullptr || !is_connection_of(r, *b, which)) return;
  b->was_ready = true;
  pump_again(r, b, session);
}

/// But for those that callbacks begin meanwhile.
void end_waiting(Rpc& r, BulkClient& b, Status status) noexcept {
  for (std::uint32_t most = b.waiting_count; most != 0 && b.waiting_count != 0; --most) {
    BulkAsked w = std::move(waiting_at(r, b, 0));
    waiting_at(r, b, 0) = {};
    b.waiting_first = (b.waiting_first + 1) % r.shared.config.rpc.backlog;
    --b.waiting_count;
    if (w.done) end_bulk_call(w, status);
  }
}

/// There is no connection any more, so that nobody uses any memory.
void end_active(Rpc& r, BulkClient& b, Status status) noexcept {
  const std::uint64_t ending = b.active;
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    if ((ending & slot_bit(slot)) == 0 || !is_active(b, slot)) continue;
    BulkCall& k = b.calls[slot];
    k.exposed = k.pulled_from = false;
    k.cancel = Cancel::no;
    if (!k.over) settle(k, status);
    finish_call(r, b, k);
  }
}

void on_client_closed(Rpc& r, std::uint32_t session, const Connection& gone,
                      const Error& why) noexcept {
  ClientSession* const c = find_client(r, session);
  BulkClient* const b = c != nullptr ? c->bulk.get() : nullptr;
  if (b == nullptr || !is_connection_of(r, *b, gone)) return;
  b->agent = kNone;
  const bool was_ready = std::exchange(b->was_ready, false);
  const bool wanted = c->state == SessionState::ready;
  Status status = wanted ? Status::peer_lost : Status::flushed;
  if (b->leaving && b->why.status != Status::ok) status = b->why.status;
  end_active(r, *b, status);
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

/// May throw.
void make_bulk(Rpc& r, ClientSession& c) {
  std::unique_ptr<BulkClient, BulkDeleter> b(new BulkClient);
  b->calls = std::make_unique<BulkCall[]>(c.window);
  b->waiting = std::make_unique<BulkAsked[]>(r.shared.config.rpc.backlog);
  b->session = c.name;
  b->window = c.window;
  b->active = c.window == kWindowMax ? 0 : ~std::uint64_t{0} << c.window;
  for (std::uint32_t i = 0; i < c.window; ++i) b->calls[i].number = c.window + i;
  c.bulk = std::move(b);
}

/// Whether the engine may let a peer write to it.
Status check_reply(const Rpc& r, const BufferSlice& reply) noexcept {
  const agent::Shared& s = r.shared;
  if (!reply || reply.size() == 0 || reply.size() > ~std::uint32_t{0})
    return Status::invalid_argument;
  const std::span<std::byte> slab = s.arena->slab();
  const bool within = reply.data() >= slab.data() && reply.data() < slab.data() + slab.size();
  if (!within && !s.registrations->owns(reply.block())) return Status::invalid_argument;
  const bool may_write = allows(s.attributes.access, Access::remote_write);
  return may_write && s.config.leases.maximum != 0 ? Status::ok : Status::unsupported;
}

}  // namespace

void BulkDeleter::operator()(BulkClient* bulk) const noexcept { delete bulk; }

std::size_t longest_bulk(const Rpc& r, const ClientSession& c) noexcept {
  const agent::Shared& s = r.shared;
  const agent::Agent* const a = c.bulk != nullptr ? agent_of(r, *c.bulk) : nullptr;
  std::uint32_t bulk = s.config.connections.message_bytes;
  if (!allows(s.attributes.access, Access::remote_read)) bulk = s.config.connections.eager_bytes;
  if (a != nullptr && a->state == ConnectionState::ready) bulk = a->longest_message;
  return std::max(bulk, c.longest);
}

Status call_bulk(Rpc& r, ClientSession& c, const Asked& asked, const BufferSlice* reply_into,
                 const ReplyCallback& done) noexcept {
  if (c.state != SessionState::ready) return Status::not_connected;
  if (asked.size > longest_bulk(r, c)) return Status::message_too_long;
  if (reply_into != nullptr) {
    if (const Status status = check_reply(r, *reply_into); status != Status::ok) return status;
  }
  try {
    if (c.bulk == nullptr) make_bulk(r, c);
  } catch (const std::bad_alloc&) {
    return Status::no_memory;
  }
  BulkClient& b = *c.bulk;
  if (b.waiting_count == r.shared.config.rpc.backlog) return Status::would_block;
  BulkAsked& w = waiting_at(r, b, b.waiting_count);
  if (!fill(r, w.payload, asked.data, asked.size, asked.block)) return Status::no_buffer;
  w.method = asked.method;
  w.size = static_cast<std::uint32_t>(asked.size);
  w.id = ++c.last_call;
  w.deadline = asked.deadline;
  w.done = done;
  if (reply_into != nullptr) w.reply = *reply_into;
  ++b.waiting_count;
  ++r.stats.calls;
  ++r.stats.bulk_calls;
  look_at(r, c, asked.deadline);
  if (b.agent == kNone) {
    want_connection(r, b);
  } else {
    // Not from here: what ends a call runs its callback.
    make_due(r, b);
  }
  return Status::ok;
}

bool pump_bulk(Rpc& r, BulkClient& b) noexcept {
  const std::uint32_t session = b.session;
  agent::Agent* const a = agent_of(r, b);
  if (a == nullptr || a->state != ConnectionState::ready) return true;
  const auto push = [&](BulkCall& k) {
    const Status status = push_call(r, b, *a, k);
    if (is_passing(status)) {
      make_due(r, b);
      return false;
    }
    if (status == Status::ok) return true;
    if (k.over || a->state != ConnectionState::ready) return false;  // the connection ends
    settle(k, status);
    settle_call(r, b, k);
    return goes_on(r, &b, session);
  };
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    if (is_active(b, slot) && !push(b.calls[slot])) return false;
  }
  // Those that fail at once may be begun again by their callbacks.
  for (std::uint32_t most = b.waiting_count; most != 0; --most) {
    BulkCall* const k = take_waiting(r, b);
    if (k == nullptr) return true;
    if (!push(*k)) return false;
  }
  if (b.waiting_count != 0 && static_cast<std::uint32_t>(std::countr_one(b.active)) < b.window)
    make_due(r, b);
  return true;
}

Status cancel_bulk(Rpc& r, ClientSession& c, std::uint32_t id) noexcept {
  BulkClient& b = *c.bulk;
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    BulkCall& k = b.calls[slot];
    if (!is_active(b, slot) || k.asked.id != id) continue;
    if (k.cancel != Cancel::no || (k.over && k.status == Status::cancelled))
      return Status::invalid_argument;  // a second time, or its deadline was first
    const std::uint32_t session = c.name;
    give_up_call(r, c, k, Status::cancelled);
    pump_again(r, &b, session);
    return Status::ok;
  }
  for (std::uint32_t i = 0; i < b.waiting_count; ++i) {
    BulkAsked& w = waiting_at(r, b, i);
    if (!w.done || w.id != id) continue;
    end_bulk_call(w, Status::cancelled);
    return Status::ok;
  }
  return Status::invalid_argument;
}

void close_bulk(Rpc& r, ClientSession& c) noexcept {
  if (c.bulk == nullptr) return;
  BulkClient& b = *c.bulk;
  drop_want(r, b);
  end_waiting(r, b, Status::flushed);
  agent::Agent* const a = agent_of(r, b);
  if (a != nullptr && a->state != ConnectionState::draining) agent::close(r.shared, *a);
}

bool leave_bulk(Rpc& r, ClientSession& c, const Error& why) noexcept {
  BulkClient& b = *c.bulk;
  if (b.leaving) {
    if (b.agent != kNone) return false;
  } else {
    b.leaving = true;
    c.state = SessionState::closing;
    r.shared.timers.cancel(c.timer);
    drop_want(r, b);
    end_waiting(r, b, why.status == Status::ok ? Status::flushed : why.status);
  }
  if (agent::Agent* const a = agent_of(r, b); a != nullptr) {
    b.why = why;
    if (why.status != Status::ok) {
      agent::fail(r.shared, *a, why);
    } else if (a->state != ConnectionState::draining) {
      agent::close(r.shared, *a);
    }
    return false;
  }
  forget_due(r, b);
  c.bulk.reset();
  return true;
}

std::uint64_t look_at_bulk(Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  BulkClient* const b = c.bulk.get();
  const std::uint32_t session = c.name;
  std::uint64_t next = ~std::uint64_t{0};
  for (std::uint32_t slot = 0; slot < b->window; ++slot) {
    BulkCall& k = b->calls[slot];
    if (!is_active(*b, slot)) continue;
    if (now >= k.asked.deadline) {
      if (k.over) {  // its memory does not come back
        if (agent::Agent* const a = agent_of(r, *b); a != nullptr)
          agent::fail(
              r.shared, *a,
              {Status::peer_lost, "end a long call", "the server does not let go of its memory",
               "the peer's process hangs, or is hostile"});
        return next;
      }
      give_up_call(r, c, k, Status::timed_out);
      if (!goes_on(r, b, session)) return next;
      if (!is_active(*b, slot)) continue;
    }
    next = std::min(next, k.asked.deadline);
  }
  for (std::uint32_t i = 0; i < b->waiting_count; ++i) {
    BulkAsked& w = waiting_at(r, *b, i);
    if (!w.done) continue;
    if (now >= w.deadline) {
      end_bulk_call(w, Status::timed_out);
      if (!goes_on(r, b, session)) return next;
    } else {
      next = std::min(next, w.deadline);
    }
  }
  pump_again(r, b, session);
  return next;
}

ClientSession* next_wanting(Rpc& r) noexcept {
  for (std::uint32_t i = 0; r.wanting != 0 && i < r.clients.capacity(); ++i) {
    if (!r.clients.in_use(i)) continue;
    ClientSession& c = r.clients.at(i);
    if (c.bulk != nullptr && c.bulk->wants) return &c;
  }
  return nullptr;
}

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

void fail_wanting(Rpc& r, ClientSession& c, const Error& why) noexcept {
  drop_want(r, *c.bulk);
  end_waiting(r, *c.bulk, why.status);
}

}  // namespace spinwire::rpc
