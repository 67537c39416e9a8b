#include "verbs/selection.h"

#include <endian.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "base/error.h"

namespace spinwire::verbs {
namespace {

constexpr std::string_view kAuto = "auto";

/// The search's best candidate so far; its context stays open while it leads.
struct Best {
  const Provider* provider = nullptr;
  ibv_context* context = nullptr;
  GidRank rank = GidRank::none;
  std::size_t candidate = 0;
  std::uint8_t port = 0;
  ibv_port_attr port_attr{};
  GidEntry gid;
};

class Search {
 public:
  Search(const DeviceWish& wish, const Clock& clock) : wish_(wish), clock_(clock) {}
  Search(const Search&) = delete;
  Search& operator=(const Search&) = delete;
  ~Search() {
    if (best_.context != nullptr) (void)best_.provider->close_device(best_.context);
  }

  void examine(const Provider& provider, const std::string& name) {
    DeviceCandidate of_device;
    of_device.provider = provider.name;
    of_device.device = name;
    auto opened = provider.open_device(name, clock_);
    if (!opened) return reject(of_device, opened.error().message());
    ibv_context* const context = *opened;
    ibv_device_attr attr{};
    if (const int error = provider.query_device(context, &attr); error != 0) {
      reject(of_device, base::format("ibv_query_device: {}", base::errno_text(error)));
    } else if (context->device != nullptr &&
               context->device->transport_type == IBV_TRANSPORT_IWARP) {
      reject(of_device,
             "iWARP, whose queue pairs connect through rdma_cm only and have no immediates");
    } else {
      of_device.guid = guid_of(attr);
      scan_ports(provider, context, of_device, attr.phys_port_cnt);
    }
    if (best_.context != context) (void)provider.close_device(context);
  }

  [[nodiscard]] std::vector<DeviceCandidate>& candidates() noexcept { return candidates_; }
  [[nodiscard]] bool found() const noexcept { return best_.context != nullptr; }

  /// Marks the chosen candidate.
  void choose() {
    if (!found()) return;
    DeviceCandidate& c = candidates_[best_.candidate];
    c.chosen = true;
    for (DeviceCandidate& other : candidates_) {
      if (other.usable && !other.chosen) other.reason += "; another is better, or comes first";
    }
  }
  Selection take() {
    Selection s;
    s.provider = best_.provider;
    s.context = std::exchange(best_.context, nullptr);
    s.name = candidates_[best_.candidate].device;
    s.port = best_.port;
    s.port_attr = best_.port_attr;
    s.gid = std::move(best_.gid);
    s.candidates = std::move(candidates_);
    return s;
  }

 private:
  void reject(DeviceCandidate candidate, std::string reason) {
    candidate.reason = std::move(reason);
    candidates_.push_back(std::move(candidate));
  }

  void scan_ports(const Provider& provider, ibv_context* context, DeviceCandidate of_port,
                  unsigned ports) {
    if (wish_.port > ports) {
      of_port.port = wish_.port;
      return reject(of_port, base::format("it has {} port{}", ports, ports == 1 ? "" : "s"));
    }
    for (unsigned port = 1; port <= ports; ++port) {
      if (wish_.port != 0 && wish_.port != port) continue;
      of_port.port = static_cast<std::uint8_t>(port);
      scan_port(provider, context, of_port);
    }
  }

  void scan_port(const Provider& provider, ibv_context* context, DeviceCandidate of_port) {
    ibv_port_attr attr{};
    if (const int error = provider.query_port(context, of_port.port, &attr); error != 0)
      return reject(of_port, base::format("ibv_query_port: {}", base::errno_text(error)));
    of_port.link_layer = layer_of(attr);
    if (std::string fault = check_port(attr); !fault.empty())
      return reject(of_port, std::move(fault));
    const std::vector<GidEntry> table = provider.gid_table(context, of_port.port, attr.gid_tbl_len);
    if (wish_.gid.index >= attr.gid_tbl_len) {
      return reject(of_port, base::format("GID index {} was asked for, its table ends at {}",
                                          wish_.gid.index, attr.gid_tbl_len - 1));
    }
    const std::vector<GidVerdict> verdicts = judge_gids(of_port.link_layer, table, wish_.gid);
    const std::size_t first = candidates_.size();
    for (std::size_t i = 0; i < table.size(); ++i) add_gid(of_port, table[i], verdicts[i]);
    const int best = best_gid(verdicts);
    if (best < 0) {
      const bool asked = wish_.gid.index >= 0;
      return reject(of_port, asked ? base::format("there is nothing at GID index {}, which was "
                                                  "asked for",
                                                  wish_.gid.index)
                                   : "no usable GID: give its interface an address and set it up");
    }
    const auto at = static_cast<std::size_t>(best);
    if (verdicts[at].rank <= best_.rank) return;
    if (best_.context != nullptr && best_.context != context)
      (void)best_.provider->close_device(best_.context);
    best_ = {&provider, context, verdicts[at].rank, first + at, of_port.port, attr, table[at]};
  }

  void add_gid(DeviceCandidate candidate, const GidEntry& entry, const GidVerdict& verdict) {
    candidate.gid_index = entry.index;
    candidate.gid = gid_of(entry.gid);
    candidate.netdev = entry.netdev;
    candidate.gid_type = entry.type;
    candidate.usable = verdict.rank != GidRank::none;
    candidate.reason = verdict.reason;
    candidates_.push_back(std::move(candidate));
  }

  const DeviceWish& wish_;
  const Clock& clock_;
  std::vector<DeviceCandidate> candidates_;
  Best best_;
};

bool has(const Provider& provider, const std::string& name) {
  const std::vector<std::string> names = provider.device_names();
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// The devices that `wish` names, as provider and name.
using Named = std::pair<const Provider*, std::string>;
std::vector<Named> meant(std::span<const Provider* const> providers, const std::string& wish) {
  std::vector<Named> result;
  const std::size_t colon = wish.find(':');
  for (const Provider* provider : providers) {
    std::string name = wish;
    if (colon != std::string::npos && wish.substr(0, colon) == provider->name)
      name = wish.substr(colon + 1);
    if (name == kAuto && (provider->reaches_other_hosts || name != wish)) {
      for (std::string& each : provider->device_names())
        result.emplace_back(provider, std::move(each));
    } else if (result.empty() && has(*provider, name)) {
      result.emplace_back(provider, std::move(name));
    }
  }
  return result;
}

std::string all_names(std::span<const Provider* const> providers) {
  std::string text;
  for (const Provider* provider : providers) {
    const std::vector<std::string> names = provider->device_names();
    text += base::format("{}{} has {}", text.empty() ? "" : "; ", provider->name,
                         names.empty() ? "no device" : base::format("{}", fmt::join(names, ", ")));
  }
  return text;
}

std::string reasons(const std::vector<DeviceCandidate>& candidates) {
  std::string text;
  for (const DeviceCandidate& c : candidates)
    text += base::format("{}{}", text.empty() ? "" : "; ", c.text());
  return text;
}

std::string asked_text(const DeviceWish& wish) {
  std::string text = base::format("open device \"{}\"", wish.name);
  if (wish.port != 0) text += base::format(", port {}", wish.port);
  if (wish.gid.index >= 0) text += base::format(", GID index {}", wish.gid.index);
  return text;
}

}  // namespace

Guid guid_of(const ibv_device_attr& device) noexcept { return {be64toh(device.node_guid)}; }

LinkLayer layer_of(const ibv_port_attr& port) noexcept {
  // Drivers that report no link layer are old InfiniBand drivers.
  return port.link_layer == IBV_LINK_LAYER_ETHERNET ? LinkLayer::ethernet : LinkLayer::infiniband;
}

std::string check_port(const ibv_port_attr& port) {
  constexpr std::uint8_t kDisabled = 3;
  const char* link = port.phys_state == kDisabled
                         ? "it is disabled: set its interface up (ip link set DEV up)"
                         : "its link is down: look at the cable, the switch and the interface";
  switch (port.state) {
    case IBV_PORT_ACTIVE:
    case IBV_PORT_ACTIVE_DEFER:
      return {};
    case IBV_PORT_DOWN:
      return base::format("the port is DOWN; {}", link);
    case IBV_PORT_INIT:
      return "the port is in INIT; no subnet manager has configured it: start opensm on the fabric";
    case IBV_PORT_ARMED:
      return "the port is ARMED; the subnet manager has yet to activate it";
    default:
      return base::format("the port is in state {}", static_cast<int>(port.state));
  }
}

Result<Selection> select_device(std::span<const Provider* const> providers, const DeviceWish& wish,
                                const Clock& clock) {
  const std::vector<Named> names = meant(providers, wish.name);
  if (names.empty()) {
    return base::fail(Status::no_device, asked_text(wish), all_names(providers),
                      "set device.name to one of them, \"softverbs\" for peers on this host");
  }
  Search search(wish, clock);
  for (const auto& [provider, name] : names) search.examine(*provider, name);
  if (!search.found()) {
    return base::fail(Status::no_device, asked_text(wish), reasons(search.candidates()),
                      "fix one of these causes, or set device.name, device.port or "
                      "device.gid_index to another");
  }
  search.choose();
  return search.take();
}

std::vector<DeviceCandidate> survey_devices(std::span<const Provider* const> providers,
                                            const DeviceWish& wish, const Clock& clock) {
  Search chosen(wish, clock);
  for (const auto& [provider, name] : meant(providers, wish.name)) chosen.examine(*provider, name);
  chosen.choose();
  std::vector<DeviceCandidate> result = std::move(chosen.candidates());
  const auto seen = [&result](const Provider& provider, const std::string& name) {
    return std::any_of(result.begin(), result.end(), [&](const DeviceCandidate& c) {
      return c.provider == provider.name && c.device == name;
    });
  };
  const DeviceWish any;
  Search others(any, clock);
  for (const Provider* provider : providers) {
    for (const std::string& name : provider->device_names()) {
      if (!seen(*provider, name)) others.examine(*provider, name);
    }
  }
  for (DeviceCandidate& c : others.candidates()) {
    c.usable = false;
    c.reason = base::format("device {} was asked for; {}", wish.name, c.reason);
    result.push_back(std::move(c));
  }
  return result;
}

}  // namespace spinwire::verbs

namespace spinwire {

std::string_view to_string(LinkLayer layer) noexcept {
  return layer == LinkLayer::infiniband ? "InfiniBand"
         : layer == LinkLayer::ethernet ? "Ethernet"
                                        : "unknown";
}

std::string_view to_string(GidType type) noexcept {
  constexpr std::array<std::string_view, 4> kNames{"InfiniBand", "RoCEv1", "RoCEv2", "embedded"};
  const auto at = static_cast<std::size_t>(type);
  return at < kNames.size() ? kNames[at] : "unknown";
}

std::string DeviceCandidate::text() const {
  std::string text = base::format("{}:{}", provider, device);
  if (port != 0) text += base::format(" port {}", port);
  if (gid_index >= 0) {
    text += base::format(" GID {} ({}, {}{}{})", gid_index, to_string(gid_type), gid.text(),
                         netdev.empty() ? "" : ", ", netdev);
  }
  return base::format("{}: {}{}", text, chosen ? "chosen: " : "", reason);
}

}  // namespace spinwire
