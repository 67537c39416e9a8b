// Memory to write a reply into, before it is sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "rpc/rpc.h"

namespace spinwire::rpc {

/// Memory of the call's slot to write a reply into; empty if there is none.
std::span<std::byte> reserve_reply(Rpc& r, std::uint32_t session, std::uint32_t number,
                                   std::size_t size) noexcept;
/// Prepares a reply buffer in a block of `most` bytes, at `offset`.
std::span<std::byte> prepare_reply_buffer(Rpc& r, ReplyBuffer& space, std::uint32_t number,
                                          std::size_t size, std::size_t most,
                                          std::size_t offset) noexcept;
/// A reserved reply.
struct ReservedReply {
  Block* block = nullptr;
  const std::byte* data = nullptr;
};
/// The memory that the call reserved; no block if it reserved less than `size` bytes.
ReservedReply find_reserved_reply(Rpc& r, std::uint32_t session, std::uint32_t number,
                                  std::size_t size) noexcept;

}  // namespace spinwire::rpc
