// Which device an engine opened and why, and which there are.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "spinwire/config.h"
#include "spinwire/export.h"
#include "spinwire/gid_type.h"
#include "spinwire/status.h"

namespace spinwire {

enum class LinkLayer : std::uint8_t { unknown, infiniband, ethernet };
/// Any thread; never allocates.
SPINWIRE_API std::string_view to_string(LinkLayer layer) noexcept;

/// One place that an engine could have been at: an entry of a port's GID table; with a `gid_index`
/// of -1 a port, or with a `port` of 0 a device, that was not looked into any further.
struct DeviceCandidate {
  std::string provider;  ///< "rdma-core" or "softverbs"
  std::string device;    ///< as config.device.name takes it
  std::uint8_t port = 0;
  int gid_index = -1;
  std::string gid;     ///< as an IPv6 address, RoCEv2's mapped ones as a.b.c.d
  std::string netdev;  ///< of the GID, where the system tells
  LinkLayer link_layer = LinkLayer::unknown;
  GidType gid_type = GidType::unknown;
  bool usable = false;
  bool chosen = false;
  std::string reason;  ///< why it was chosen or not, for people

  /// One line: "mlx5_0 port 1 GID 3 (RoCEv2, 10.0.0.1, eth0): chosen: ...".
  [[nodiscard]] SPINWIRE_API std::string text() const;
};

/// The device that an engine has open. Depths and lengths are what is in force.
struct DeviceInfo {
  std::string provider;
  std::string name;
  std::uint8_t port = 0;
  int gid_index = 0;
  std::string gid;
  std::string netdev;
  LinkLayer link_layer = LinkLayer::unknown;
  GidType gid_type = GidType::unknown;
  std::uint32_t mtu = 0;           ///< active, bytes
  std::uint32_t inline_bytes = 0;  ///< sent inline up to this length: as asked, or what it has
  std::uint32_t rd_atomic = 0;     ///< READs and atomics of a connection outstanding at once
  bool shared_receives = false;    ///< one queue of receives for all connections
  std::uint32_t own_receives = 0;  ///< else each connection has a queue of this many
  std::uint32_t max_sge = 0;       ///< elements of a raw connection's work requests
  bool memory_windows = false;     ///< type 2B
  bool datagrams = false;          ///< unreliable ones, which remote calls go over
  bool atomics = false;            ///< against other work of this device at least
  bool single_threaded = false;    ///< the device leaves its locks out for us
  std::vector<DeviceCandidate> candidates;  ///< all that were looked at, the chosen one included
};

/// All devices, ports and GIDs, and which of them Engine::open would take with `config.device`;
/// none is chosen if it would fail. Set-up; any thread. Errors: bad_config, system.
SPINWIRE_API Result<std::vector<DeviceCandidate>> list_devices(const Config& config = {});

}  // namespace spinwire
