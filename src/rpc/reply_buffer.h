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
std::span<std::byte> reserve_reply(Rpc& r, CallRef call, std::size_t size) noexcept;
/// A reserved reply.
struct ReservedReply {
  Block* block = nullptr;
  const std::byte* data = nullptr;
};
/// The memory that a running call reserved; no block if it reserved less than `size` bytes.
ReservedReply find_reserved_reply(Rpc& r, CallRef call, std::size_t size) noexcept;

}  // namespace spinwire::rpc
