// The server's end of long calls: each runs its handler at most once, as nothing comes twice over a
// reliable connection, and is answered over the connection it came by.
#include <algorithm>
#include <cstring>

#include "agent/submit.h"
#include "rpc/bulk.h"

namespace spinwire::rpc {

namespace {

using wire::BulkHeader;
using wire::BulkKind;
using State = BulkService::State;

inline BulkService& service_of(BulkServer& b, std::uint32_t number) noexcept {
  return b.services[number & (b.window - 1)];
}

void drop_answer(BulkService& v) noexcept {
  if (v.block != nullptr) detail::release(std::exchange(v.block, nullptr));
}

/// The session of a connection's callback; null if that is not its connection any more.
ServerSession* session_of(Rpc& r, std::uint32_t name, const Connection& of) noexcept {
  ServerSession* const s = find_server(r, name);
  if (s == nullptr || s->bulk == nullptr) return nullptr;
  const agent::Agent* const a = agent_of(r, *s->bulk);
  return a != nullptr && agent::handle(r.context, *a) == of ? s : nullptr;
}

/// Into the client's memory, or as a message.
Status send_answer(Rpc& r, agent::Agent& a, const BulkService& v) noexcept {
  if (!v.write) {
    return agent::submit_message(r.context, a, v.block, v.data, v.size, {}, true);
  }
  return agent::submit_any<agent::OperationKind::write_imm>(
      r.context, a, {v.block, v.data, v.size, &v.reply, v.number, {}, true});
}

/// The answer as a message: header and payload in one block, which may be the call's `space`, where
/// the payload is already.
Status lay_out(Rpc& r, BulkService& v, Status status, const std::byte* data, std::size_t size,
               Block* space) noexcept {
  const std::size_t bytes = wire::kBulkHeaderBytes + size;
  Block* const block =
      space != nullptr ? space : r.context.arena->allocate(memory::PoolId::send, bytes);
  if (block == nullptr) return Status::no_buffer;
  BulkHeader header;
  header.number = v.number;
  header.kind = BulkKind::reply;
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
  v.write = false;
  return Status::ok;
}

/// What the library itself says.
Status lay_out_refusal(Rpc& r, BulkService& v) noexcept {
  const std::string_view text =
      v.refusal == Status::unsupported ? "no such method" : "the handler has not answered";
  const Status status = lay_out(r, v, v.refusal, reinterpret_cast<const std::byte*>(text.data()),
                                text.size(), nullptr);
  if (status == Status::ok) v.state = State::answering;
  return status;
}

/// False: it has to wait.
bool push_service(Rpc& r, agent::Agent& a, BulkService& v) noexcept {
  Status status = Status::ok;
  if (v.confirm) {
    status = send_bulk(r, a, {v.number, 0, BulkKind::cancelled}, {});
    if (!is_passing(status)) v.confirm = false;
    return !is_passing(status);
  }
  if (v.state == State::refusing) status = lay_out_refusal(r, v);
  if (v.state == State::answering) {
    status = send_answer(r, a, v);
    if (!is_passing(status)) {
      v.state = State::over;
      drop_answer(v);
    }
  }
  return !is_passing(status);
}

/// The answer as bytes for the client's memory.
Status refer(Rpc& r, BulkService& v, const std::byte* data, std::size_t size,
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
  v.write = true;
  return Status::ok;
}

/// Of those without memory of the client's.
std::size_t longest_reply(const ServerSession& s, const agent::Agent& a) noexcept {
  const std::uint32_t longest = std::max(a.max_message, a.longest_message);
  return std::min<std::size_t>(wire::rpc_payload(s.mtu), longest - wire::kBulkHeaderBytes);
}

/// The library's own answer, which nobody else would give if it got lost. The session may be gone.
void refuse_bulk(Rpc& r, std::uint32_t session, std::uint32_t number, Status status) noexcept {
  ServerSession* const s = find_server(r, session);
  agent::Agent* const a = s != nullptr && s->bulk != nullptr ? agent_of(r, *s->bulk) : nullptr;
  if (a == nullptr || a->state != ConnectionState::ready) return;
  BulkService& v = service_of(*s->bulk, number);
  if (v.number != number || v.state != State::running) return;
  v.state = State::refusing;
  v.refusal = status;
  if (!push_service(r, *a, v)) make_due(r, *s->bulk);
}

/// Runs the handler; the session may be gone afterwards.
void run_handler(Rpc& r, const ServerSession& s, BulkService& v, Message& m, const std::byte* data,
                 std::size_t size) noexcept {
  const std::uint32_t session = s.name;
  const std::uint32_t number = v.number;
  v.state = State::running;
  if (v.method >= r.handlers.size() || !r.handlers[v.method])
    return refuse_bulk(r, session, number, Status::unsupported);
  ++r.stats.served;
  Request request({&r, session | kBulkName, number}, v.method, m.block(),
                  const_cast<std::byte*>(data), size);
  r.handlers[v.method](request);
  if (!request.answered()) refuse_bulk(r, session, number, Status::refused);
  if (request.kept()) (void)m.take();  // the slices hold it now
}

void take_call(Rpc& r, ServerSession& s, agent::Agent& a, const BulkHeader& header, Message& m,
               std::span<const std::byte> payload) noexcept {
  BulkService& v = service_of(*s.bulk, header.number);
  const bool ahead = static_cast<std::int32_t>(header.number - v.number) > 0;
  if (v.state != State::none && !ahead)
    return bulk_protocol_error(r, a, "a call that was there before");
  if (header.size > r.context.config.connections.message_bytes)
    return bulk_protocol_error(r, a, "a request longer than connections.message_bytes");
  drop_answer(v);
  v.number = header.number;
  v.confirm = false;
  v.method = header.method;
  v.size = header.size;
  v.reply = {header.address, header.room, header.rkey, Access::remote_write};
  if (payload.size() == header.size) return run_handler(r, s, v, m, payload.data(), payload.size());
  const bool served = header.method < r.handlers.size() && r.handlers[header.method];
  v.state = served ? State::body : State::running;
  if (!served) refuse_bulk(r, s.name, header.number, Status::unsupported);
}

/// The request of a call whose header was there before.
void take_body(Rpc& r, ServerSession& s, agent::Agent& a, Message& m) noexcept {
  const std::uint32_t number = *m.immediate();
  BulkService& v = service_of(*s.bulk, number);
  if (v.state == State::none || static_cast<std::int32_t>(number - v.number) > 0)
    return bulk_protocol_error(r, a, "a request that no header was there for");
  if (number != v.number || v.state != State::body) {  // it is over
    ++r.stats.late;
    return;
  }
  if (m.size() != v.size) return bulk_protocol_error(r, a, "a request of another size than told");
  run_handler(r, s, v, m, m.data(), m.size());
}

void take_cancel(Rpc& r, ServerSession& s, agent::Agent& a, const BulkHeader& header) noexcept {
  BulkService& v = service_of(*s.bulk, header.number);
  if (v.state == State::none || header.number != v.number || v.confirm)
    return bulk_protocol_error(r, a, "a cancel of no call");
  drop_answer(v);
  v.state = State::over;
  v.confirm = true;
  if (!push_service(r, a, v)) make_due(r, *s.bulk);
}

void on_server_message(Rpc& r, std::uint32_t name, const Connection& from, Message& m) noexcept {
  ServerSession* const s = session_of(r, name, from);
  if (s == nullptr) return;
  agent::Agent& a = *agent_of(r, *s->bulk);
  s->last_heard = r.context.now;
  if (m.is_write()) return bulk_protocol_error(r, a, "a write to memory that it was not given");
  if (m.immediate()) return take_body(r, *s, a, m);
  BulkHeader header;
  std::span<const std::byte> payload;
  if (!wire::decode(m.bytes(), header, payload))
    return bulk_protocol_error(r, a, "a malformed one");
  switch (header.kind) {
    case BulkKind::call:
      return take_call(r, *s, a, header, m, payload);
    case BulkKind::cancel:
      return take_cancel(r, *s, a, header);
    default:
      return bulk_protocol_error(r, a, "one that only servers send");
  }
}

/// What nobody waits for is not pulled.
void on_server_offer(Rpc& r, std::uint32_t name, const Connection& from, Offer& offer) noexcept {
  ServerSession* const s = session_of(r, name, from);
  if (s == nullptr || !offer.immediate()) return offer.refuse();
  const BulkService& v = service_of(*s->bulk, *offer.immediate());
  // Its header may be held back behind an earlier request.
  if (v.number == *offer.immediate() && v.state == State::over) offer.refuse();
}

void on_server_closed(Rpc& r, std::uint32_t name, const Connection& gone,
                      const Error& why) noexcept {
  ServerSession* const s = find_server(r, name);
  if (s == nullptr || s->bulk == nullptr) return;
  BulkServer& b = *s->bulk;
  if (!(Connection(r.context.core, b.agent, b.agent_generation) == gone)) return;
  b.agent = kNone;
  // Without datagrams a client ends its session with its connection. One that has lost it comes
  // again, or is forgotten after a while.
  const bool over = why.status == Status::ok && !takes_datagrams(*s->route);
  over ? dismiss(r, *s) : dismiss_bulk(r, *s);
}

}  // namespace

void BulkDeleter::operator()(BulkServer* bulk) const noexcept {
  for (std::uint32_t i = 0; i < bulk->window; ++i) {
    drop_answer(bulk->services[i]);
    if (bulk->spaces != nullptr) drop_space(bulk->spaces[i]);
  }
  delete bulk;
}

ServerSession* find_joined(Rpc& r, const wire::JoinSession& join) noexcept {
  ServerSession* const s = find_server(r, join.session);
  const bool fits =
      s != nullptr && s->peer == join.name && s->route->to.qp_num == join.qp_num &&
      s->route->to.qkey == join.qkey &&
      std::memcmp(&s->route->gid, join.endpoint.gid.data(), sizeof s->route->gid) == 0;
  if (!fits) ++r.stats.bad_bulk;
  return fits ? s : nullptr;
}

void join_session(Rpc& r, ServerSession& s, agent::Agent& a) {
  std::unique_ptr<BulkServer, BulkDeleter> b(new BulkServer);
  b->services = std::make_unique<BulkService[]>(s.window);
  b->window = s.window;
  b->session = s.name;
  b->serves = true;
  b->agent = a.index;
  b->agent_generation = a.generation;
  dismiss_bulk(r, s);
  s.bulk = std::move(b);
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

void dismiss_bulk(Rpc& r, ServerSession& s) noexcept {
  if (s.bulk == nullptr) return;
  forget_due(r, *s.bulk);
  agent::Agent* const a = agent_of(r, *s.bulk);
  s.bulk.reset();
  if (a != nullptr && a->state != ConnectionState::draining) agent::close(r.context, *a);
}

std::size_t room_of(Rpc& r, std::uint32_t session, std::uint32_t number) noexcept {
  ServerSession* const s = find_server(r, session & ~kBulkName);
  if (s == nullptr) return 0;
  if ((session & kBulkName) == 0) {
    const Service& v = s->services[number & (s->window - 1)];
    const bool running = v.number == number && v.state == ServiceState::running;
    return running ? wire::rpc_payload(s->mtu) : 0;
  }
  const agent::Agent* const a = s->bulk != nullptr ? agent_of(r, *s->bulk) : nullptr;
  if (a == nullptr) return 0;
  const BulkService& v = service_of(*s->bulk, number);
  if (v.number != number || v.state != State::running) return 0;
  if (v.reply.length != 0) return std::min(v.reply.length, agent::kLongestTransfer);
  return longest_reply(*s, *a);
}

bool is_connected(const Rpc& r, const ServerSession& s) noexcept {
  const agent::Agent* const a = s.bulk != nullptr ? agent_of(r, *s.bulk) : nullptr;
  return a != nullptr && a->state == ConnectionState::ready;
}

std::span<std::byte> bulk_space(Rpc& r, std::uint32_t session, std::uint32_t number,
                                std::size_t size) noexcept {
  ServerSession* const s = find_server(r, session & ~kBulkName);
  const agent::Agent* const a =
      s != nullptr && s->bulk != nullptr ? agent_of(r, *s->bulk) : nullptr;
  if (a == nullptr) return {};
  BulkServer& b = *s->bulk;
  const BulkService& v = service_of(b, number);
  const std::size_t longest = longest_reply(*s, *a);
  const bool runs = v.number == number && v.state == State::running;
  if (!runs || v.reply.length != 0 || size > longest) return {};
  if (b.spaces == nullptr) b.spaces.reset(new (std::nothrow) Space[b.window]);
  if (b.spaces == nullptr) return {};
  return take_space(r, b.spaces[number & (b.window - 1)], number, size,
                    wire::kBulkHeaderBytes + longest, wire::kBulkHeaderBytes);
}

void drop_spaces(BulkServer& b) noexcept {
  for (std::uint32_t slot = 0; b.spaces != nullptr && slot < b.window; ++slot) {
    if (b.services[slot].state != State::running) drop_space(b.spaces[slot]);
  }
}

Written bulk_space_of(Rpc& r, std::uint32_t session, std::uint32_t number,
                      std::size_t size) noexcept {
  const ServerSession* const s = find_server(r, session & ~kBulkName);
  if (s == nullptr || s->bulk == nullptr || s->bulk->spaces == nullptr) return {};
  const Space& space = s->bulk->spaces[number & (s->window - 1)];
  if (space.number != number || space.block == nullptr || size > space.size) return {};
  return {space.block, space.block->payload + wire::kBulkHeaderBytes};
}

Status answer_bulk(Rpc& r, std::uint32_t session, std::uint32_t number, Status status,
                   const std::byte* data, std::size_t size, Block* block) noexcept {
  ServerSession* const s =
      (session & kBulkName) != 0 ? find_server(r, session & ~kBulkName) : nullptr;
  agent::Agent* const a = s != nullptr && s->bulk != nullptr ? agent_of(r, *s->bulk) : nullptr;
  if (a == nullptr || a->state != ConnectionState::ready) return Status::not_connected;
  BulkService& v = service_of(*s->bulk, number);
  if (v.number != number || v.state != State::running) return Status::not_connected;
  const bool write = status == Status::ok && v.reply.length != 0;
  if (status == Status::ok && size > room_of(r, session, number)) return Status::message_too_long;
  Block* const space = bulk_space_of(r, session, number, size).block;
  const Status kept = write ? refer(r, v, data, size, block)
                            : lay_out(r, v, status, data, size, block == space ? space : nullptr);
  if (kept != Status::ok) return kept;
  v.state = State::answering;
  if (!push_service(r, *a, v)) make_due(r, *s->bulk);
  return Status::ok;
}

bool pump_bulk(Rpc& r, BulkServer& b) noexcept {
  agent::Agent* const a = agent_of(r, b);
  if (a == nullptr || a->state != ConnectionState::ready) return true;
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    if (push_service(r, *a, b.services[slot])) continue;
    make_due(r, b);
    return false;
  }
  return true;
}

}  // namespace spinwire::rpc
