// What both ends of the connections for long calls have in common.
#include "rpc/transport/connection_transport.h"

#include <fmt/format.h>

#include <cstring>

#include "agent/submit.h"
#include "base/error.h"
#include "rpc/transport/connection_call.h"

namespace spinwire::rpc {

agent::Attributes connection_attributes(const agent::EngineContext& s) noexcept {
  agent::Attributes attributes = s.attributes;
  attributes.leases.count = 0;
  return attributes;
}

void queue_connection(Rpc& r, ConnectionEnd& e) noexcept {
  if (e.queued) return;
  e.queued = true;
  e.next_queued = nullptr;
  (r.queue_first == nullptr ? r.queue_first : r.queue_last->next_queued) = &e;
  r.queue_last = &e;
}

void unqueue_connection(Rpc& r, ConnectionEnd& e) noexcept {
  if (!e.queued) return;
  ConnectionEnd* before = nullptr;
  for (ConnectionEnd* at = r.queue_first; at != &e; at = at->next_queued) before = at;
  (before == nullptr ? r.queue_first : before->next_queued) = e.next_queued;
  if (r.queue_last == &e) r.queue_last = before;
  e.queued = false;
}

void run_connection_queue(Rpc& r) noexcept {
  // Each has a turn; those that still cannot go on line up again. Callbacks may end any of them.
  std::uint32_t most = r.clients.size() + r.servers.size();
  for (; most != 0 && r.queue_first != nullptr; --most) {
    ConnectionEnd& e = *r.queue_first;
    r.queue_first = e.next_queued;
    e.queued = false;
    e.is_server ? (void)advance(r, static_cast<ConnectionServer&>(e))
                : (void)advance(r, static_cast<ConnectionClient&>(e));
  }
  agent::flush_all(r.context);
}

void post_connection_queue(Rpc& r) noexcept {
  for (ConnectionEnd* e = r.queue_first; e != nullptr; e = e->next_queued) {
    if (!e->is_server) post_calls(r, static_cast<ConnectionClient&>(*e));
  }
}

Block* block_to_send(Rpc& r, std::size_t size) noexcept {
  memory::Arena& arena = *r.context.arena;
  Block* const block = arena.allocate(memory::PoolId::send, size);
  if (block != nullptr || size > kReservedMessageBytes) return block;
  return arena.allocate(memory::PoolId::control, size);
}

Status send_message(Rpc& r, agent::Agent& a, const wire::RpcMessageHeader& header,
                    std::span<const std::byte> payload) noexcept {
  const std::size_t size = wire::kRpcMessageHeaderBytes + payload.size();
  Block* const block = block_to_send(r, size);
  if (block == nullptr) return Status::no_buffer;
  const Buffer message(block, size);
  const auto bytes = wire::encode(header);
  std::memcpy(message.data(), bytes.data(), bytes.size());
  if (!payload.empty()) std::memcpy(message.data() + bytes.size(), payload.data(), payload.size());
  return agent::submit_message(r.context, a, block, message.data(), size, {}, true);
}

void fail_protocol(Rpc& r, agent::Agent& a, const char* found) noexcept {
  ++r.stats.bad_bulk;
  agent::fail_bad(r.context, a,
                  {Status::protocol, "take a message about a long call", found,
                   "the peer is broken or hostile"});
}

namespace {

tl::unexpected<Error> connection_audit_error(std::string found) {
  return base::fail(Status::system, "audit the long calls", std::move(found),
                    "a defect of the library, or memory that something has overwritten");
}

/// Empty: all is as it should be.
std::string find_fault(const Rpc& r, const ConnectionClient& b) {
  const agent::Agent* const a = agent_of(r, b);
  std::uint32_t key_open = 0;
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    const ConnectionClientSlot& k = b.slots[slot];
    const bool active = is_active(b, slot);
    if (k.number % b.window != slot) return fmt::format("slot {} has call {}", slot, k.number);
    if (active != static_cast<bool>(k.call.done))
      return fmt::format("slot {} is free and has a callback, or lacks one", slot);
    if (!active && (k.key_open || k.request_in_flight || k.reply_message || k.call.reply))
      return fmt::format("slot {} is free and holds memory", slot);
    if (active && a == nullptr) return fmt::format("slot {} has no connection", slot);
    key_open += k.key_open ? 1 : 0;
  }
  if (a != nullptr && a->leases.lent != key_open)
    return fmt::format("{} replies have keys, the connection has {}", key_open, a->leases.lent);
  if (b.backlog_count > r.context.config.rpc.backlog)
    return fmt::format("{} calls wait", b.backlog_count);
  return {};
}

std::string find_fault(const Rpc& r, const ConnectionServer& b) {
  if (agent_of(r, b) == nullptr) return "its connection is gone";
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    const ConnectionServerSlot& v = b.slots[slot];
    if ((v.state == ConnectionServerSlot::State::answering) != (v.block != nullptr))
      return fmt::format("slot {} has an answer that nobody waits for, or none", slot);
  }
  return {};
}

}  // namespace

Result<void> audit_connections(Rpc& r) {
  std::uint32_t due = 0;
  std::uint32_t connections_wanted = 0;
  for (std::uint32_t i = 0; i < r.clients.capacity(); ++i) {
    if (!r.clients.in_use(i) || r.clients.at(i).connection == nullptr) continue;
    const ConnectionClient& b = *r.clients.at(i).connection;
    if (auto fault = find_fault(r, b); !fault.empty())
      return connection_audit_error(fmt::format("session {}: {}", i, fault));
    due += b.queued ? 1 : 0;
    connections_wanted += b.wants_connection ? 1 : 0;
  }
  for (std::uint32_t i = 0; i < r.servers.capacity(); ++i) {
    if (!r.servers.in_use(i) || r.servers.at(i).connection == nullptr) continue;
    const ConnectionServer& b = *r.servers.at(i).connection;
    if (auto fault = find_fault(r, b); !fault.empty())
      return connection_audit_error(fmt::format("served session {}: {}", i, fault));
    due += b.queued ? 1 : 0;
  }
  std::uint32_t is_blocked = 0;
  for (const ConnectionEnd* e = r.queue_first; e != nullptr && is_blocked <= due;
       e = e->next_queued)
    ++is_blocked;
  if (is_blocked != due)
    return connection_audit_error(fmt::format("{} sessions are due, {} listed", due, is_blocked));
  if (connections_wanted != r.connections_wanted)
    return connection_audit_error(
        fmt::format("{} want a connection, {} counted", connections_wanted, r.connections_wanted));
  return {};
}

}  // namespace spinwire::rpc
