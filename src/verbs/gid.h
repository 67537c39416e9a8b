// Chooses a port's GID: a pure function of the GID table, so that tests can cover unusual tables.
// Set-up.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spinwire/device.h"

namespace spinwire::verbs {

struct GidEntry {
  int index = 0;
  ibv_gid gid{};
  GidType type = GidType::unknown;
  std::string netdev{};  ///< empty if not known
  bool netdev_up = true;
};

/// An IPv6 address, or an IPv4 one in its mapped form.
using HostAddress = std::array<std::uint8_t, 16>;

/// Suitability of an entry: higher is better, `none` is unusable.
enum class GidRank : std::uint8_t {
  none,
  v1,             ///< RoCEv1: does not leave the Ethernet segment
  v2_loopback,    ///< reaches this host only
  v2_link_local,  ///< does not leave the Ethernet segment
  v2_routable,
  own,      ///< the GID of an InfiniBand port or of the embedded device
  matches,  ///< RoCEv2 with the requested address
  asked,    ///< requested by index
};

struct GidVerdict {
  GidRank rank = GidRank::none;
  std::string reason;
};

struct GidWish {
  int index = -1;                      ///< -1: any
  std::optional<HostAddress> address;  ///< the address to prefer; unset: any
};

/// Returns a verdict for each entry, in order.
std::vector<GidVerdict> judge_gids(LinkLayer layer, std::span<const GidEntry> table,
                                   const GidWish& wish);
/// Position of the best verdict, the first of equals; -1 if none is usable.
int best_gid(std::span<const GidVerdict> verdicts) noexcept;

Gid gid_of(const ibv_gid& gid) noexcept;
/// "a.b.c.d" for mapped IPv4 addresses, else an IPv6 address.
std::string gid_text(const ibv_gid& gid);
/// Parses a numeric IPv4 or IPv6 address; unset if `text` is not an address or means all
/// interfaces.
std::optional<HostAddress> parse_host_address(const std::string& text);

}  // namespace spinwire::verbs
