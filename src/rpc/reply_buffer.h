// The memory of a call's reply: what fits, and buffers for building a reply before it is sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// Where the reply of a running call is built.
struct ReplyPlace {
  std::unique_ptr<ReplyBuffer[]>* buffers = nullptr;  ///< null: the call is over, or names memory
  std::uint32_t window = 0;
  std::size_t longest = 0;  ///< bytes of a reply
  std::size_t offset = 0;   ///< of the reply in its block
};
/// The longest reply to a call; 0 if the call is over.
std::size_t max_reply(Rpc& r, CallRef call) noexcept;
/// Memory of the call's slot for its reply; empty if there is none.
std::span<std::byte> reserve_reply_anew(Rpc& r, CallRef call, std::size_t size) noexcept;
/// A reserved reply.
struct ReservedReply {
  Block* block = nullptr;
  const std::byte* data = nullptr;
};
/// The memory that a running call reserved; no block if it reserved less than `size` bytes.
ReservedReply look_up_reserved_reply(Rpc& r, CallRef call, std::size_t size) noexcept;

// Most replies are built in the handler of an inline call, in the memory that the slot's last reply
// had. Hot.

/// The reply buffer of an inline call whose handler runs; null for any other call, and before the
/// session's first reserve_reply().
[[gnu::always_inline]] inline ReplyBuffer* running_reply_buffer(const Rpc& r,
                                                                CallRef call) noexcept {
  const ServerSession* const s = r.current_call.session;
  if (!is_same(r.current_call.call, call) || s == nullptr || s->reply_buffers == nullptr)
      [[unlikely]]
    return nullptr;
  return &s->reply_buffers[call.number & (s->window - 1)];
}

[[gnu::always_inline]] inline std::span<std::byte> reserve_reply(Rpc& r, CallRef call,
                                                                 std::size_t size) noexcept {
  ReplyBuffer* const buffer = running_reply_buffer(r, call);
  if (buffer == nullptr || buffer->block == nullptr || buffer->block->refs != 1 ||
      size > buffer->block->capacity ||
      size > wire::rpc_payload(r.current_call.session->longest_datagram) ||
      r.current_call.slot->state != ServerSlotState::running) [[unlikely]] {
    return reserve_reply_anew(r, call, size);
  }
  buffer->number = call.number;
  buffer->size = static_cast<std::uint32_t>(size);
  return {buffer->block->payload, size};
}

[[gnu::always_inline]] inline ReservedReply find_reserved_reply(Rpc& r, CallRef call,
                                                                std::size_t size) noexcept {
  const ReplyBuffer* const buffer = running_reply_buffer(r, call);
  if (buffer == nullptr || buffer->number != call.number || buffer->block == nullptr ||
      size > buffer->size || r.current_call.slot->state != ServerSlotState::running) [[unlikely]] {
    return look_up_reserved_reply(r, call, size);
  }
  return {buffer->block, buffer->block->payload};
}

}  // namespace spinwire::rpc
