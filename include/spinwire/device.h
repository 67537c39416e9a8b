// The device that an engine opened, and the candidates it chose from.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "spinwire/buffer.h"
#include "spinwire/config.h"
#include "spinwire/export.h"
#include "spinwire/gid.h"
#include "spinwire/gid_type.h"
#include "spinwire/status.h"

namespace spinwire {

/// Link layer of a port.
enum class LinkLayer : std::uint8_t {
  unknown,     ///< the device does not say
  infiniband,  ///< InfiniBand
  ethernet,    ///< RoCE
};
/// "InfiniBand", "Ethernet" or "unknown". Any thread; never allocates.
SPINWIRE_API std::string_view to_string(LinkLayer layer) noexcept;

/// An entry of a port's GID table that an engine could use. A `gid_index` of -1 stands for a port,
/// a `port` of 0 for a device, that was not examined further.
struct DeviceCandidate {
  std::string provider;   ///< "rdma-core" or "softverbs"
  std::string device;     ///< the name that config.device.name takes
  Guid guid{};            ///< of the device; none if it could not be asked
  std::uint8_t port = 0;  ///< 1 … 255; 0: none was examined
  int gid_index = -1;     ///< in the port's table; -1: none was examined
  Gid gid{};              ///< none if `gid_index` is -1
  std::string netdev;     ///< network interface of the GID, if the system knows it
  LinkLayer link_layer = LinkLayer::unknown;  ///< the port's
  GidType gid_type = GidType::unknown;        ///< the GID's
  bool usable = false;                        ///< whether an engine can use it
  bool chosen = false;                        ///< whether Engine::open() uses it
  std::string reason;                         ///< why it was chosen or not; text for people

  /// One line: "rdma-core:mlx5_0 port 1 GID 3 (RoCEv2, 10.0.0.1, eth0): chosen: ...".
  [[nodiscard]] SPINWIRE_API std::string text() const;
};

/// The device that an engine has open. Sizes are those in effect.
struct DeviceInfo {
  std::string provider;                       ///< "rdma-core" or "softverbs"
  std::string name;                           ///< such as "mlx5_0" or "softverbs"
  Guid guid{};                                ///< of the device; none if it has none
  std::uint8_t port = 0;                      ///< 1 … 255
  int gid_index = 0;                          ///< in the port's table
  Gid gid{};                                  ///< the address that peers use
  std::string netdev;                         ///< network interface of the GID; empty: not known
  LinkLayer link_layer = LinkLayer::unknown;  ///< the port's
  GidType gid_type = GidType::unknown;        ///< the GID's
  std::uint32_t mtu = 0;                      ///< active path MTU, bytes
  std::uint32_t max_operation_bytes = 0;      ///< longest read, write or raw message: max_msg_sz
  std::uint32_t inline_bytes = 0;             ///< in effect; see Config::Queues::inline_bytes
  std::uint32_t initiator_depth = 0;          ///< READs and atomics that a connection has under way
  std::uint32_t responder_depth = 0;  ///< READs and atomics of the peer that a connection accepts
  bool shared_receives = false;       ///< all connections share one receive queue
  std::uint32_t own_receives = 0;     ///< receives of each connection's own queue, if not shared
  /// What register_memory() and expose() may be given.
  MemoryFlags memory_flags = MemoryFlags::none;
  std::uint32_t max_sge = 0;                ///< scatter/gather elements of a work request
  bool memory_windows = false;              ///< type 2B windows
  bool datagrams = false;                   ///< unreliable datagrams, which remote calls use
  bool atomics = false;                     ///< atomic at least against other work of this device
  bool single_threaded = false;             ///< the device omits its locks for us
  std::vector<DeviceCandidate> candidates;  ///< all that were examined, including the chosen one
};

/// Lists all devices, ports and GIDs, and marks the one that Engine::open() would choose with
/// `config.device`. Marks none if open() would fail. Set-up; any thread. Errors: bad_config,
/// system.
[[nodiscard]] SPINWIRE_API Result<std::vector<DeviceCandidate>> list_devices(
    const Config& config = {});

}  // namespace spinwire
