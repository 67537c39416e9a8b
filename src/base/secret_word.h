// Comparing words that a peer must not guess. Hot.
#pragma once

#include <cstdint>

namespace spinwire::base {

/// Whether a word that a peer sent equals the secret one. The words are compared whole, so the time
/// tells nothing of their parts. Longer secrets are compared by sodium_memcmp().
constexpr bool is_same_secret(std::uint64_t theirs, std::uint64_t ours) noexcept {
  return (theirs ^ ours) == 0;
}

}  // namespace spinwire::base
