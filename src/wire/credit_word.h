// The word that an engine writes into its peer's credit cell, 8 bytes at once: what it has granted,
// and a sign that it polls. Other peers of that engine may find the cell's key, so the word carries
// the token that the cell's owner gave to this peer alone.
//
//   bits 0 … 23   granted   low bits of the total of messages granted
//   bits 24 … 31  beat      changes with each write
//   bits 32 … 63  token     Endpoint::control_token of the cell's owner
#pragma once

#include <cstdint>

namespace spinwire::wire {

struct CreditWord {
  std::uint32_t granted = 0;
  std::uint8_t beat = 0;
  std::uint32_t token = 0;
};

constexpr std::uint64_t encode(const CreditWord& w) noexcept {
  return (w.granted & 0xffffff) | std::uint64_t{w.beat} << 24 | std::uint64_t{w.token} << 32;
}
constexpr CreditWord decode_credit_word(std::uint64_t word) noexcept {
  return {static_cast<std::uint32_t>(word & 0xffffff), static_cast<std::uint8_t>(word >> 24),
          static_cast<std::uint32_t>(word >> 32)};
}
/// What the word grants beyond a known total. Half of the range and more: the word is older.
constexpr std::uint32_t grants_since(const CreditWord& w, std::uint32_t known) noexcept {
  return (w.granted - known) & 0xffffff;
}
inline constexpr std::uint32_t kGrantsRange = 1u << 24;

}  // namespace spinwire::wire
