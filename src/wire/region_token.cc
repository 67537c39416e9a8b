#include "wire/region_token.h"

#include <xxhash.h>

#include "wire/codec.h"
#include "wire/lease_messages.h"

namespace spinwire::wire {
namespace {

constexpr std::uint32_t kTokenMagic = 0x54525753;  // "SWRT"
constexpr std::uint8_t kVersion = 1;
constexpr std::size_t kHashed = 40;

namespace at {
constexpr std::size_t magic = 0, version = 4, access = 5, zero = 6, address = 8, length = 16,
                      incarnation = 24, rkey = 32, qp_num = 36, hash = kHashed;
}

/// Finds damage, not malice.
std::uint64_t hash_of(std::span<const std::byte> bytes) noexcept {
  return XXH3_64bits(bytes.data(), kHashed);
}

}  // namespace

std::array<std::byte, kTokenBytes> encode(const Token& token) noexcept {
  std::array<std::byte, kTokenBytes> bytes{};
  Writer w(bytes);
  w.put<std::uint32_t>(at::magic, kTokenMagic);
  w.put<std::uint8_t>(at::version, kVersion);
  w.put<std::uint8_t>(at::access, token.access);
  w.put<std::uint64_t>(at::address, token.address);
  w.put<std::uint64_t>(at::length, token.length);
  w.put<std::uint64_t>(at::incarnation, token.incarnation);
  w.put<std::uint32_t>(at::rkey, token.rkey);
  w.put<std::uint32_t>(at::qp_num, token.qp_num);
  w.put<std::uint64_t>(at::hash, hash_of(bytes));
  return bytes;
}

bool decode(std::span<const std::byte> bytes, Token& token) noexcept {
  if (bytes.size() != kTokenBytes) return false;
  Reader in(bytes);
  token.access = in.get<std::uint8_t>(at::access);
  token.address = in.get<std::uint64_t>(at::address);
  token.length = in.get<std::uint64_t>(at::length);
  token.incarnation = in.get<std::uint64_t>(at::incarnation);
  token.rkey = in.get<std::uint32_t>(at::rkey);
  token.qp_num = in.get<std::uint32_t>(at::qp_num);
  return in.get<std::uint32_t>(at::magic) == kTokenMagic &&
         in.get<std::uint8_t>(at::version) == kVersion && in.get<std::uint16_t>(at::zero) == 0 &&
         in.get<std::uint64_t>(at::hash) == hash_of(bytes) && token.length != 0 &&
         token.address + token.length > token.address && token.rkey != 0 &&
         is_remote_access(token.access);
}

}  // namespace spinwire::wire
