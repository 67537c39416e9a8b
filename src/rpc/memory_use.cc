#include "rpc/memory_use.h"

#include "rpc/backlog.h"
#include "rpc/rpc_state.h"
#include "rpc/transport/connection_call.h"

namespace spinwire::rpc {
namespace {

using agent::MemorySearch;
using agent::MemoryUse;

/// A copied payload is in memory of the library.
void see_payload(MemorySearch& search, const Payload& payload, std::size_t size) noexcept {
  if (payload.block != nullptr && payload.in.is_copy == 0)
    search.see(payload.in.data, size, MemoryUse::read);
}

void see_long_call(MemorySearch& search, const ConnectionCall& call) noexcept {
  see_payload(search, call.payload, call.size);
  search.see(call.reply.data(), call.reply.size(), MemoryUse::changed);
}

void see_client(MemorySearch& search, const ClientSession& c) noexcept {
  for (std::uint32_t slot = 0; slot < c.window; ++slot)
    see_payload(search, c.slots[slot].payload, c.slots[slot].size);
  for (std::uint32_t i = 0; i < c.backlog_count; ++i) {
    const BackloggedCall& call = backlog_at(c, i);
    see_payload(search, call.payload, call.size);
  }
  const ConnectionClient* const b = c.connection.get();
  if (b == nullptr) return;
  for (std::uint32_t slot = 0; slot < b->window; ++slot) {
    if (is_active(*b, slot)) see_long_call(search, b->slots[slot].call);
  }
  for (std::uint32_t i = 0; i < b->backlog_count; ++i) see_long_call(search, backlog_at(*b, i));
}

void see_server(MemorySearch& search, const ServerSession& s) noexcept {
  for (std::uint32_t slot = 0; slot < s.window; ++slot)
    see_payload(search, s.slots[slot].payload, s.slots[slot].size);
  const ConnectionServer* const b = s.connection.get();
  if (b == nullptr) return;
  for (std::uint32_t slot = 0; slot < b->window; ++slot) {
    const BufferSlice& reply = b->slots[slot].reply;
    search.see(reply.data(), reply.size(), MemoryUse::read);
  }
}

}  // namespace

void see_calls(Rpc& r, MemorySearch& search) noexcept {
  r.clients.for_each([&](const ClientSession& c) { see_client(search, c); });
  r.servers.for_each([&](const ServerSession& s) { see_server(search, s); });
  if (r.port == nullptr) return;
  // The slots of these datagrams may be free: the answer came before the device's completion.
  r.port->for_each_held_block(
      [&](const Block& block) { search.see(block.payload, block.capacity, MemoryUse::read); });
}

}  // namespace spinwire::rpc
