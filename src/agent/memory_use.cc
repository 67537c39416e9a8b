#include "agent/memory_use.h"

#include "agent/engine_context.h"
#include "agent/raw_queue.h"
#include "agent/rendezvous.h"

namespace spinwire::agent {
namespace {

/// Whether the operation's elements name memory of the application. A message that was sent without
/// a work request, or copied beside its header, has none; windows and atomics have none either.
bool names_memory(const Operation& op) noexcept {
  const OperationKind kind = op.kind == OperationKind::cancelled ? op.was : op.kind;
  const bool message = kind == OperationKind::send || kind == OperationKind::send_imm;
  return op.block != nullptr && !(message && !op.header_in_headroom && op.wr.num_sge == 1);
}

/// `last` of a list that does not end with null.
void see_list(MemorySearch& search, const Operation* first,
              const Operation* last = nullptr) noexcept {
  for (const Operation* op = first; op != nullptr; op = op == last ? nullptr : op->next()) {
    const OperationKind kind = op->kind == OperationKind::cancelled ? op->was : op->kind;
    const bool reads = kind == OperationKind::read || kind == OperationKind::rendezvous_read;
    if (names_memory(*op) || op->wr.sg_list != op->sges)
      search.see(op->wr.sg_list, op->wr.num_sge, reads ? MemoryUse::changed : MemoryUse::read);
  }
}

void see_raw(MemorySearch& search, RawQueue& queue) noexcept {
  for (std::uint32_t i = queue.completed; i != queue.accepted; ++i) {
    const ibv_recv_wr& wr = queue.slot(i).wr;
    search.see(wr.sg_list, wr.num_sge, MemoryUse::changed);
  }
}

void see_rendezvous(MemorySearch& search, Agent& a) noexcept {
  for (const RendezvousSend& send : a.rendezvous.sends)
    search.see(send.block->payload, send.block->capacity, MemoryUse::read);
  for (const RendezvousReceive& receive : a.rendezvous.receives) {
    if (receive.kind == RendezvousReceive::Kind::rendezvous && receive.block != nullptr)
      search.see(receive.data, receive.length, MemoryUse::changed);
  }
}

}  // namespace

void see_operations(EngineContext& ctx, MemorySearch& search) noexcept {
  for (Agent& a : ctx.agents) {
    see_list(search, a.send_queue.posted);
    see_list(search, a.send_queue.deferred, a.send_queue.deferred_last);
    see_rendezvous(search, a);
    if (a.raw != nullptr) see_raw(search, *a.raw);
  }
}

}  // namespace spinwire::agent
