// The GID of a context, by which a peer finds the context's segment.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <cstring>
#include <optional>

namespace spinwire::softverbs {

/// fd53:57vv:pppp:pppp:ffff:ffnn:nnnn:nnnn, a unique local IPv6 address (RFC 4193): version, pid,
/// descriptor of the segment, and a random nonce that distinguishes a reused pid.
struct GidParts {
  std::uint32_t pid;
  std::uint32_t fd;     ///< 24 bits
  std::uint64_t nonce;  ///< 40 bits
};

inline constexpr std::uint64_t kNonceMask = (std::uint64_t{1} << 40) - 1;

inline ibv_gid make_gid(const GidParts& parts) noexcept {
  ibv_gid gid{};
  const std::uint8_t prefix[4] = {0xfd, 0x53, 0x57, 0x01};
  std::memcpy(gid.raw, prefix, sizeof prefix);
  for (unsigned i = 0; i < 4; ++i)
    gid.raw[4 + i] = static_cast<std::uint8_t>(parts.pid >> (24 - 8 * i));
  for (unsigned i = 0; i < 3; ++i)
    gid.raw[8 + i] = static_cast<std::uint8_t>(parts.fd >> (16 - 8 * i));
  for (unsigned i = 0; i < 5; ++i)
    gid.raw[11 + i] = static_cast<std::uint8_t>(parts.nonce >> (32 - 8 * i));
  return gid;
}

inline std::optional<GidParts> parse_gid(const ibv_gid& gid) noexcept {
  const std::uint8_t prefix[4] = {0xfd, 0x53, 0x57, 0x01};
  if (std::memcmp(gid.raw, prefix, sizeof prefix) != 0) return std::nullopt;
  GidParts parts{};
  for (unsigned i = 0; i < 4; ++i) parts.pid = parts.pid << 8 | gid.raw[4 + i];
  for (unsigned i = 0; i < 3; ++i) parts.fd = parts.fd << 8 | gid.raw[8 + i];
  for (unsigned i = 0; i < 5; ++i) parts.nonce = parts.nonce << 8 | gid.raw[11 + i];
  return parts;
}

inline bool same_gid(const ibv_gid& a, const ibv_gid& b) noexcept {
  return std::memcmp(a.raw, b.raw, sizeof a.raw) == 0;
}

}  // namespace spinwire::softverbs
