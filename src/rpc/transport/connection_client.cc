// Starts and cancels long calls, and checks their time-outs. Makes the session's connection, and
// ends it.
#include <algorithm>
#include <new>

#include "base/error.h"
#include "base/internals.h"
#include "rpc/backlog.h"
#include "rpc/call_cancel.h"
#include "rpc/client_session.h"
#include "rpc/room_for_calls.h"
#include "rpc/session_recording.h"
#include "rpc/transport/connection_call.h"

namespace spinwire::rpc {

namespace {

using Cancel = ConnectionClientSlot::Cancel;

/// Makes the record of a session's connection. Returns false without memory.
bool make_connection_client(Rpc& r, ClientSession& c) noexcept try {
  std::unique_ptr<ConnectionClient, ConnectionDeleter> b(new ConnectionClient);
  b->slots = std::make_unique<ConnectionClientSlot[]>(c.window);
  b->session = c.name;
  b->window = c.window;
  b->backlog_room = c.backlog_room;
  b->backlog = std::make_unique<ConnectionCall[]>(b->backlog_room);
  b->active = c.window == kWindowMax ? 0 : ~std::uint64_t{0} << c.window;
  const std::uint32_t first = random_call_number(r);
  for (std::uint32_t i = 0; i < c.window; ++i) b->slots[i].number = first + i;
  c.connection = std::move(b);
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

/// Whether the engine may let a peer write to the reply's memory.
Status validate_reply_region(const Rpc& r, const BufferSlice& reply) noexcept {
  const agent::EngineContext& ctx = r.context;
  if (!reply || reply.size() == 0 || reply.size() > ~std::uint32_t{0})
    return Status::invalid_argument;
  if (!ctx.owns(*detail::block_of(reply))) return Status::invalid_argument;
  const bool may_write = allows(ctx.attributes.access, Access::remote_write);
  return may_write && ctx.config.leases.maximum != 0 ? Status::ok : Status::unsupported;
}

/// False for a call that was cancelled, or has timed out, before.
bool can_cancel(const ConnectionClientSlot& k) noexcept {
  return k.cancel == Cancel::none && k.call.outcome != Status::cancelled;
}

}  // namespace

void ConnectionDeleter::operator()(ConnectionClient* connection) const noexcept {
  delete connection;
}

std::size_t max_call(const Rpc& r, const ClientSession& c) noexcept {
  const agent::EngineContext& ctx = r.context;
  const agent::Agent* const a = agent_of(r, c.connection);
  std::uint32_t connection = ctx.config.connections.max_message_bytes;
  if (!allows(ctx.attributes.access, Access::remote_read))
    connection = ctx.config.connections.eager_bytes;
  if (a != nullptr && agent::is_ready(*a)) connection = agent::max_message(*a);
  return std::max<std::size_t>(connection, c.max_inline_call);
}

Status call_over_connection(Rpc& r, ClientSession& c, const CallRequest& call,
                            const BufferSlice* reply_into, const ReplyCallback& done, bool now,
                            bool waits_until_ready) noexcept {
  if (call.size > max_call(r, c)) return Status::message_too_long;
  if (reply_into != nullptr) {
    if (const Status status = validate_reply_region(r, *reply_into); status != Status::ok)
      return status;
  }
  if (c.connection == nullptr && !make_connection_client(r, c)) return Status::no_memory;
  ConnectionClient& b = *c.connection;
  agent::Agent* const a = agent_of(r, b);
  const bool connected = a != nullptr && agent::is_ready(*a);
  const std::uint32_t slot = free_slot(b);
  const bool waits = !connected || b.backlog_count != 0 || slot >= b.window || takes_no_calls(c);
  if (waits && is_backlog_full(r, c, b.backlog_count))
    return refuse_for_backlog(r, c, Backlog::long_calls);
  ConnectionCall w;
  if (!store_call(r, c, call, done, w)) return refuse_for_block(r, c, call.size);
  schedule_check(r, c, call.deadline);
  if (reply_into != nullptr) w.reply = *reply_into;
  w.waits_until_ready = waits_until_ready;
  if (c.state == SessionState::ready && !takes_no_calls(c) && !is_doubted(c))
    request_connection(r, b);
  ConnectionClientSlot* k = nullptr;
  if (waits) {
    backlog_at(b, b.backlog_count++) = std::move(w);
  } else {
    k = &occupy_slot(r, b, slot, std::move(w));
  }
  if (!connected) return Status::ok;
  if (!now) {
    queue_connection(r, b);
  } else if (k == nullptr || b.turn != ConnectionEnd::Turn::none) {
    post_calls(r, b);
  } else {
    post_call(r, b, *a, *k);
  }
  return Status::ok;
}

bool open_mandatory_connection(Rpc& r, ClientSession& c) noexcept {
  if (c.connection == nullptr && !make_connection_client(r, c)) return false;
  request_connection(r, *c.connection);
  return true;
}

bool cancel_on_connection(Rpc& r, ClientSession& c, std::uint32_t id) noexcept {
  ConnectionClient& b = *c.connection;
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    ConnectionClientSlot& k = b.slots[slot];
    if (!is_active(b, slot) || k.call.id != id) continue;
    if (!can_cancel(k)) return false;
    abandon_call(r, c, k, Status::cancelled);
    return true;
  }
  return cancel_in_backlog(b, id);
}

std::uint32_t age_of_newest_long(const ConnectionClient& b, std::uint32_t last_id) noexcept {
  std::uint32_t age = age_of_newest(b, last_id);
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    const ConnectionClientSlot& k = b.slots[slot];
    if (is_active(b, slot) && can_cancel(k)) age = std::min(age, last_id - k.call.id);
  }
  return age;
}

void run_cancel_callbacks(Rpc& r, ConnectionClient& b) noexcept {
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    if (is_active(b, slot)) try_finish(r, b, b.slots[slot]);
  }
  run_backlog_callbacks(b);
  advance_if_ready(r, b.session);
}

bool close_client_connection(Rpc& r, ClientSession& c) noexcept {
  if (c.connection == nullptr) return false;
  ConnectionClient& b = *c.connection;
  withdraw_connection_request(r, b);
  cancel_backlog(b, Status::flushed);
  // Other calls end with the connection: the server may be using their memory.
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    ConnectionClientSlot& k = b.slots[slot];
    if (is_active(b, slot) && !k.call.outcome && !k.request_in_flight && !k.key_open)
      k.call.outcome = Status::flushed;
  }
  agent::Agent* const a = agent_of(r, b);
  if (a != nullptr && !agent::is_ending(*a)) agent::close(r.context, *a);
  return a != nullptr;
}

bool release_client_connection(Rpc& r, ClientSession& c, const EndReason& why) noexcept {
  ConnectionClient& b = *c.connection;
  if (b.is_ending) {
    if (b.agent) return false;
  } else {
    b.was_opening = c.state == SessionState::opening;
    b.is_ending = true;
    c.state = SessionState::closing;
    update_send_window(c);
    r.context.timers.cancel(c.timer);
    withdraw_connection_request(r, b);
    // The connection may take connections.close_timeout to end. Inline calls do not wait for it.
    const Status unsent = status_of_waiting_calls(c, why, !b.was_opening);
    end_calls(r, c, status_of_calls(why), unsent);
    end_backlog(b, unsent);
  }
  if (agent::Agent* const a = agent_of(r, b); a != nullptr) {
    b.why = why;
    if (why) {
      agent::fail(r.context, *a, *why);
    } else if (!agent::is_ending(*a)) {
      agent::close(r.context, *a);
    }
    return false;
  }
  unqueue_connection(r, b);
  c.connection.reset();
  return true;
}

void interrupt_client_connection(Rpc& r, ClientSession& c, const Error& why) noexcept {
  ConnectionClient& b = *c.connection;
  withdraw_connection_request(r, b);
  unqueue_connection(r, b);
  b.had_connection = b.is_retried = false;
  agent::Agent* const a = agent_of(r, b);
  b.is_interrupted = a != nullptr;
  b.interrupted_as = status_of_calls(why);
  if (a == nullptr) return;
  // A server that said goodbye waits for the end of the connection, on which there are no calls.
  c.is_leaving ? agent::close(r.context, *a) : agent::fail(r.context, *a, why);
}

void reclaim_inline_calls(Rpc& r, ClientSession& c) noexcept {
  if (c.connection == nullptr) return;
  ConnectionClient& b = *c.connection;
  for (std::uint32_t i = 0; i < b.backlog_count;) {
    const ConnectionCall& w = backlog_at(b, i);
    if (w.reply || w.size > c.max_inline_call) {
      ++i;
      continue;
    }
    // Without memory they stay, and go over a connection.
    if (c.backlog == nullptr && !allocate_backlog(r, c)) return;
    new (&backlog_at(c, c.backlog_count++)) BackloggedCall(remove_from_backlog(b, i));
  }
}

void reroute_backlog(Rpc& r, ClientSession& c) noexcept {
  const std::uint32_t name = c.name;
  for (std::uint32_t i = 0; i < c.backlog_count;) {
    const BackloggedCall& w = backlog_at(c, i);
    if (c.transport == Transport::datagram && w.size <= c.max_inline_call) {
      ++i;
      continue;
    }
    const bool made = c.connection != nullptr || make_connection_client(r, c);
    if (!made || c.connection->backlog_count == c.connection->backlog_room) {
      end_backlogged(c, i, made ? Status::not_connected : Status::no_memory);
      if (!is_opening(r, name)) return;
      continue;
    }
    ConnectionClient& b = *c.connection;
    ConnectionCall& moved = backlog_at(b, b.backlog_count++);
    static_cast<BackloggedCall&>(moved) = remove_from_backlog(c, i);
  }
}

void connect_backlog(Rpc& r, ClientSession& c) noexcept {
  ConnectionClient& b = *c.connection;
  if (b.backlog_count != 0) request_connection(r, b);
}

std::uint64_t check_connection_calls(Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  ConnectionClient* const b = c.connection.get();
  const std::uint32_t session = c.name;
  std::uint64_t next = ~std::uint64_t{0};
  for (std::uint32_t slot = 0; slot < b->window; ++slot) {
    ConnectionClientSlot& k = b->slots[slot];
    if (!is_active(*b, slot)) continue;
    // A reply on its way is fetched by our own READs. The agent looks after a server that delays
    // them.
    if (now >= k.call.deadline && k.call.outcome && k.placing)
      k.call.deadline = now + r.timeouts.close;
    if (now >= k.call.deadline) {
      if (k.call.outcome) {  // the server does not release its memory
        if (agent::Agent* const a = agent_of(r, *b); a != nullptr)
          agent::fail(r.context, *a,
                      {Status::peer_lost, "end a long call",
                       "the server does not let go of its memory", base::kHangingPeerRemedy});
        return next;
      }
      record(r, c, observe::EventKind::timeout, {"of a long call"});
      abandon_call(r, c, k, Status::timed_out);
      try_finish(r, *b, k);
      if (!is_ready(r, session)) return next;
      if (!is_active(*b, slot)) continue;
    }
    next = std::min(next, k.call.deadline);
  }
  next = check_backlog(r, *b, session, now, next);
  advance_if_ready(r, session);
  return next;
}

ClientSession& next_session_to_connect(Rpc& r) noexcept {
  return *find_client(r, r.connection_requests.front()->session);
}

void fail_connecting(Rpc& r, ClientSession& c, const Error& why) noexcept {
  withdraw_connection_request(r, *c.connection);
  if (c.transport == Transport::connection) return end_session(r, c, why);
  end_backlog(*c.connection, Status::not_connected);
}

}  // namespace spinwire::rpc
