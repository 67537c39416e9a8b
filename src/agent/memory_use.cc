#include "agent/memory_use.h"

#include <algorithm>

#include "agent/engine_context.h"
#include "agent/raw_queue.h"
#include "agent/rendezvous.h"

namespace spinwire::agent {
namespace {

/// The bytes in question, and the most that was found to be done with them.
class Search {
 public:
  explicit Search(std::span<const std::byte> bytes) noexcept
      : begin_(reinterpret_cast<std::uint64_t>(bytes.data())), end_(begin_ + bytes.size()) {}

  void see(std::uint64_t address, std::uint64_t length, MemoryUse use) noexcept {
    if (length != 0 && address < end_ && begin_ < address + length) found_ = std::max(found_, use);
  }
  void see(const ibv_sge* sges, int count, MemoryUse use) noexcept {
    for (int i = 0; i < count; ++i) see(sges[i].addr, sges[i].length, use);
  }
  void see(const std::byte* data, std::uint64_t length, MemoryUse use) noexcept {
    see(reinterpret_cast<std::uint64_t>(data), length, use);
  }
  [[nodiscard]] MemoryUse found() const noexcept { return found_; }

 private:
  std::uint64_t begin_;
  std::uint64_t end_;
  MemoryUse found_ = MemoryUse::none;
};

/// Whether the operation's elements name memory of the application. A message that was sent without
/// a work request, or copied beside its header, has none; windows and atomics have none either.
bool names_memory(const Operation& op) noexcept {
  const OperationKind kind = op.kind == OperationKind::cancelled ? op.was : op.kind;
  const bool message = kind == OperationKind::send || kind == OperationKind::send_imm;
  return op.block != nullptr && !(message && !op.header_in_headroom && op.wr.num_sge == 1);
}

/// `last` of a list that does not end with null.
void see_list(Search& search, const Operation* first, const Operation* last = nullptr) noexcept {
  for (const Operation* op = first; op != nullptr; op = op == last ? nullptr : op->next()) {
    const OperationKind kind = op->kind == OperationKind::cancelled ? op->was : op->kind;
    const bool reads = kind == OperationKind::read || kind == OperationKind::rendezvous_read;
    if (names_memory(*op) || op->wr.sg_list != op->sges)
      search.see(op->wr.sg_list, op->wr.num_sge, reads ? MemoryUse::changed : MemoryUse::read);
  }
}

void see_raw(Search& search, RawQueue& queue) noexcept {
  for (std::uint32_t i = queue.completed; i != queue.accepted; ++i) {
    const ibv_recv_wr& wr = queue.slot(i).wr;
    search.see(wr.sg_list, wr.num_sge, MemoryUse::changed);
  }
}

void see_rendezvous(Search& search, Agent& a) noexcept {
  for (const RendezvousSend& send : a.rendezvous.sends)
    search.see(send.block->payload, send.block->capacity, MemoryUse::read);
  for (const RendezvousReceive& receive : a.rendezvous.receives) {
    if (receive.kind == RendezvousReceive::Kind::rendezvous && receive.block != nullptr)
      search.see(receive.data, receive.length, MemoryUse::changed);
  }
}

}  // namespace

MemoryUse memory_use(EngineContext& ctx, std::span<const std::byte> bytes) noexcept {
  Search search(bytes);
  for (Agent& a : ctx.agents) {
    see_list(search, a.send_queue.posted);
    see_list(search, a.send_queue.deferred, a.send_queue.deferred_last);
    see_rendezvous(search, a);
    if (a.raw != nullptr) see_raw(search, *a.raw);
  }
  return search.found();
}

}  // namespace spinwire::agent
