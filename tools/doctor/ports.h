// The RDMA devices of a host, as sysfs shows them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "doctor/host.h"

namespace spinwire::doctor {

struct Gid {
  int index = 0;
  std::string address;  ///< as sysfs writes it
  std::string type;     ///< "RoCE v2", "IB/RoCE v1"; empty: not known
  std::string netdev;

  [[nodiscard]] bool is_v2() const noexcept { return type == "RoCE v2"; }
  [[nodiscard]] bool is_link_local() const noexcept { return address.starts_with("fe80:"); }
};

struct Port {
  std::string device;
  int number = 0;
  std::string folder;
  std::string state;       ///< "4: ACTIVE"
  std::string phys_state;  ///< "5: LinkUp"
  std::string rate;        ///< "100 Gb/sec (4X EDR)"
  std::string link_layer;
  std::vector<Gid> gids;  ///< without empty ones
  std::string netdev;     ///< of the GIDs; empty if not known
  std::uint32_t netdev_mtu = 0;
  std::uint32_t active_mtu = 0;  ///< 0: not known
  int numa_node = -1;
  bool is_software = false;  ///< without hardware of its own, as Soft-RoCE is

  [[nodiscard]] bool is_ethernet() const noexcept { return link_layer == "Ethernet"; }
  [[nodiscard]] bool is_active() const noexcept { return state.starts_with("4"); }
  /// Whether peers can reach the port: it is active and has an address that is routed.
  [[nodiscard]] bool is_usable() const noexcept;
  [[nodiscard]] double gigabits() const noexcept;
};

/// All ports of all devices.
[[nodiscard]] std::vector<Port> read_ports(const Host& host);

/// The path MTU that an Ethernet interface of that MTU allows: packets have up to 96 bytes of
/// headers. 0: none.
[[nodiscard]] std::uint32_t path_mtu_of(std::uint32_t netdev_mtu) noexcept;

}  // namespace spinwire::doctor
