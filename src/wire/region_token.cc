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
static_assert(TokenLayout::kBytes + sizeof(std::uint64_t) == kTokenBytes);

/// A token with a deadline: the place of reserved bytes and of half the hash has it.
struct TimedToken : Token {
  std::uint16_t deadline_high = 0;
  std::uint32_t deadline_low = 0;
};
constexpr std::array<std::uint8_t, 5> kMagicAndTimedVersion{'S', 'W', 'R', 'T', 2};
using TimedLayout =
    Layout<constant<kMagicAndTimedVersion>, &Token::access, &TimedToken::deadline_high,
           &Token::address, &Token::length, &Token::incarnation, &Token::rkey, &Token::qp_num,
           &TimedToken::deadline_low>;
static_assert(TimedLayout::kBytes + sizeof(std::uint32_t) == kTokenBytes);

/// Writes the fields and their hash, which detects damage, not forgery.
template <typename Fields, typename Hash>
std::array<std::byte, kTokenBytes> encode_hashed(const auto& token) noexcept {
  std::array<std::byte, kTokenBytes> bytes{};
  Fields::put(token, bytes.data());
  put_number(bytes.data() + Fields::kBytes,
             static_cast<Hash>(XXH3_64bits(bytes.data(), Fields::kBytes)));
  return bytes;
}

/// `bytes` has kTokenBytes.
template <typename Fields, typename Hash>
bool decode_hashed(std::span<const std::byte> bytes, auto& token) noexcept {
  return Fields::get(bytes.data(), token) &&
         get_number<Hash>(bytes.data() + Fields::kBytes) ==
             static_cast<Hash>(XXH3_64bits(bytes.data(), Fields::kBytes));
}

bool decode_timed(std::span<const std::byte> bytes, Token& token) noexcept {
  TimedToken timed;
  if (!decode_hashed<TimedLayout, std::uint32_t>(bytes, timed)) return false;
  token = timed;
  token.deadline = std::uint64_t{timed.deadline_high} << 32 | timed.deadline_low;
  return token.deadline != 0;
}

bool decode_untimed(std::span<const std::byte> bytes, Token& token) noexcept {
  token.deadline = 0;
  return decode_hashed<TokenLayout, std::uint64_t>(bytes, token);
}

}  // namespace

std::array<std::byte, kTokenBytes> encode(const Token& token) noexcept {
  if (token.deadline == 0) return encode_hashed<TokenLayout, std::uint64_t>(token);
  TimedToken timed{token, static_cast<std::uint16_t>(token.deadline >> 32),
                   static_cast<std::uint32_t>(token.deadline)};
  return encode_hashed<TimedLayout, std::uint32_t>(timed);
}

bool decode(std::span<const std::byte> bytes, Token& token) noexcept {
  return bytes.size() == kTokenBytes &&
         (decode_untimed(bytes, token) || decode_timed(bytes, token)) && token.length != 0 &&
         token.address + token.length > token.address && token.rkey != 0 &&
         is_remote_access(token.access);
}

}  // namespace spinwire::wire
