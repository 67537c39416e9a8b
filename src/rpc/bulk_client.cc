// Long calls as the application asks for them, gives them up, and runs out of patience with them;
// how sessions come to their connections, and end with them.
#include <algorithm>
#include <new>

#include "rpc/bulk_call.h"

namespace spinwire::rpc {

namespace {

using Cancel = BulkCall::Cancel;

void end_bulk_call(BulkAsked& asked, Status status) noexcept {
  clear(asked.payload);
  const ReplyCallback done = std::exchange(asked.done, nullptr);
  const BufferSlice reply = std::move(asked.reply);  // goes after the callback
  Reply told(status, nullptr, nullptr, 0);
  done(told);
}

/// May throw.
void make_bulk(Rpc& r, ClientSession& c) {
  std::unique_ptr<BulkClient, BulkDeleter> b(new BulkClient);
  b->calls = std::make_unique<BulkCall[]>(c.window);
  b->waiting = std::make_unique<BulkAsked[]>(r.context.config.rpc.backlog);
  b->session = c.name;
  b->window = c.window;
  b->active = c.window == kWindowMax ? 0 : ~std::uint64_t{0} << c.window;
  const std::uint32_t first = first_number(r);
  for (std::uint32_t i = 0; i < c.window; ++i) b->calls[i].number = first + i;
  c.bulk = std::move(b);
}

/// Whether the engine may let a peer write to it.
Status check_reply(const Rpc& r, const BufferSlice& reply) noexcept {
  const agent::EngineContext& s = r.context;
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
  const agent::EngineContext& s = r.context;
  const agent::Agent* const a = c.bulk != nullptr ? agent_of(r, *c.bulk) : nullptr;
  std::uint32_t bulk = s.config.connections.message_bytes;
  if (!allows(s.attributes.access, Access::remote_read)) bulk = s.config.connections.eager_bytes;
  if (a != nullptr && a->state == ConnectionState::ready) bulk = a->longest_message;
  return std::max<std::size_t>(bulk, c.longest);
}

namespace {

/// What the call's place holds of it. False: the send pool is dry.
bool note_long(Rpc& r, ClientSession& c, const Asked& asked, const ReplyCallback& done,
               BulkAsked& w) noexcept {
  if (!note(r, c, asked, done, w)) return false;
  look_by(r, c, asked.deadline);
  ++r.stats.bulk_calls;
  return true;
}

}  // namespace

Status call_bulk(Rpc& r, ClientSession& c, const Asked& asked, const BufferSlice* reply_into,
                 const ReplyCallback& done, bool now) noexcept {
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
  agent::Agent* const a = agent_of(r, b);
  const bool connected = a != nullptr && a->state == ConnectionState::ready;
  const std::uint32_t slot = free_slot(b);
  const bool waits = !connected || b.waiting_count != 0 || slot >= b.window;
  if (waits && b.waiting_count == r.context.config.rpc.backlog) return Status::would_block;
  BulkAsked w;
  if (!note_long(r, c, asked, done, w)) return Status::no_buffer;
  if (reply_into != nullptr) w.reply = *reply_into;
  if (b.agent == kNone) want_connection(r, b);
  BulkCall* k = nullptr;
  if (waits) {
    waiting_at(r, b, b.waiting_count++) = std::move(w);
  } else {
    k = &occupy(b, slot, std::move(w));
  }
  if (!connected) return Status::ok;
  if (!now) {
    make_due(r, b);
  } else if (k == nullptr || b.due) {
    post_bulk(r, b);
  } else {
    post_call(r, b, *a, *k);
  }
  return Status::ok;
}

Status connect_at_once(Rpc& r, ClientSession& c) noexcept {
  try {
    make_bulk(r, c);
  } catch (const std::bad_alloc&) {
    return Status::no_memory;
  }
  want_connection(r, *c.bulk);
  return Status::ok;
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
    if (waiting_at(r, b, i).id != id) continue;
    BulkAsked w = take_waiting(r, b, i);
    end_bulk_call(w, Status::cancelled);
    return Status::ok;
  }
  return Status::invalid_argument;
}

namespace {

/// Ends the calls of a session that closes, but for those whose memory the server may be using.
void end_unused(Rpc& r, BulkClient& b, Status status) noexcept {
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    BulkCall& k = b.calls[slot];
    if (!is_active(b, slot) || k.over || k.pulled_from || k.exposed) continue;
    settle(k, status);
    try_end(r, b, k);
  }
}

}  // namespace

void end_waiting(Rpc& r, BulkClient& b, Status status) noexcept {
  for (std::uint32_t most = b.waiting_count; most != 0 && b.waiting_count != 0; --most) {
    BulkAsked w = take_waiting(r, b, 0);
    end_bulk_call(w, status);
  }
}

bool close_bulk(Rpc& r, ClientSession& c) noexcept {
  if (c.bulk == nullptr) return false;
  BulkClient& b = *c.bulk;
  drop_want(r, b);
  end_waiting(r, b, Status::flushed);
  end_unused(r, b, Status::flushed);
  agent::Agent* const a = agent_of(r, b);
  if (a != nullptr && a->state != ConnectionState::draining) agent::close(r.context, *a);
  return a != nullptr;
}

bool leave_bulk(Rpc& r, ClientSession& c, const Error& why) noexcept {
  BulkClient& b = *c.bulk;
  if (b.leaving) {
    if (b.agent != kNone) return false;
  } else {
    b.leaving = true;
    c.state = SessionState::closing;
    r.context.timers.cancel(c.timer);
    drop_want(r, b);
    end_waiting(r, b, why.status == Status::ok ? Status::flushed : why.status);
  }
  if (agent::Agent* const a = agent_of(r, b); a != nullptr) {
    b.why = why;
    if (why.status != Status::ok) {
      agent::fail(r.context, *a, why);
    } else if (a->state != ConnectionState::draining) {
      agent::close(r.context, *a);
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
              r.context, *a,
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
  for (std::uint32_t i = 0; i < b->waiting_count;) {
    const std::uint64_t due = waiting_at(r, *b, i).deadline;
    if (now < due) {
      next = std::min(next, due);
      ++i;
      continue;
    }
    BulkAsked w = take_waiting(r, *b, i);
    end_bulk_call(w, Status::timed_out);
    if (!goes_on(r, b, session)) return next;
    i = 0;  // its callback may have ended others
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

void fail_wanting(Rpc& r, ClientSession& c, const Error& why) noexcept {
  drop_want(r, *c.bulk);
  if (!takes_datagrams(*c.route)) return lose(r, c, why);
  end_waiting(r, *c.bulk, why.status);
}

}  // namespace spinwire::rpc
