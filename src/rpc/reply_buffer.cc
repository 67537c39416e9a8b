// Memory of a slot for building a reply: reserve_reply() and commit_reply().
#include "rpc/reply_buffer.h"

#include <algorithm>
#include <new>

#include "rpc/room_for_calls.h"
#include "rpc/server_session.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::rpc {
namespace {

ReplyPlace reply_place(Rpc& r, CallRef call) noexcept {
  ServerSession* s = r.current_call.session;
  const ServerSlot* v = r.current_call.slot;
  if (!is_same(r.current_call.call, call)) [[unlikely]] {
    if (call.transport == Transport::connection) return reply_place_on_connection(r, call);
    s = find_server(r, call.session);
    v = s != nullptr ? find_slot(*s, call.number) : nullptr;
  }
  if (v == nullptr || v->state != ServerSlotState::running) return {};
  return {&s->reply_buffers, s->window, wire::rpc_payload(s->longest_datagram), 0};
}

}  // namespace

std::size_t max_reply(Rpc& r, CallRef call) noexcept { return reply_place(r, call).longest; }

std::span<std::byte> reserve_reply_anew(Rpc& r, CallRef call, std::size_t size) noexcept {
  const ReplyPlace place = reply_place(r, call);
  if (place.buffers == nullptr || size > place.longest) return {};
  if (*place.buffers == nullptr) place.buffers->reset(new (std::nothrow) ReplyBuffer[place.window]);
  if (*place.buffers == nullptr) return {};
  ReplyBuffer& buffer = (*place.buffers)[call.number & (place.window - 1)];
  // The last reply may still be in the send queue, or have been shorter.
  const std::size_t bytes = place.offset + std::max<std::size_t>(size, 1);
  if (buffer.block != nullptr && (buffer.block->refs != 1 || buffer.block->capacity < bytes))
    release_reply_buffer(buffer);
  if (buffer.block == nullptr)
    buffer.block = r.context.arena->allocate(memory::PoolId::send, bytes);
  if (buffer.block == nullptr)
    return (void)refuse_reply_for_block(r, bytes), std::span<std::byte>();
  buffer.number = call.number;
  buffer.size = static_cast<std::uint32_t>(size);
  return {buffer.block->payload + place.offset, size};
}

ReservedReply look_up_reserved_reply(Rpc& r, CallRef call, std::size_t size) noexcept {
  const ReplyPlace place = reply_place(r, call);
  if (place.buffers == nullptr || *place.buffers == nullptr) return {};
  const ReplyBuffer& buffer = (*place.buffers)[call.number & (place.window - 1)];
  if (buffer.number != call.number || buffer.block == nullptr || size > buffer.size) return {};
  return {buffer.block, buffer.block->payload + place.offset};
}

}  // namespace spinwire::rpc
