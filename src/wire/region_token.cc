#include "wire/region_token.h"

#include <xxhash.h>

#include "wire/codec.h"
#include "wire/lease_messages.h"

namespace spinwire::wire {
namespace {

constexpr std::array<std::uint8_t, 5> kMagicAndVersion{'S', 'W', 'R', 'T', 1};
/// A hash follows.
using TokenLayout = Layout<constant<kMagicAndVersion>, &Token::access, zeros<2>, &Token::address,
                           &Token::length, &Token::incarnation, &Token::rkey, &Token::qp_num>;
constexpr std::size_t kHashed = TokenLayout::kBytes;
static_assert(kHashed + sizeof(std::uint64_t) == kTokenBytes);

/// Detects damage, not forgery.
std::uint64_t hash_of(std::span<const std::byte> bytes) noexcept {
  return XXH3_64bits(bytes.data(), kHashed);
}

}  // namespace

std::array<std::byte, kTokenBytes> encode(const Token& token) noexcept {
  std::array<std::byte, kTokenBytes> bytes{};
  TokenLayout::put(token, bytes.data());
  put_number(bytes.data() + kHashed, hash_of(bytes));
  return bytes;
}

bool decode(std::span<const std::byte> bytes, Token& token) noexcept {
  return bytes.size() == kTokenBytes && TokenLayout::get(bytes.data(), token) &&
         get_number<std::uint64_t>(bytes.data() + kHashed) == hash_of(bytes) && token.length != 0 &&
         token.address + token.length > token.address && token.rkey != 0 &&
         is_remote_access(token.access);
}

}  // namespace spinwire::wire
