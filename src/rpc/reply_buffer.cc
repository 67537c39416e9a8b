// Memory of a slot that a handler writes its reply into: reserve_reply() and commit_reply().
#include "rpc/reply_buffer.h"

#include <new>

#include "rpc/rpc.h"
#include "rpc/server_session.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::rpc {

std::span<std::byte> reserve_reply(Rpc& r, std::uint32_t session, std::uint32_t number,
                                   std::size_t size) noexcept {
  if ((session & kConnectionCall) != 0) return reserve_on_connection(r, session, number, size);
  ServerSession* const s = find_server(r, session);
  if (s == nullptr) return {};
  const std::uint32_t slot = number & (s->window - 1);
  const ServerSlot& v = s->slots[slot];
  const std::uint32_t max_inline_call = wire::rpc_payload(s->mtu);
  if (v.number != number || v.state != ServerSlotState::running || size > max_inline_call)
    return {};
  if (s->reply_buffers == nullptr)
    s->reply_buffers.reset(new (std::nothrow) ReplyBuffer[s->window]);
  if (s->reply_buffers == nullptr) return {};
  return prepare_reply_buffer(r, s->reply_buffers[slot], number, size, max_inline_call, 0);
}

std::span<std::byte> prepare_reply_buffer(Rpc& r, ReplyBuffer& space, std::uint32_t number,
                                          std::size_t size, std::size_t most,
                                          std::size_t offset) noexcept {
  // The last reply may still be in the send queue.
  if (space.block != nullptr && space.block->refs != 1) release_reply_buffer(space);
  if (space.block == nullptr) space.block = r.context.arena->allocate(memory::PoolId::send, most);
  if (space.block == nullptr) return {};
  space.number = number;
  space.size = static_cast<std::uint32_t>(size);
  return {space.block->payload + offset, size};
}

ReservedReply find_reserved_reply(Rpc& r, std::uint32_t session, std::uint32_t number,
                                  std::size_t size) noexcept {
  if ((session & kConnectionCall) != 0)
    return find_reserved_on_connection(r, session, number, size);
  const ServerSession* const s = find_server(r, session);
  if (s == nullptr || s->reply_buffers == nullptr) return {};
  const ReplyBuffer& space = s->reply_buffers[number & (s->window - 1)];
  if (space.number != number || space.block == nullptr || size > space.size) return {};
  return {space.block, space.block->payload};
}

}  // namespace spinwire::rpc
