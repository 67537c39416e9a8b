#include "doctor/ports.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>

namespace spinwire::doctor {
namespace {

constexpr std::string_view kDevices = "/sys/class/infiniband";
constexpr std::uint32_t kHeaderBytes = 96;

std::string text_of(const Host& host, const std::string& path) {
  return host.read(path).text.value_or("");
}

bool is_empty_gid(const std::string& address) {
  return address.empty() || address.find_first_not_of("0:") == std::string::npos ||
         address == "fe80:0000:0000:0000:0000:0000:0000:0000";
}

std::vector<Gid> read_gids(const Host& host, const std::string& folder) {
  std::vector<Gid> gids;
  for (const std::string& name : host.list(folder + "/gids")) {
    Gid gid;
    gid.index = std::atoi(name.c_str());
    gid.address = text_of(host, folder + "/gids/" + name);
    if (is_empty_gid(gid.address)) continue;
    gid.type = text_of(host, folder + "/gid_attrs/types/" + name);
    gid.netdev = text_of(host, folder + "/gid_attrs/ndevs/" + name);
    gids.push_back(std::move(gid));
  }
  std::sort(gids.begin(), gids.end(), [](const Gid& a, const Gid& b) { return a.index < b.index; });
  return gids;
}

Port read_port(const Host& host, const std::string& device, const std::string& number) {
  Port port;
  port.device = device;
  port.number = std::atoi(number.c_str());
  const std::string of_device = fmt::format("{}/{}", kDevices, device);
  port.folder = fmt::format("{}/ports/{}", of_device, number);
  port.state = text_of(host, port.folder + "/state");
  port.phys_state = text_of(host, port.folder + "/phys_state");
  port.rate = text_of(host, port.folder + "/rate");
  port.link_layer = text_of(host, port.folder + "/link_layer");
  port.gids = read_gids(host, port.folder);
  for (const Gid& gid : port.gids) {
    if (port.netdev.empty()) port.netdev = gid.netdev;
  }
  // Soft-RoCE names its interface in a file that no other driver makes. Up to Linux 5.10 it also
  // has the `device` of that interface's hardware.
  const Reading parent = host.read(of_device + "/parent");
  if (port.netdev.empty()) port.netdev = parent.text.value_or("");
  if (!port.netdev.empty()) {
    const auto mtu = host.number("/sys/class/net/" + port.netdev + "/mtu");
    port.netdev_mtu = static_cast<std::uint32_t>(std::max<std::int64_t>(mtu.value_or(0), 0));
  }
  port.active_mtu = host.active_mtu(device, port.number);
  port.is_software = parent || !host.exists(of_device + "/device");
  auto node = host.number(of_device + "/device/numa_node");
  if (!node && !port.netdev.empty())
    node = host.number("/sys/class/net/" + port.netdev + "/device/numa_node");
  port.numa_node = static_cast<int>(node.value_or(-1));
  return port;
}

}  // namespace

bool Port::is_usable() const noexcept {
  if (!is_active()) return false;
  return std::any_of(gids.begin(), gids.end(), [this](const Gid& gid) {
    return !is_ethernet() || (!gid.is_link_local() && (gid.is_v2() || gid.type.empty()));
  });
}

double Port::gigabits() const noexcept { return std::atof(rate.c_str()); }

std::vector<Port> read_ports(const Host& host) {
  std::vector<Port> ports;
  for (const std::string& device : host.list(kDevices)) {
    for (const std::string& number : host.list(fmt::format("{}/{}/ports", kDevices, device)))
      ports.push_back(read_port(host, device, number));
  }
  return ports;
}

std::uint32_t path_mtu_of(std::uint32_t netdev_mtu) noexcept {
  for (std::uint32_t mtu = 4096; mtu >= 256; mtu /= 2) {
    if (netdev_mtu >= mtu + kHeaderBytes) return mtu;
  }
  return 0;
}

}  // namespace spinwire::doctor
