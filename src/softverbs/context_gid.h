// GIDs. A context's GID leads a peer to the context's segment; a process's GID leads to the
// directory of its contexts.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <cstring>
#include <optional>

namespace spinwire::softverbs {

/// The file that a GID's descriptor refers to; the last byte of the GID's prefix.
enum class GidKind : std::uint8_t {
  context = 1,  ///< a context's segment
  process = 2,  ///< the directory of a process's contexts
};

/// fd53:57kk:pppp:pppp:ffff:ffnn:nnnn:nnnn, a unique local IPv6 address (RFC 4193): kind, pid,
/// descriptor, and a random nonce that distinguishes a reused pid. The upper half of the kind is
/// the port, counted from 0: a context's own GID is that of its first port.
struct GidParts {
  std::uint32_t pid;
  std::uint32_t fd;     ///< 24 bits
  std::uint64_t nonce;  ///< 40 bits
};

inline constexpr std::uint64_t kNonceMask = (std::uint64_t{1} << 40) - 1;

inline ibv_gid make_gid(const GidParts& parts, GidKind kind = GidKind::context) noexcept {
  ibv_gid gid{};
  const std::uint8_t prefix[4] = {0xfd, 0x53, 0x57, static_cast<std::uint8_t>(kind)};
  std::memcpy(gid.raw, prefix, sizeof prefix);
  for (unsigned i = 0; i < 4; ++i)
    gid.raw[4 + i] = static_cast<std::uint8_t>(parts.pid >> (24 - 8 * i));
  for (unsigned i = 0; i < 3; ++i)
    gid.raw[8 + i] = static_cast<std::uint8_t>(parts.fd >> (16 - 8 * i));
  for (unsigned i = 0; i < 5; ++i)
    gid.raw[11 + i] = static_cast<std::uint8_t>(parts.nonce >> (32 - 8 * i));
  return gid;
}

inline std::optional<GidParts> parse_gid(const ibv_gid& gid,
                                         GidKind kind = GidKind::context) noexcept {
  const std::uint8_t prefix[4] = {0xfd, 0x53, 0x57, static_cast<std::uint8_t>(kind)};
  if (std::memcmp(gid.raw, prefix, sizeof prefix) != 0) return std::nullopt;
  GidParts parts{};
  for (unsigned i = 0; i < 4; ++i) parts.pid = parts.pid << 8 | gid.raw[4 + i];
  for (unsigned i = 0; i < 3; ++i) parts.fd = parts.fd << 8 | gid.raw[8 + i];
  for (unsigned i = 0; i < 5; ++i) parts.nonce = parts.nonce << 8 | gid.raw[11 + i];
  return parts;
}

/// Ports of a context that an engine drives. Datagrams go through the first.
inline constexpr std::uint8_t kPorts = 2;

/// The GID of a context's port, from 1 on; `gid` is that of the first.
inline ibv_gid gid_of_port(ibv_gid gid, std::uint8_t port) noexcept {
  gid.raw[3] = static_cast<std::uint8_t>(gid.raw[3] | (port - 1) << 4);
  return gid;
}
/// The port that a context's GID names.
inline std::uint8_t port_of(const ibv_gid& gid) noexcept {
  return static_cast<std::uint8_t>((gid.raw[3] >> 4) + 1);
}
/// The context's own GID, if `gid` names one of its ports; another GID is returned as it is.
inline ibv_gid own_gid(const ibv_gid& gid) noexcept {
  ibv_gid own = gid;
  own.raw[3] &= 0xf;
  return port_of(gid) <= kPorts && parse_gid(own) ? own : gid;
}

/// Whether a path names the peer by its GID, the only way to find it.
inline bool has_gid(const ibv_ah_attr& path) noexcept {
  return path.is_global != 0 && path.port_num != 0 && path.port_num <= kPorts &&
         path.grh.sgid_index == 0;
}

inline bool same_gid(const ibv_gid& a, const ibv_gid& b) noexcept {
  return std::memcmp(a.raw, b.raw, sizeof a.raw) == 0;
}

}  // namespace spinwire::softverbs
