// The device that an engine opened, and those that it could have opened.
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

/// A place that an engine could use: an entry of a port's GID table. With a `gid_index` of -1 it is
/// a port, with a `port` of 0 a device, that was not examined further.
struct DeviceCandidate {
  std::string provider;  ///< "rdma-core" or "softverbs"
  std::string device;    ///< as for config.device.name
  std::uint8_t port = 0;
  int gid_index = -1;
  std::string gid;     ///< as an IPv6 address, RoCEv2's mapped ones as a.b.c.d
  std::string netdev;  ///< of the GID, if the system knows it
  LinkLayer link_layer = LinkLayer::unknown;
  GidType gid_type = GidType::unknown;
  bool usable = false;
  bool chosen = false;
  std::string reason;  ///< why it was chosen or not; text for people

  /// One line: "mlx5_0 port 1 GID 3 (RoCEv2, 10.0.0.1, eth0): chosen: ...".
  [[nodiscard]] SPINWIRE_API std::string text() const;
};

/// The device that an engine has open. Sizes are those in force.
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
  std::uint32_t inline_bytes = 0;  ///< payloads up to this length are sent inline
  std::uint32_t rd_atomic = 0;     ///< READs and atomics of a connection outstanding at once
  bool shared_receives = false;    ///< one queue of receives for all connections
  std::uint32_t own_receives = 0;  ///< else each connection has a queue of this many
  std::uint32_t max_sge = 0;       ///< elements of a raw connection's work requests
  bool memory_windows = false;     ///< type 2B
  bool datagrams = false;          ///< unreliable ones, which remote calls go over
  bool atomics = false;            ///< atomic against other work of this device at least
  bool single_threaded = false;    ///< the device omits its locks for us
  std::vector<DeviceCandidate> candidates;  ///< all that were examined, including the chosen one
};

/// Lists all devices, ports and GIDs, and marks the one that Engine::open() would choose with
/// `config.device`; none if open() would fail. Set-up; any thread. Errors: bad_config, system.
[[nodiscard]] SPINWIRE_API Result<std::vector<DeviceCandidate>> list_devices(
    const Config& config = {});

}  // namespace spinwire
