// Names of what the control port watches: the tokens of its epoll set, and the contexts of
// rdma_cm's identifiers.
#pragma once

#include <cstdint>

namespace spinwire::control {

enum class TokenKind : std::uint64_t { handshake, listener, descriptor, cm };

/// The bits of a generation that a token carries.
inline constexpr std::uint32_t kGenerationBits = 0x3fffffff;

/// A kind, a generation, an index.
constexpr std::uint64_t token(TokenKind kind, std::uint32_t index,
                              std::uint32_t generation = 0) noexcept {
  return static_cast<std::uint64_t>(kind) << 62 |
         std::uint64_t{generation & kGenerationBits} << 32 | index;
}
constexpr TokenKind kind_of(std::uint64_t token) noexcept {
  return static_cast<TokenKind>(token >> 62);
}
constexpr std::uint32_t generation_of(std::uint64_t token) noexcept {
  return static_cast<std::uint32_t>(token >> 32) & kGenerationBits;
}

/// The context of an rdma_cm identifier: its owner's subject or, with this bit, a listener's index
/// and generation as in a token.
inline constexpr std::uint64_t kCmListenerBit = std::uint64_t{1} << 63;
inline void* cm_context(std::uint64_t value) noexcept { return reinterpret_cast<void*>(value); }

}  // namespace spinwire::control
