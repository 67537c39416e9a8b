// The word that an engine writes into its peer's credit cell, 8 bytes at once: what it has granted,
// and a sign that it polls.
//
//   bits 0 … 23   granted   low bits of the total of messages granted
//   bits 24 … 31  sequence  changes with each write
//   bits 32 … 63  proof     of bits 0 … 31, under the token
//
// On some devices other peers of the cell's owner can write the cell, too. They can neither read it
// nor know its token (Endpoint::credit_cell_token), which the owner gave to this peer alone. The
// proof is a multiply-shift hash, so a word that somebody else wrote, wholly or in part, is genuine
// with a probability of about 2^-32.
#pragma once

#include <cstdint>

#include "base/secret_word.h"

namespace spinwire::wire {

struct CreditWord {
  std::uint32_t granted = 0;
  std::uint8_t sequence = 0;
};

constexpr std::uint32_t credit_proof(std::uint32_t content, std::uint32_t token) noexcept {
  constexpr std::uint64_t kSpread = 0x9e3779b97f4a7c15;
  const std::uint64_t key = token * kSpread | 1;
  return static_cast<std::uint32_t>((std::uint64_t{1} << 32 | content) * key >> 32);
}
constexpr std::uint64_t encode(const CreditWord& w, std::uint32_t token) noexcept {
  const std::uint32_t content = (w.granted & 0xffffff) | std::uint32_t{w.sequence} << 24;
  return content | std::uint64_t{credit_proof(content, token)} << 32;
}
/// Whether a peer wrote the word that knows the token.
constexpr bool is_genuine(std::uint64_t word, std::uint32_t token) noexcept {
  return base::is_same_secret(word >> 32, credit_proof(static_cast<std::uint32_t>(word), token));
}
/// The word's content. Says nothing unless the word is genuine.
constexpr CreditWord decode_credit_word(std::uint64_t word) noexcept {
  return {static_cast<std::uint32_t>(word & 0xffffff), static_cast<std::uint8_t>(word >> 24)};
}
/// The word's grants beyond a known total. Half of the range or more: the word is older.
constexpr std::uint32_t grants_since(const CreditWord& w, std::uint32_t known) noexcept {
  return (w.granted - known) & 0xffffff;
}
inline constexpr std::uint32_t kGrantsRange = 1u << 24;

}  // namespace spinwire::wire
