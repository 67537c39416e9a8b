// Long calls as the application makes and cancels them, and their time-outs; how a session gets its
// connection, and ends with it.
#include <algorithm>
#include <new>

#include "base/internals.h"
#include "rpc/backlog.h"
#include "rpc/client_session.h"
#include "rpc/transport/connection_call.h"

namespace spinwire::rpc {

namespace {

using Cancel = ConnectionClientSlot::Cancel;

void end_call(ConnectionCall& call, Status status) noexcept {
  release_payload(call.payload);
  const ReplyCallback done = std::exchange(call.done, nullptr);
  const BufferSlice reply = std::move(call.reply);  // goes after the callback
  Reply sent = detail::make<Reply>(call.outcome.value_or(status), nullptr, nullptr, 0);
  done(sent);
}

/// May throw.
void make_connection_client(Rpc& r, ClientSession& c) {
  std::unique_ptr<ConnectionClient, ConnectionDeleter> b(new ConnectionClient);
  b->slots = std::make_unique<ConnectionClientSlot[]>(c.window);
  b->backlog = std::make_unique<ConnectionCall[]>(r.context.config.rpc.backlog);
  b->session = c.name;
  b->window = c.window;
  b->active = c.window == kWindowMax ? 0 : ~std::uint64_t{0} << c.window;
  const std::uint32_t first = random_call_number(r);
  for (std::uint32_t i = 0; i < c.window; ++i) b->slots[i].number = first + i;
  c.connection = std::move(b);
}

/// Whether the engine may let a peer write to it.
Status validate_reply_region(const Rpc& r, const BufferSlice& reply) noexcept {
  const agent::EngineContext& s = r.context;
  if (!reply || reply.size() == 0 || reply.size() > ~std::uint32_t{0})
    return Status::invalid_argument;
  const std::span<std::byte> slab = s.arena->slab();
  const bool within = reply.data() >= slab.data() && reply.data() < slab.data() + slab.size();
  if (!within && !s.registrations->owns(detail::block_of(reply))) return Status::invalid_argument;
  const bool may_write = allows(s.attributes.access, Access::remote_write);
  return may_write && s.config.leases.maximum != 0 ? Status::ok : Status::unsupported;
}

}  // namespace

void ConnectionDeleter::operator()(ConnectionClient* connection) const noexcept {
  delete connection;
}

std::size_t max_call(const Rpc& r, const ClientSession& c) noexcept {
  const agent::EngineContext& s = r.context;
  const agent::Agent* const a = c.connection != nullptr ? agent_of(r, *c.connection) : nullptr;
  std::uint32_t connection = s.config.connections.max_message_bytes;
  if (!allows(s.attributes.access, Access::remote_read))
    connection = s.config.connections.eager_bytes;
  if (a != nullptr && a->state == ConnectionState::ready) connection = a->max_message;
  return std::max<std::size_t>(connection, c.max_inline_call);
}

namespace {

/// Stores a long call. False: the send pool is empty.
bool store_long_call(Rpc& r, ClientSession& c, const CallRequest& call, const ReplyCallback& done,
                     ConnectionCall& w) noexcept {
  if (!store_call(r, c, call, done, w)) return false;
  schedule_check(r, c, call.deadline);
  ++r.stats.bulk_calls;
  return true;
}

}  // namespace

Status call_over_connection(Rpc& r, ClientSession& c, const CallRequest& call,
                            const BufferSlice* reply_into, const ReplyCallback& done,
                            bool now) noexcept {
  if (c.state != SessionState::ready) return Status::not_connected;
  if (call.size > max_call(r, c)) return Status::message_too_long;
  if (reply_into != nullptr) {
    if (const Status status = validate_reply_region(r, *reply_into); status != Status::ok)
      return status;
  }
  try {
    if (c.connection == nullptr) make_connection_client(r, c);
  } catch (const std::bad_alloc&) {
    return Status::no_memory;
  }
  ConnectionClient& b = *c.connection;
  agent::Agent* const a = agent_of(r, b);
  const bool connected = a != nullptr && a->state == ConnectionState::ready;
  const std::uint32_t slot = free_slot(b);
  const bool waits = !connected || b.backlog_count != 0 || slot >= b.window;
  if (waits && b.backlog_count == r.context.config.rpc.backlog) return Status::would_block;
  ConnectionCall w;
  if (!store_long_call(r, c, call, done, w)) return Status::no_buffer;
  if (reply_into != nullptr) w.reply = *reply_into;
  if (b.agent == kNone) request_connection(r, b);
  ConnectionClientSlot* k = nullptr;
  if (waits) {
    backlog_at(r, b, b.backlog_count++) = std::move(w);
  } else {
    k = &occupy_slot(b, slot, std::move(w));
  }
  if (!connected) return Status::ok;
  if (!now) {
    queue_connection(r, b);
  } else if (k == nullptr || b.queued) {
    post_calls(r, b);
  } else {
    post_call(r, b, *a, *k);
  }
  return Status::ok;
}

Status open_sole_connection(Rpc& r, ClientSession& c) noexcept {
  try {
    make_connection_client(r, c);
  } catch (const std::bad_alloc&) {
    return Status::no_memory;
  }
  request_connection(r, *c.connection);
  return Status::ok;
}

Status cancel_on_connection(Rpc& r, ClientSession& c, std::uint32_t id) noexcept {
  ConnectionClient& b = *c.connection;
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    ConnectionClientSlot& k = b.slots[slot];
    if (!is_active(b, slot) || k.call.id != id) continue;
    if (k.cancel != Cancel::none || (k.has_outcome && k.status == Status::cancelled))
      return Status::invalid_argument;  // it was cancelled or timed out before
    abandon_call(r, c, k, Status::cancelled);
    return Status::ok;
  }
  for (std::uint32_t i = 0; i < b.backlog_count; ++i) {
    ConnectionCall& w = backlog_at(r, b, i);
    if (w.id != id || w.outcome) continue;
    w.outcome = Status::cancelled;
    return Status::ok;
  }
  return Status::invalid_argument;
}

void run_cancel_callbacks(Rpc& r, ConnectionClient& b) noexcept {
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    if (is_active(b, slot)) try_finish(r, b, b.slots[slot]);
  }
  // Callbacks only add calls to the backlog's end.
  std::uint32_t i = 0;
  for (std::uint32_t most = b.backlog_count; most != 0; --most) {
    if (!backlog_at(r, b, i).outcome) {
      ++i;
      continue;
    }
    ConnectionCall w = remove_from_backlog(r, b, i);
    end_call(w, Status::cancelled);
  }
  advance_if_ready(r, &b, b.session);
}

void end_backlogged(Rpc& r, ConnectionClient& b, Status status) noexcept {
  for (std::uint32_t most = b.backlog_count; most != 0 && b.backlog_count != 0; --most) {
    ConnectionCall w = remove_from_backlog(r, b, 0);
    end_call(w, status);
  }
}

bool close_client_connection(Rpc& r, ClientSession& c) noexcept {
  if (c.connection == nullptr) return false;
  ConnectionClient& b = *c.connection;
  withdraw_connection_request(r, b);
  for (std::uint32_t i = 0; i < b.backlog_count; ++i) {
    ConnectionCall& w = backlog_at(r, b, i);
    if (!w.outcome) w.outcome = Status::flushed;
  }
  // The others end with the connection: the server may be using their memory.
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    ConnectionClientSlot& k = b.slots[slot];
    if (is_active(b, slot) && !k.has_outcome && !k.request_in_flight && !k.key_open)
      set_outcome(k, Status::flushed);
  }
  agent::Agent* const a = agent_of(r, b);
  if (a != nullptr && a->state != ConnectionState::draining) agent::close(r.context, *a);
  return a != nullptr;
}

bool release_client_connection(Rpc& r, ClientSession& c, const Error& why) noexcept {
  ConnectionClient& b = *c.connection;
  if (b.is_ending) {
    if (b.agent != kNone) return false;
  } else {
    b.is_ending = true;
    c.state = SessionState::closing;
    r.context.timers.cancel(c.timer);
    withdraw_connection_request(r, b);
    end_backlogged(r, b, why.status == Status::ok ? Status::flushed : why.status);
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
  unqueue_connection(r, b);
  c.connection.reset();
  return true;
}

std::uint64_t check_connection_calls(Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  ConnectionClient* const b = c.connection.get();
  const std::uint32_t session = c.name;
  std::uint64_t next = ~std::uint64_t{0};
  for (std::uint32_t slot = 0; slot < b->window; ++slot) {
    ConnectionClientSlot& k = b->slots[slot];
    if (!is_active(*b, slot)) continue;
    if (now >= k.call.deadline) {
      if (k.has_outcome) {  // its memory does not come back
        if (agent::Agent* const a = agent_of(r, *b); a != nullptr)
          agent::fail(
              r.context, *a,
              {Status::peer_lost, "end a long call", "the server does not let go of its memory",
               "the peer's process hangs, or is hostile"});
        return next;
      }
      abandon_call(r, c, k, Status::timed_out);
      try_finish(r, *b, k);
      if (!is_still_ready(r, b, session)) return next;
      if (!is_active(*b, slot)) continue;
    }
    next = std::min(next, k.call.deadline);
  }
  for (std::uint32_t i = 0; i < b->backlog_count;) {
    const std::uint64_t due = backlog_at(r, *b, i).deadline;
    if (now < due) {
      next = std::min(next, due);
      ++i;
      continue;
    }
    ConnectionCall w = remove_from_backlog(r, *b, i);
    end_call(w, Status::timed_out);
    if (!is_still_ready(r, b, session)) return next;
    i = 0;  // its callback may have ended others
  }
  advance_if_ready(r, b, session);
  return next;
}

ClientSession* next_session_to_connect(Rpc& r) noexcept {
  for (std::uint32_t i = 0; r.connections_wanted != 0 && i < r.clients.capacity(); ++i) {
    if (!r.clients.in_use(i)) continue;
    ClientSession& c = r.clients.at(i);
    if (c.connection != nullptr && c.connection->wants_connection) return &c;
  }
  return nullptr;
}

void fail_connecting(Rpc& r, ClientSession& c, const Error& why) noexcept {
  withdraw_connection_request(r, *c.connection);
  if (c.transport == Transport::connection) return fail_session(r, c, why);
  end_backlogged(r, *c.connection, why.status);
}

}  // namespace spinwire::rpc
