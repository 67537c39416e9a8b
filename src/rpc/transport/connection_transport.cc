// Transport::connection: functions that both ends of a session's connection share.
#include "rpc/transport/connection_transport.h"

#include <cstring>

#include "agent/submit.h"
#include "base/error.h"
#include "base/internals.h"
#include "rpc/transport/connection_call.h"

namespace spinwire::rpc {

using Turn = ConnectionEnd::Turn;

config::ConnectionAttributes connection_attributes(const agent::EngineContext& ctx) noexcept {
  config::ConnectionAttributes attributes = ctx.attributes;
  attributes.leases.count = 0;
  return attributes;
}

bool is_connection_of(const Rpc& r, const ConnectionEnd& e, const Connection& named) noexcept {
  return e.agent && agent::handle(r.context, e.agent) == named;
}

void attach(ConnectionEnd& e, agent::Agent& a, const ConnectionHandlers& handlers) noexcept {
  e.agent = agent::id_of(a);
  agent::give_to_calls(a, handlers);
}

ConnectionEnd*& next_queued(ConnectionEnd& end) noexcept { return end.links.next; }
base::IntrusiveLinks<ConnectionEnd>& blocked_links(ConnectionEnd& end) noexcept {
  return end.links;
}
base::IntrusiveLinks<ConnectionClient>& request_links(ConnectionClient& client) noexcept {
  return client.request_links;
}

void queue_connection(Rpc& r, ConnectionEnd& e) noexcept {
  r.may_have_deferred_work = true;
  if (e.turn == Turn::due) return;
  unqueue_connection(r, e);
  e.turn = Turn::due;
  r.connection_queue.push_back(e);
}

void wait_for_turn(Rpc& r, ConnectionEnd& e, bool has_sent) noexcept {
  if (has_sent) return queue_connection(r, e);
  r.may_have_deferred_work = true;
  if (e.turn != Turn::none) return;
  e.turn = Turn::blocked;
  r.blocked_connections.push_back(e);
}

void unqueue_connection(Rpc& r, ConnectionEnd& e) noexcept {
  const Turn turn = std::exchange(e.turn, Turn::none);
  if (turn == Turn::due) r.connection_queue.erase(e);
  if (turn == Turn::blocked) r.blocked_connections.erase(e);
}

void run_connection_queue(Rpc& r) noexcept {
  for (std::uint32_t i = 0; i < kBlockedPerPoll && !r.blocked_connections.empty(); ++i)
    queue_connection(r, *r.blocked_connections.front());
  // Callbacks may end any connection. One that still has to wait is queued again, for a later poll.
  r.connection_queue.run_round([&r](ConnectionEnd& e) {
    e.turn = Turn::none;
    e.is_server ? advance(r, static_cast<ConnectionServer&>(e))
                : advance(r, static_cast<ConnectionClient&>(e));
  });
  agent::flush_queued_agents(r.context);
}

void post_connection_queue(Rpc& r) noexcept {
  // A connection that is queued already keeps its place.
  r.connection_queue.for_each([&r](ConnectionEnd& e) {
    if (!e.is_server) post_calls(r, static_cast<ConnectionClient&>(e));
    return true;
  });
}

Block* block_to_send(Rpc& r, std::size_t size) noexcept {
  memory::Arena& arena = *r.context.arena;
  Block* const block = arena.allocate(memory::PoolId::send, size);
  if (block != nullptr || size > kReservedMessageBytes) return block;
  return arena.allocate(memory::PoolId::control, size);
}

Status send_message(Rpc& r, agent::Agent& a, const wire::RpcMessageHeader& header,
                    std::span<const std::byte> payload) noexcept {
  if (agent::is_ready(a) && !agent::has_credit(r.context, a)) return Status::would_block;
  const std::size_t size = wire::kRpcMessageHeaderBytes + payload.size();
  Block* const block = block_to_send(r, size);
  if (block == nullptr) return Status::no_buffer;
  const Buffer message = detail::make<Buffer>(block, size);
  const auto bytes = wire::encode(header);
  std::memcpy(message.data(), bytes.data(), bytes.size());
  if (!payload.empty()) std::memcpy(message.data() + bytes.size(), payload.data(), payload.size());
  return agent::submit_message<false>(r.context, a, block, message.data(), size, {}, false, true);
}

void fail_protocol(Rpc& r, agent::Agent& a, const char* found) noexcept {
  ++r.stats.bad_long_calls;
  agent::fail_protocol(
      r.context, a,
      {Status::protocol, "take a message about a long call", found, base::kProtocolRemedy});
}

}  // namespace spinwire::rpc
