// A region of a peer's memory as bytes that applications pass on.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace spinwire::wire {

inline constexpr std::size_t kTokenBytes = 48;
/// 48 bits, of milliseconds: enough for some thousand years.
inline constexpr std::uint64_t kLatestTokenDeadline = (std::uint64_t{1} << 48) - 1;

struct Token {
  std::uint64_t address = 0;
  std::uint64_t length = 0;
  std::uint64_t incarnation = 0;  ///< of the owner's engine
  std::uint32_t rkey = 0;
  std::uint32_t qp_num = 0;  ///< the owner's, if the key is bound to that queue pair; else 0
  std::uint8_t access = 0;
  /// Milliseconds of the system's clock since 1970, or of a manual clock; at most
  /// kLatestTokenDeadline. 0: none. A token with a deadline has another version, which older
  /// releases refuse.
  std::uint64_t deadline = 0;
};

std::array<std::byte, kTokenBytes> encode(const Token& token) noexcept;
/// False if the token is malformed: of another size or version, damaged, without bytes, key or
/// rights, beyond the end of memory, or without the deadline of its version.
bool decode(std::span<const std::byte> bytes, Token& token) noexcept;

}  // namespace spinwire::wire
