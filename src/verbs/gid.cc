#include "verbs/gid.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace spinwire::verbs {
namespace {

constexpr std::uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

bool is_zero(const ibv_gid& gid) noexcept {
  return std::all_of(std::begin(gid.raw), std::end(gid.raw), [](std::uint8_t b) { return b == 0; });
}

bool is_mapped(const ibv_gid& gid) noexcept {
  return std::memcmp(gid.raw, kMapped, sizeof kMapped) == 0;
}

bool is_loopback(const ibv_gid& gid) noexcept {
  const ibv_gid one = {.raw = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}};
  return is_mapped(gid) ? gid.raw[12] == 127 : std::memcmp(gid.raw, one.raw, sizeof one.raw) == 0;
}

bool is_link_local(const ibv_gid& gid) noexcept {
  if (is_mapped(gid)) return gid.raw[12] == 169 && gid.raw[13] == 254;
  return gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80;
}

bool is_any_address(const ibv_gid& gid) noexcept {
  return is_zero(gid) || (is_mapped(gid) && std::all_of(gid.raw + 12, gid.raw + 16,
                                                        [](std::uint8_t b) { return b == 0; }));
}

bool has_address(const GidEntry& entry, const GidWish& wish) noexcept {
  return wish.address && std::memcmp(entry.gid.raw, wish.address->data(), 16) == 0;
}

GidVerdict judge_ethernet(const GidEntry& entry, const GidWish& wish) {
  if (!entry.netdev_up)
    return {GidRank::none, base::format("its interface {} is down", entry.netdev)};
  if (entry.type == GidType::roce_v1) {
    return {GidRank::v1, has_address(entry, wish)
                             ? "RoCEv1 of the address asked for, which no router passes on"
                             : "RoCEv1, which no router passes on"};
  }
  if (entry.type != GidType::roce_v2) return {GidRank::none, "its type is not known"};
  if (is_any_address(entry.gid)) return {GidRank::none, "0.0.0.0 is no address of an interface"};
  if (has_address(entry, wish)) return {GidRank::matches, "RoCEv2 of the address asked for"};
  if (is_loopback(entry.gid)) return {GidRank::v2_loopback, "RoCEv2, but this host only"};
  if (is_link_local(entry.gid)) return {GidRank::v2_link_local, "RoCEv2, but link-local"};
  return {GidRank::v2_routable, "RoCEv2 and routable"};
}

GidVerdict judge(LinkLayer layer, const GidEntry& entry, const GidWish& wish) {
  if (is_zero(entry.gid)) return {GidRank::none, "empty slot"};
  if (wish.index >= 0) {
    if (entry.index == wish.index) return {GidRank::asked, "its index was asked for"};
    return {GidRank::none, base::format("index {} was asked for", wish.index)};
  }
  if (entry.type == GidType::embedded) return {GidRank::own, "the embedded device has this one"};
  if (layer != LinkLayer::infiniband) return judge_ethernet(entry, wish);
  if (entry.index == 0) return {GidRank::own, "the InfiniBand port's own"};
  return {GidRank::none, "an alias of the InfiniBand port"};
}

}  // namespace

std::vector<GidVerdict> judge_gids(LinkLayer layer, std::span<const GidEntry> table,
                                   const GidWish& wish) {
  std::vector<GidVerdict> verdicts;
  verdicts.reserve(table.size());
  for (const GidEntry& entry : table) verdicts.push_back(judge(layer, entry, wish));
  return verdicts;
}

int best_gid(std::span<const GidVerdict> verdicts) noexcept {
  const auto best =
      std::max_element(verdicts.begin(), verdicts.end(),
                       [](const GidVerdict& a, const GidVerdict& b) { return a.rank < b.rank; });
  if (best == verdicts.end() || best->rank == GidRank::none) return -1;
  return static_cast<int>(best - verdicts.begin());
}

Gid gid_of(const ibv_gid& gid) noexcept {
  Gid result;
  std::memcpy(result.raw.data(), gid.raw, result.raw.size());
  return result;
}

std::string gid_text(const ibv_gid& gid) {
  char text[INET6_ADDRSTRLEN] = "";
  if (is_mapped(gid)) {
    (void)::inet_ntop(AF_INET, gid.raw + 12, text, sizeof text);
  } else {
    (void)::inet_ntop(AF_INET6, gid.raw, text, sizeof text);
  }
  return text;
}

std::optional<HostAddress> parse_host_address(const std::string& text) {
  ibv_gid gid{};
  if (::inet_pton(AF_INET, text.c_str(), gid.raw + 12) == 1) {
    std::memcpy(gid.raw, kMapped, sizeof kMapped);
  } else if (::inet_pton(AF_INET6, text.c_str(), gid.raw) != 1) {
    return std::nullopt;
  }
  if (is_any_address(gid)) return std::nullopt;
  HostAddress address;
  std::memcpy(address.data(), gid.raw, address.size());
  return address;
}

}  // namespace spinwire::verbs

namespace spinwire {

std::string Gid::text() const {
  ibv_gid gid{};
  std::memcpy(gid.raw, raw.data(), raw.size());
  return verbs::gid_text(gid);
}

Result<Gid> Gid::parse(std::string_view text) {
  return base::no_throw("parse a GID", [&]() -> Result<Gid> {
    const std::string address(text);
    Gid gid;
    if (::inet_pton(AF_INET6, address.c_str(), gid.raw.data()) == 1) return gid;
    if (::inet_pton(AF_INET, address.c_str(), gid.raw.data() + 12) != 1) {
      return base::fail(Status::invalid_argument, base::format("parse the GID \"{}\"", text),
                        "it is no IPv4 or IPv6 address", "give one such as \"fe80::1\"");
    }
    gid.raw[10] = gid.raw[11] = 0xff;
    return gid;
  });
}

std::string Guid::text() const {
  return base::format("{:04x}:{:04x}:{:04x}:{:04x}", value >> 48, value >> 32 & 0xffff,
                      value >> 16 & 0xffff, value & 0xffff);
}

}  // namespace spinwire
