// Long calls at the server. Each runs its handler at most once, as nothing arrives twice over a
// reliable connection, and is answered over the connection that it came by.
#include <algorithm>
#include <cstring>

#include "agent/submit.h"
#include "base/internals.h"
#include "rpc/reply_buffer.h"
#include "rpc/server_session.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::rpc {

namespace {

using wire::RpcMessageHeader;
using wire::RpcMessageKind;
using State = ConnectionServerSlot::State;

inline ConnectionServerSlot& slot_for(ConnectionServer& b, std::uint32_t number) noexcept {
  return b.slots[number & (b.window - 1)];
}

void release_reply(ConnectionServerSlot& v) noexcept {
  if (v.block != nullptr) detail::release(std::exchange(v.block, nullptr));
}

/// The session of a connection's callback; null if the session has another connection now.
ServerSession* session_of(Rpc& r, std::uint32_t name, const Connection& of) noexcept {
  ServerSession* const s = find_server(r, name);
  if (s == nullptr || s->connection == nullptr) return nullptr;
  const agent::Agent* const a = agent_of(r, *s->connection);
  return a != nullptr && agent::handle(r.context, *a) == of ? s : nullptr;
}

/// Sends the reply: a WRITE to the client's memory, or a message.
Status send_reply(Rpc& r, agent::Agent& a, const ConnectionServerSlot& v) noexcept {
  if (!v.writes_reply) {
    return agent::submit_message<false>(r.context, a, v.block, v.data, v.size, {}, true);
  }
  return agent::submit_any<agent::OperationKind::write_imm>(
      r.context, a, {v.block, v.data, v.size, &v.reply, v.number, {}, true});
}

/// Builds the reply as a message: header and payload in one block, which may be the call's reply
/// buffer with the payload in place.
Status build_reply_message(Rpc& r, ConnectionServerSlot& v, Status status, const std::byte* data,
                           std::size_t size, Block* space) noexcept {
  const std::size_t bytes = wire::kRpcMessageHeaderBytes + size;
  Block* const block =
      space != nullptr ? space : r.context.arena->allocate(memory::PoolId::send, bytes);
  if (block == nullptr) return Status::no_buffer;
  RpcMessageHeader header;
  header.number = v.number;
  header.kind = RpcMessageKind::reply;
  header.status = static_cast<std::uint8_t>(status);
  header.size = static_cast<std::uint32_t>(size);
  const auto head = wire::encode(header);
  std::memcpy(block->payload, head.data(), head.size());
  if (space != nullptr) {
    detail::retain(block);
  } else if (size != 0) {
    std::memcpy(block->payload + head.size(), data, size);
  }
  v.block = block;
  v.data = block->payload;
  v.size = static_cast<std::uint32_t>(bytes);
  v.writes_reply = false;
  return Status::ok;
}

/// Builds the library's own refusal.
Status build_refusal(Rpc& r, ConnectionServerSlot& v) noexcept {
  const std::string_view text =
      v.refusal == Status::unsupported ? "no such method" : "the handler has not answered";
  const Status status = build_reply_message(
      r, v, v.refusal, reinterpret_cast<const std::byte*>(text.data()), text.size(), nullptr);
  if (status == Status::ok) v.state = State::answering;
  return status;
}

/// Takes the next steps of a slot. False: it has to wait.
bool advance_slot(Rpc& r, agent::Agent& a, ConnectionServerSlot& v) noexcept {
  Status status = Status::ok;
  if (v.cancel_to_confirm) {
    status = send_message(r, a, {v.number, 0, RpcMessageKind::cancelled}, {});
    if (!is_transient(status)) v.cancel_to_confirm = false;
    return !is_transient(status);
  }
  if (v.state == State::refusing) status = build_refusal(r, v);
  if (v.state == State::answering) {
    status = send_reply(r, a, v);
    if (!is_transient(status)) {
      v.state = State::over;
      release_reply(v);
    }
  }
  return !is_transient(status);
}

/// References the bytes of a reply that is written to the client's memory.
Status reference_reply(Rpc& r, ConnectionServerSlot& v, const std::byte* data, std::size_t size,
                       Block* block) noexcept {
  if (block != nullptr) {
    detail::retain(block);
  } else {
    block = r.context.arena->allocate(memory::PoolId::send, std::max<std::size_t>(size, 1));
    if (block == nullptr) return Status::no_buffer;
    if (size != 0) std::memcpy(block->payload, data, size);
    data = block->payload;
  }
  v.block = block;
  v.data = const_cast<std::byte*>(data);
  v.size = static_cast<std::uint32_t>(size);
  v.writes_reply = true;
  return Status::ok;
}

/// The longest reply of a call that names no memory.
std::size_t longest_reply(const ServerSession& s, const agent::Agent& a) noexcept {
  const std::uint32_t max_inline_call = std::max(a.send_queue.max_eager, a.max_message);
  return std::min<std::size_t>(wire::rpc_payload(s.mtu),
                               max_inline_call - wire::kRpcMessageHeaderBytes);
}

/// Refuses a call on the library's behalf; waits for memory if there is none. The session may be
/// gone.
void refuse_call(Rpc& r, std::uint32_t session, std::uint32_t number, Status status) noexcept {
  ServerSession* const s = find_server(r, session);
  agent::Agent* const a =
      s != nullptr && s->connection != nullptr ? agent_of(r, *s->connection) : nullptr;
  if (a == nullptr || a->state != ConnectionState::ready) return;
  ConnectionServerSlot& v = slot_for(*s->connection, number);
  if (v.number != number || v.state != State::running) return;
  v.state = State::refusing;
  v.refusal = status;
  if (!advance_slot(r, *a, v)) queue_connection(r, *s->connection);
}

/// Runs the handler; the session may be gone afterwards.
void run_handler(Rpc& r, const ServerSession& s, ConnectionServerSlot& v, Message& m,
                 const std::byte* data, std::size_t size) noexcept {
  const std::uint32_t session = s.name;
  const std::uint32_t number = v.number;
  v.state = State::running;
  if (v.method >= r.handlers.size() || !r.handlers[v.method])
    return refuse_call(r, session, number, Status::unsupported);
  ++r.stats.served;
  Request request = detail::make<Request>(
      detail::make<PendingCall>(r.context.slot, session | kConnectionCall, number), v.method,
      detail::block_of(m), const_cast<std::byte*>(data), size);
  r.handlers[v.method](request);
  if (!detail::Internals::is_answered(request)) refuse_call(r, session, number, Status::refused);
  if (detail::Internals::is_kept(request)) (void)m.take();  // the slices hold it now
}

void on_call(Rpc& r, ServerSession& s, agent::Agent& a, const RpcMessageHeader& header, Message& m,
             std::span<const std::byte> payload) noexcept {
  ConnectionServerSlot& v = slot_for(*s.connection, header.number);
  const bool ahead = static_cast<std::int32_t>(header.number - v.number) > 0;
  if (v.state != State::none && !ahead) return fail_protocol(r, a, "a call that was there before");
  if (header.size > r.context.config.connections.max_message_bytes)
    return fail_protocol(r, a, "a request longer than connections.max_message_bytes");
  release_reply(v);
  v.number = header.number;
  v.cancel_to_confirm = false;
  v.method = header.method;
  v.size = header.size;
  v.reply = {header.address, header.reply_capacity, header.rkey, Access::remote_write};
  if (payload.size() == header.size) return run_handler(r, s, v, m, payload.data(), payload.size());
  const bool served = header.method < r.handlers.size() && r.handlers[header.method];
  v.state = served ? State::body : State::running;
  if (!served) refuse_call(r, s.name, header.number, Status::unsupported);
}

/// The request of a call whose header arrived before.
void on_request_body(Rpc& r, ServerSession& s, agent::Agent& a, Message& m) noexcept {
  const std::uint32_t number = *m.immediate();
  ConnectionServerSlot& v = slot_for(*s.connection, number);
  if (v.state == State::none || static_cast<std::int32_t>(number - v.number) > 0)
    return fail_protocol(r, a, "a request that no header was there for");
  if (number != v.number || v.state != State::body) {  // it is over
    ++r.stats.late;
    return;
  }
  if (m.size() != v.size) return fail_protocol(r, a, "a request of another size than told");
  run_handler(r, s, v, m, m.data(), m.size());
}

void on_cancel(Rpc& r, ServerSession& s, agent::Agent& a, const RpcMessageHeader& header) noexcept {
  ConnectionServerSlot& v = slot_for(*s.connection, header.number);
  if (v.state == State::none || header.number != v.number || v.cancel_to_confirm)
    return fail_protocol(r, a, "a cancel of no call");
  release_reply(v);
  v.state = State::over;
  v.cancel_to_confirm = true;
  if (!advance_slot(r, a, v)) queue_connection(r, *s.connection);
}

void on_server_message(Rpc& r, std::uint32_t name, const Connection& from, Message& m) noexcept {
  ServerSession* const s = session_of(r, name, from);
  if (s == nullptr) return;
  agent::Agent& a = *agent_of(r, *s->connection);
  s->last_heard = r.context.now;
  if (m.is_write()) return fail_protocol(r, a, "a write to memory that it was not given");
  if (m.immediate()) return on_request_body(r, *s, a, m);
  RpcMessageHeader header;
  std::span<const std::byte> payload;
  if (!wire::decode(m.bytes(), header, payload)) return fail_protocol(r, a, "a malformed one");
  switch (header.kind) {
    case RpcMessageKind::call:
      return on_call(r, *s, a, header, m, payload);
    case RpcMessageKind::cancel:
      return on_cancel(r, *s, a, header);
    default:
      return fail_protocol(r, a, "one that only servers send");
  }
}

/// Refuses the request of a call that is over, so that it is not pulled.
void on_server_offer(Rpc& r, std::uint32_t name, const Connection& from, Offer& offer) noexcept {
  ServerSession* const s = session_of(r, name, from);
  if (s == nullptr || !offer.immediate()) return offer.refuse();
  const ConnectionServerSlot& v = slot_for(*s->connection, *offer.immediate());
  // Its header may be held back behind an earlier request.
  if (v.number == *offer.immediate() && v.state == State::over) offer.refuse();
}

void on_server_closed(Rpc& r, std::uint32_t name, const Connection& gone,
                      const Error& why) noexcept {
  ServerSession* const s = find_server(r, name);
  if (s == nullptr || s->connection == nullptr) return;
  ConnectionServer& b = *s->connection;
  if (!(detail::make<Connection>(r.context.slot, b.agent, b.agent_generation) == gone)) return;
  b.agent = kNone;
  // Without datagrams a client ends its session with its connection. A client that lost the
  // connection makes another; else its session is forgotten after connections.peer_timeout.
  const bool over = why.status == Status::ok && s->transport == Transport::connection;
  over ? release_server_session(r, *s) : release_server_connection(r, *s);
}

}  // namespace

void ConnectionDeleter::operator()(ConnectionServer* connection) const noexcept {
  for (std::uint32_t i = 0; i < connection->window; ++i) {
    release_reply(connection->slots[i]);
    if (connection->reply_buffers != nullptr) release_reply_buffer(connection->reply_buffers[i]);
  }
  delete connection;
}

ServerSession* find_session_to_join(Rpc& r, const wire::JoinSession& join) noexcept {
  ServerSession* const s = find_server(r, join.session);
  const bool fits = s != nullptr && s->join_token == join.token &&
                    s->peer_address->incarnation == join.endpoint.incarnation;
  if (!fits) ++r.stats.bad_bulk;
  return fits ? s : nullptr;
}

void join_session(Rpc& r, ServerSession& s, agent::Agent& a) {
  std::unique_ptr<ConnectionServer, ConnectionDeleter> b(new ConnectionServer);
  b->slots = std::make_unique<ConnectionServerSlot[]>(s.window);
  b->window = s.window;
  b->session = s.name;
  b->is_server = true;
  b->agent = a.index;
  b->agent_generation = a.generation;
  release_server_connection(r, s);
  s.connection = std::move(b);
  Rpc* const self = &r;
  const std::uint32_t name = s.name;
  a.handlers = {};
  a.handlers.on_message = [self, name](Connection from, Message& m) {
    on_server_message(*self, name, from, m);
  };
  a.handlers.on_offer = [self, name](Connection from, Offer& offer) {
    on_server_offer(*self, name, from, offer);
  };
  a.handlers.on_closed = [self, name](Connection gone, const Error& why) {
    on_server_closed(*self, name, gone, why);
  };
}

void release_server_connection(Rpc& r, ServerSession& s) noexcept {
  if (s.connection == nullptr) return;
  unqueue_connection(r, *s.connection);
  agent::Agent* const a = agent_of(r, *s.connection);
  s.connection.reset();
  if (a != nullptr && a->state != ConnectionState::draining) agent::close(r.context, *a);
}

std::size_t max_reply(Rpc& r, std::uint32_t session, std::uint32_t number) noexcept {
  ServerSession* const s = find_server(r, session & ~kConnectionCall);
  if (s == nullptr) return 0;
  if ((session & kConnectionCall) == 0) {
    const ServerSlot& v = s->slots[number & (s->window - 1)];
    const bool running = v.number == number && v.state == ServerSlotState::running;
    return running ? wire::rpc_payload(s->mtu) : 0;
  }
  const agent::Agent* const a = s->connection != nullptr ? agent_of(r, *s->connection) : nullptr;
  if (a == nullptr) return 0;
  const ConnectionServerSlot& v = slot_for(*s->connection, number);
  if (v.number != number || v.state != State::running) return 0;
  if (v.reply.length != 0) return std::min(v.reply.length, agent::kMaxTransferBytes);
  return longest_reply(*s, *a);
}

bool is_connected(const Rpc& r, const ServerSession& s) noexcept {
  const agent::Agent* const a = s.connection != nullptr ? agent_of(r, *s.connection) : nullptr;
  return a != nullptr && a->state == ConnectionState::ready;
}

std::span<std::byte> reserve_on_connection(Rpc& r, std::uint32_t session, std::uint32_t number,
                                           std::size_t size) noexcept {
  ServerSession* const s = find_server(r, session & ~kConnectionCall);
  const agent::Agent* const a =
      s != nullptr && s->connection != nullptr ? agent_of(r, *s->connection) : nullptr;
  if (a == nullptr) return {};
  ConnectionServer& b = *s->connection;
  const ConnectionServerSlot& v = slot_for(b, number);
  const std::size_t max_inline_call = longest_reply(*s, *a);
  const bool runs = v.number == number && v.state == State::running;
  if (!runs || v.reply.length != 0 || size > max_inline_call) return {};
  if (b.reply_buffers == nullptr) b.reply_buffers.reset(new (std::nothrow) ReplyBuffer[b.window]);
  if (b.reply_buffers == nullptr) return {};
  return prepare_reply_buffer(r, b.reply_buffers[number & (b.window - 1)], number, size,
                              wire::kRpcMessageHeaderBytes + max_inline_call,
                              wire::kRpcMessageHeaderBytes);
}

void release_reply_buffers(ConnectionServer& b) noexcept {
  for (std::uint32_t slot = 0; b.reply_buffers != nullptr && slot < b.window; ++slot) {
    if (b.slots[slot].state != State::running) release_reply_buffer(b.reply_buffers[slot]);
  }
}

ReservedReply find_reserved_on_connection(Rpc& r, std::uint32_t session, std::uint32_t number,
                                          std::size_t size) noexcept {
  const ServerSession* const s = find_server(r, session & ~kConnectionCall);
  if (s == nullptr || s->connection == nullptr || s->connection->reply_buffers == nullptr)
    return {};
  const ReplyBuffer& space = s->connection->reply_buffers[number & (s->window - 1)];
  if (space.number != number || space.block == nullptr || size > space.size) return {};
  return {space.block, space.block->payload + wire::kRpcMessageHeaderBytes};
}

Status answer_over_connection(Rpc& r, std::uint32_t session, std::uint32_t number, Status status,
                              const std::byte* data, std::size_t size, Block* block) noexcept {
  ServerSession* const s =
      (session & kConnectionCall) != 0 ? find_server(r, session & ~kConnectionCall) : nullptr;
  agent::Agent* const a =
      s != nullptr && s->connection != nullptr ? agent_of(r, *s->connection) : nullptr;
  if (a == nullptr || a->state != ConnectionState::ready) return Status::not_connected;
  ConnectionServerSlot& v = slot_for(*s->connection, number);
  if (v.number != number || v.state != State::running) return Status::not_connected;
  const bool write = status == Status::ok && v.reply.length != 0;
  if (status == Status::ok && size > max_reply(r, session, number)) return Status::message_too_long;
  Block* const space = find_reserved_on_connection(r, session, number, size).block;
  const Status kept =
      write ? reference_reply(r, v, data, size, block)
            : build_reply_message(r, v, status, data, size, block == space ? space : nullptr);
  if (kept != Status::ok) return kept;
  v.state = State::answering;
  if (!advance_slot(r, *a, v)) queue_connection(r, *s->connection);
  return Status::ok;
}

bool advance(Rpc& r, ConnectionServer& b) noexcept {
  agent::Agent* const a = agent_of(r, b);
  if (a == nullptr || a->state != ConnectionState::ready) return true;
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    if (advance_slot(r, *a, b.slots[slot])) continue;
    queue_connection(r, b);
    return false;
  }
  return true;
}

}  // namespace spinwire::rpc
