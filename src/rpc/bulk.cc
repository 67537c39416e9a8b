// What both ends of the connections for long calls have in common.
#include "rpc/bulk.h"

#include <fmt/format.h>

#include <cstring>

#include "agent/submit.h"
#include "base/error.h"
#include "rpc/bulk_call.h"

namespace spinwire::rpc {

agent::Attributes bulk_attributes(const agent::EngineContext& s) noexcept {
  agent::Attributes attributes = s.attributes;
  attributes.leases.count = 0;
  return attributes;
}

void make_due(Rpc& r, BulkEnd& e) noexcept {
  if (e.due) return;
  e.due = true;
  e.next_due = nullptr;
  (r.due_first == nullptr ? r.due_first : r.due_last->next_due) = &e;
  r.due_last = &e;
}

void forget_due(Rpc& r, BulkEnd& e) noexcept {
  if (!e.due) return;
  BulkEnd* before = nullptr;
  for (BulkEnd* at = r.due_first; at != &e; at = at->next_due) before = at;
  (before == nullptr ? r.due_first : before->next_due) = e.next_due;
  if (r.due_last == &e) r.due_last = before;
  e.due = false;
}

void pump_due(Rpc& r) noexcept {
  // Each has a turn; those that still cannot go on line up again. Callbacks may end any of them.
  std::uint32_t most = r.clients.size() + r.servers.size();
  for (; most != 0 && r.due_first != nullptr; --most) {
    BulkEnd& e = *r.due_first;
    r.due_first = e.next_due;
    e.due = false;
    e.serves ? (void)pump_bulk(r, static_cast<BulkServer&>(e))
             : (void)pump_bulk(r, static_cast<BulkClient&>(e));
  }
  agent::flush_all(r.context);
}

void post_due(Rpc& r) noexcept {
  for (BulkEnd* e = r.due_first; e != nullptr; e = e->next_due) {
    if (!e->serves) post_bulk(r, static_cast<BulkClient&>(*e));
  }
}

Block* block_to_send(Rpc& r, std::size_t size) noexcept {
  memory::Arena& arena = *r.context.arena;
  Block* const block = arena.allocate(memory::PoolId::send, size);
  if (block != nullptr || size > kLeastMessage) return block;
  return arena.allocate(memory::PoolId::control, size);
}

Status send_bulk(Rpc& r, agent::Agent& a, const wire::BulkHeader& header,
                 std::span<const std::byte> payload) noexcept {
  const std::size_t size = wire::kBulkHeaderBytes + payload.size();
  Block* const block = block_to_send(r, size);
  if (block == nullptr) return Status::no_buffer;
  const Buffer message(block, size);
  const auto bytes = wire::encode(header);
  std::memcpy(message.data(), bytes.data(), bytes.size());
  if (!payload.empty()) std::memcpy(message.data() + bytes.size(), payload.data(), payload.size());
  return agent::submit_message(r.context, a, block, message.data(), size, {}, true);
}

void bulk_protocol_error(Rpc& r, agent::Agent& a, const char* found) noexcept {
  ++r.stats.bad_bulk;
  agent::fail_bad(r.context, a,
                  {Status::protocol, "take a message about a long call", found,
                   "the peer is broken or hostile"});
}

namespace {

tl::unexpected<Error> wrong_bulk(std::string found) {
  return base::fail(Status::system, "audit the long calls", std::move(found),
                    "a defect of the library, or memory that something has overwritten");
}

/// Empty: all is as it should be.
std::string fault_of(const Rpc& r, const BulkClient& b) {
  const agent::Agent* const a = agent_of(r, b);
  std::uint32_t exposed = 0;
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    const BulkCall& k = b.calls[slot];
    const bool active = is_active(b, slot);
    if (k.number % b.window != slot) return fmt::format("slot {} has call {}", slot, k.number);
    if (active != static_cast<bool>(k.asked.done))
      return fmt::format("slot {} is free and has a callback, or lacks one", slot);
    if (!active && (k.exposed || k.pulled_from || k.message || k.asked.reply))
      return fmt::format("slot {} is free and holds memory", slot);
    if (active && a == nullptr) return fmt::format("slot {} has no connection", slot);
    exposed += k.exposed ? 1 : 0;
  }
  if (a != nullptr && a->leases.lent != exposed)
    return fmt::format("{} replies have keys, the connection has {}", exposed, a->leases.lent);
  if (b.waiting_count > r.context.config.rpc.backlog)
    return fmt::format("{} calls wait", b.waiting_count);
  return {};
}

std::string fault_of(const Rpc& r, const BulkServer& b) {
  if (agent_of(r, b) == nullptr) return "its connection is gone";
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    const BulkService& v = b.services[slot];
    if ((v.state == BulkService::State::answering) != (v.block != nullptr))
      return fmt::format("slot {} has an answer that nobody waits for, or none", slot);
  }
  return {};
}

}  // namespace

Result<void> audit_bulk(Rpc& r) {
  std::uint32_t due = 0;
  std::uint32_t wanting = 0;
  for (std::uint32_t i = 0; i < r.clients.capacity(); ++i) {
    if (!r.clients.in_use(i) || r.clients.at(i).bulk == nullptr) continue;
    const BulkClient& b = *r.clients.at(i).bulk;
    if (auto fault = fault_of(r, b); !fault.empty())
      return wrong_bulk(fmt::format("session {}: {}", i, fault));
    due += b.due ? 1 : 0;
    wanting += b.wants ? 1 : 0;
  }
  for (std::uint32_t i = 0; i < r.servers.capacity(); ++i) {
    if (!r.servers.in_use(i) || r.servers.at(i).bulk == nullptr) continue;
    const BulkServer& b = *r.servers.at(i).bulk;
    if (auto fault = fault_of(r, b); !fault.empty())
      return wrong_bulk(fmt::format("served session {}: {}", i, fault));
    due += b.due ? 1 : 0;
  }
  std::uint32_t listed = 0;
  for (const BulkEnd* e = r.due_first; e != nullptr && listed <= due; e = e->next_due) ++listed;
  if (listed != due) return wrong_bulk(fmt::format("{} sessions are due, {} listed", due, listed));
  if (wanting != r.wanting)
    return wrong_bulk(fmt::format("{} want a connection, {} counted", wanting, r.wanting));
  return {};
}

}  // namespace spinwire::rpc
