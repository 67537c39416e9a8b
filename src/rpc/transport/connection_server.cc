// Long calls at the server. A reliable connection delivers nothing twice, so each handler runs at
// most once. The reply uses the connection of the request.
#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>

#include "agent/submit.h"
#include "agent/unheard_peers.h"
#include "base/internals.h"
#include "base/secret_word.h"
#include "rpc/call_samples.h"
#include "rpc/kept_replies.h"
#include "rpc/reply_buffer.h"
#include "rpc/room_for_calls.h"
#include "rpc/server_session.h"
#include "rpc/session_goodbye.h"
#include "rpc/slots.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::rpc {

namespace {

using wire::RpcMessageHeader;
using wire::RpcMessageKind;
using State = ConnectionServerSlot::State;

inline ConnectionServerSlot& slot_for(ConnectionServer& b, std::uint32_t number) noexcept {
  return b.slots[number & (b.window - 1)];
}

/// The session of a connection's callback; null if the session now has another connection.
ServerSession* session_of(Rpc& r, std::uint32_t name, const Connection& of) noexcept {
  ServerSession* const s = find_server(r, name);
  return s != nullptr && s->connection != nullptr && is_connection_of(r, *s->connection, of)
             ? s
             : nullptr;
}

/// A call whose handler runs or has deferred it.
struct RunningCall {
  ServerSession* session = nullptr;
  agent::Agent* agent = nullptr;
  ConnectionServerSlot* slot = nullptr;  ///< null: the call is over, or its connection is not ready
};
RunningCall find_running(Rpc& r, std::uint32_t session, std::uint32_t number) noexcept {
  ServerSession* const s = find_server(r, session);
  if (s == nullptr || !is_connected(r, *s)) return {};
  ConnectionServerSlot& v = slot_for(*s->connection, number);
  if (v.number != number || v.state != State::running) return {};
  return {s, agent_of(r, *s->connection), &v};
}

/// Whether the client places the reply in the memory that it has named.
bool is_placed_by_client(const ConnectionServerSlot& v) noexcept {
  return v.named.length != 0 && v.named.rkey == 0;
}

/// Sends the reply: to the client's memory, by a WRITE or a message of its bytes alone, or as a
/// message with a header.
Status send_reply(Rpc& r, agent::Agent& a, const ConnectionServerSlot& v) noexcept {
  const BufferSlice reply = v.reply;  // the slot may lose it; see kept_replies.h
  Block* const block = detail::block_of(reply);
  if (!v.is_bare) {
    return agent::submit_message<false>(r.context, a, block, reply.data(), reply.size(), {}, false,
                                        true);
  }
  if (is_placed_by_client(v)) {
    return agent::submit_any<agent::OperationKind::send_imm>(
        r.context, a, {block, reply.data(), reply.size(), nullptr, v.number, {}, true, true});
  }
  return agent::submit_any<agent::OperationKind::write_imm>(
      r.context, a, {block, reply.data(), reply.size(), &v.named, v.number, {}, true});
}

/// Bytes of a reply as a message.
constexpr std::size_t bytes_of_reply(std::size_t payload) noexcept {
  return wire::kRpcMessageHeaderBytes + payload;
}

/// Builds the reply as a message: header and payload in one block. The block may be the call's
/// reply buffer with the payload in place. `code`: of the handler's refusal.
Status build_reply_message(Rpc& r, ConnectionServerSlot& v, Status status, const std::byte* data,
                           std::size_t size, Block* space,
                           std::optional<std::uint32_t> code = {}) noexcept {
  const std::size_t bytes = bytes_of_reply(size);
  Block* const block =
      space != nullptr ? space : r.context.arena->allocate(memory::PoolId::send, bytes);
  if (block == nullptr) return Status::no_buffer;
  RpcMessageHeader header;
  header.number = v.number;
  header.kind = RpcMessageKind::reply;
  header.status = static_cast<std::uint8_t>(status);
  header.size = static_cast<std::uint32_t>(size);
  if (code) {
    header.status |= wire::kHasCode;
    header.code = *code;
  }
  const auto head = wire::encode(header);
  std::memcpy(block->payload, head.data(), head.size());
  if (space == nullptr && size != 0) std::memcpy(block->payload + head.size(), data, size);
  v.reply = detail::make<BufferSlice>(block, block->payload, bytes);
  if (space == nullptr) detail::release(block);  // the slice holds it
  v.is_bare = false;
  return Status::ok;
}

/// Builds the library's own refusal.
Status build_refusal(Rpc& r, ConnectionServerSlot& v) noexcept {
  const std::string_view text = v.refusal == Status::unsupported ? "no such method"
                                : v.refusal == Status::limit     ? kReplyDropped
                                : v.refusal == Status::not_connected
                                    ? kTakesNoCallsText
                                    : "the handler has not answered";
  const Status status = build_reply_message(
      r, v, v.refusal, reinterpret_cast<const std::byte*>(text.data()), text.size(), nullptr);
  if (status == Status::ok) v.state = State::answering;
  return status;
}

/// Takes the next steps of a slot. Returns false if the slot must wait.
bool advance_slot(Rpc& r, agent::Agent& a, ConnectionServerSlot& v) noexcept {
  Step step = Step::done;
  // A refusal that waits for the peer's credit is not built yet.
  if (v.state == State::refusing && agent::is_ready(a) && !agent::has_credit(r.context, a))
    return false;
  if (v.cancel_to_confirm) {
    step = step_of(send_message(r, a, {v.number, 0, RpcMessageKind::cancelled}, {}));
    if (step != Step::waiting) v.cancel_to_confirm = false;
    return step != Step::waiting;
  }
  const bool refuses = v.state == State::refusing;
  if (refuses) step = step_of(build_refusal(r, v));
  if (v.state == State::answering) {
    step = step_of(send_reply(r, a, v));
    // Memory outside the pools could not be registered, or the client may not read it.
    if (step == Step::failed && v.is_bare && agent::is_ready(a)) {
      ++r.stats.dropped_replies;
      v.reply = {};
      v.refusal = Status::limit;
      v.state = State::refusing;
      return false;
    }
    if (step != Step::waiting) v.state = State::over;
    // A refusal that waits for room holds no memory: it is built again.
    if (step == Step::waiting && refuses) v.state = State::refusing;
    if (v.state != State::answering) v.reply = {};
  }
  return step != Step::waiting;
}

/// Takes the next steps of a slot now, or in a later poll.
void advance_or_wait(Rpc& r, ConnectionServer& b, agent::Agent& a,
                     ConnectionServerSlot& v) noexcept {
  if (advance_slot(r, a, v)) return;
  b.waiting |= bit(v.number & (b.window - 1));
  agent::set_owes_replies(a, true);
  wait_for_turn(r, b, false);
}

/// References the bytes of a reply without a header.
Status reference_reply(Rpc& r, ConnectionServerSlot& v, const std::byte* data, std::size_t size,
                       Block* block) noexcept {
  Block* const copy = block == nullptr ? copy_to_send_block(r, data, size) : nullptr;
  if (block == nullptr && copy == nullptr) return Status::no_buffer;
  v.reply = block != nullptr ? detail::make<BufferSlice>(block, const_cast<std::byte*>(data), size)
                             : detail::make<Buffer>(copy, size).slice();
  v.is_bare = true;
  return Status::ok;
}

/// The longest reply of a call that names no memory.
std::size_t longest_reply(const ServerSession& s, const agent::Agent& a) noexcept {
  const std::uint32_t message = std::max(agent::max_eager(a), agent::max_message(a));
  return std::min<std::size_t>(wire::rpc_payload(s.longest_datagram),
                               message - wire::kRpcMessageHeaderBytes);
}

/// Refuses a call on the library's behalf, or queues the refusal until there is memory. The session
/// may be gone afterwards.
void refuse_call(Rpc& r, std::uint32_t session, std::uint32_t number, Status status) noexcept {
  const RunningCall call = find_running(r, session, number);
  if (call.slot == nullptr) return;
  call.slot->state = State::refusing;
  call.slot->refusal = status;
  advance_or_wait(r, *call.session->connection, *call.agent, *call.slot);
}

/// Runs the handler. The session may be gone afterwards.
void run_handler(Rpc& r, const ServerSession& s, ConnectionServerSlot& v, Message& m,
                 const std::byte* data, std::size_t size) noexcept {
  const std::uint32_t session = s.name;
  const std::uint32_t number = v.number;
  v.state = State::running;
  if (v.method >= r.handlers.size() || !r.handlers[v.method])
    return refuse_call(r, session, number, Status::unsupported);
  ++r.stats.served;
  Request request = detail::make<Request>(
      detail::make<PendingCall>(r.context.slot, CallRef(session, Transport::connection, number)),
      v.method, detail::block_of(m), const_cast<std::byte*>(data), size);
  if (is_sample_due(r)) [[unlikely]] {
    run_sampled_handler(r, request);
  } else {
    r.handlers[v.method](request);
  }
  if (!detail::Internals::is_answered(request)) refuse_call(r, session, number, Status::refused);
  if (detail::Internals::is_kept(request)) (void)m.take();  // the slices now hold the block
}

void on_call(Rpc& r, ServerSession& s, agent::Agent& a, const RpcMessageHeader& header, Message& m,
             std::span<const std::byte> payload) noexcept {
  ConnectionServerSlot& v = slot_for(*s.connection, header.number);
  const bool ahead = static_cast<std::int32_t>(header.number - v.number) > 0;
  if (v.state != State::none && !ahead) return fail_protocol(r, a, "a call that was there before");
  if (header.reply_capacity != 0 && header.rkey == 0 && !agent::reads_local_offers(r.context))
    return fail_protocol(r, a, "memory for a reply without a key, which the device does not write");
  if (header.size > r.context.config.connections.max_message_bytes)
    return fail_protocol(r, a, "a request longer than connections.max_message_bytes");
  v.reply = {};
  v.number = header.number;
  v.cancel_to_confirm = false;
  v.method = header.method;
  v.size = header.size;
  v.named = {header.address, header.reply_capacity, header.rkey, Access::remote_write};
  if (is_leaving(s)) {
    v.state = State::running;
    return refuse_call(r, s.name, header.number, Status::not_connected);
  }
  if (payload.size() == header.size) return run_handler(r, s, v, m, payload.data(), payload.size());
  const bool served = header.method < r.handlers.size() && r.handlers[header.method];
  v.state = served ? State::body : State::running;
  if (!served) refuse_call(r, s.name, header.number, Status::unsupported);
}

/// Handles the request of a call whose header arrived before.
void on_request_body(Rpc& r, ServerSession& s, agent::Agent& a, Message& m) noexcept {
  const std::uint32_t number = *m.immediate();
  ConnectionServerSlot& v = slot_for(*s.connection, number);
  if (v.state == State::none || static_cast<std::int32_t>(number - v.number) > 0)
    return fail_protocol(r, a, "a request without a header");
  if (number != v.number || v.state != State::body) {  // the call is over
    ++r.stats.late_replies;
    return;
  }
  if (m.size() != v.size) return fail_protocol(r, a, "the request's size differs from its header");
  run_handler(r, s, v, m, m.data(), m.size());
}

void on_cancel(Rpc& r, ServerSession& s, agent::Agent& a, const RpcMessageHeader& header) noexcept {
  ConnectionServerSlot& v = slot_for(*s.connection, header.number);
  if (v.state == State::none || header.number != v.number || v.cancel_to_confirm)
    return fail_protocol(r, a, "a cancel of no call");
  v.reply = {};
  v.state = State::over;
  v.cancel_to_confirm = true;
  advance_or_wait(r, *s.connection, a, v);
}

void on_server_message(Rpc& r, std::uint32_t name, const Connection& from, Message& m) noexcept {
  ServerSession* const s = session_of(r, name, from);
  if (s == nullptr) return;
  agent::Agent& a = *agent_of(r, *s->connection);
  s->last_heard = r.context.now;
  wake_blocked(r, *s->connection);
  if (s->in_never_used_list) mark_used(r, *s);
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
  if (s != nullptr) wake_blocked(r, *s->connection);
  if (s == nullptr || !offer.immediate()) return offer.refuse();
  const ConnectionServerSlot& v = slot_for(*s->connection, *offer.immediate());
  // The call's header may be held behind an earlier request.
  if (v.number == *offer.immediate() && v.state == State::over) offer.refuse();
}

void on_server_closed(Rpc& r, std::uint32_t name, const Connection& gone,
                      const Error& why) noexcept {
  ServerSession* const s = session_of(r, name, gone);
  if (s == nullptr) return;
  s->connection->agent = {};
  // A client without datagrams ends its session with its connection. A client that lost the
  // connection makes another; otherwise its session is forgotten after connections.peer_timeout.
  const bool over = why.status == Status::ok && s->transport == Transport::connection;
  over ? release_server_session(r, *s, Status::ok) : release_server_connection(r, *s);
}

}  // namespace

void ConnectionDeleter::operator()(ConnectionServer* connection) const noexcept {
  for (std::uint32_t i = 0; connection->reply_buffers != nullptr && i < connection->window; ++i)
    release_reply_buffer(connection->reply_buffers[i]);
  delete connection;
}

ServerSession* find_session_to_join(Rpc& r, const wire::JoinSession& join) noexcept {
  ServerSession* const s = find_server(r, join.session);
  const bool fits = s != nullptr && base::is_same_secret(join.token, s->token) &&
                    s->peer_address->incarnation == join.endpoint.incarnation;
  if (!fits) ++r.stats.bad_long_calls;
  return fits ? s : nullptr;
}

void join_session(Rpc& r, ServerSession& s, agent::Agent& a) {
  std::unique_ptr<ConnectionServer, ConnectionDeleter> b(new ConnectionServer);
  b->slots = std::make_unique<ConnectionServerSlot[]>(s.window);
  b->window = s.window;
  b->session = s.name;
  b->is_server = true;
  release_server_connection(r, s);
  ConnectionHandlers handlers;
  handlers.on_message = session_handler<on_server_message>(r, s.name);
  handlers.on_offer = session_handler<on_server_offer>(r, s.name);
  handlers.on_closed = session_handler<on_server_closed>(r, s.name);
  attach(*b, a, handlers);
  agent::set_serves_calls(a);
  s.connection = std::move(b);
  s.leaving.is_told = false;
}

void release_server_connection(Rpc& r, ServerSession& s) noexcept {
  if (s.connection == nullptr) return;
  unqueue_connection(r, *s.connection);
  if (was_heard_by_connection(r, s)) mark_used(r, s);
  agent::Agent* const a = agent_of(r, *s.connection);
  s.connection.reset();
  if (a != nullptr && !agent::is_ending(*a)) agent::close(r.context, *a);
}

bool is_connected(const Rpc& r, const ServerSession& s) noexcept {
  const agent::Agent* const a = agent_of(r, s.connection);
  return a != nullptr && agent::is_ready(*a);
}

bool was_heard_by_connection(const Rpc& r, const ServerSession& s) noexcept {
  const agent::Agent* const a = agent_of(r, s.connection);
  return a != nullptr && agent::was_peer_heard(*a);
}

ReplyPlace reply_place_on_connection(Rpc& r, CallRef call) noexcept {
  const RunningCall running = find_running(r, call.session, call.number);
  if (running.slot == nullptr) return {};
  const std::size_t named = running.slot->named.length;
  const std::size_t most = is_placed_by_client(*running.slot) ? agent::max_message(*running.agent)
                                                              : r.context.max_transfer;
  if (named != 0) return {nullptr, 0, std::min(named, most), 0};
  ConnectionServer& b = *running.session->connection;
  return {&b.reply_buffers, b.window, longest_reply(*running.session, *running.agent),
          wire::kRpcMessageHeaderBytes};
}

void release_reply_buffers(ConnectionServer& b) noexcept {
  for (std::uint32_t slot = 0; b.reply_buffers != nullptr && slot < b.window; ++slot) {
    if (b.slots[slot].state != State::running) release_reply_buffer(b.reply_buffers[slot]);
  }
}

Status answer_over_connection(Rpc& r, CallRef call, Status status, const std::byte* data,
                              std::size_t size, Block* block) noexcept {
  const RunningCall running = find_running(r, call.session, call.number);
  if (running.slot == nullptr) return Status::not_connected;
  ConnectionServerSlot& v = *running.slot;
  const bool bare = status == Status::ok && v.named.length != 0 &&
                    !(is_placed_by_client(v) && is_eager(*running.agent, size));
  if (status == Status::ok && size > max_reply(r, call)) return Status::message_too_long;
  Block* const space = find_reserved_reply(r, call, size).block;
  const Status kept =
      bare ? reference_reply(r, v, data, size, block)
           : build_reply_message(r, v, status, data, size, block == space ? space : nullptr);
  if (kept != Status::ok)
    return refuse_reply_for_block(r, bare ? std::max<std::size_t>(size, 1) : bytes_of_reply(size));
  v.state = State::answering;
  advance_or_wait(r, *running.session->connection, *running.agent, v);
  return Status::ok;
}

Status refuse_over_connection(Rpc& r, CallRef call, std::uint32_t code,
                              std::string_view text) noexcept {
  const RunningCall running = find_running(r, call.session, call.number);
  if (running.slot == nullptr) return Status::not_connected;
  ConnectionServerSlot& v = *running.slot;
  const auto* const data = reinterpret_cast<const std::byte*>(text.data());
  const Status built = build_reply_message(r, v, Status::refused, data, text.size(), nullptr, code);
  if (built != Status::ok) return refuse_reply_for_block(r, bytes_of_reply(text.size()));
  v.state = State::answering;
  advance_or_wait(r, *running.session->connection, *running.agent, v);
  return Status::ok;
}

void advance(Rpc& r, ConnectionServer& b) noexcept {
  agent::Agent* const a = agent_of(r, b);
  if (a == nullptr || !agent::is_ready(*a)) return;
  bool has_sent = false;
  while (b.waiting != 0) {
    const auto ahead = std::countr_zero(std::rotr(b.waiting, static_cast<int>(b.next_slot)));
    const std::uint32_t slot = (b.next_slot + static_cast<std::uint32_t>(ahead)) % kWindowMax;
    if (!advance_slot(r, *a, b.slots[slot])) return wait_for_turn(r, b, has_sent);
    has_sent = true;
    b.waiting &= ~bit(slot);
    b.next_slot = slot + 1;
  }
  agent::set_owes_replies(*a, false);
}

}  // namespace spinwire::rpc
