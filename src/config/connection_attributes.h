// The attributes of a connection's queue pair: the engine's settings, overridden by the
// connection's.
#pragma once

#include <cstdint>

#include "spinwire/config.h"
#include "spinwire/connection_settings.h"
#include "verbs/opened_device.h"

namespace spinwire::config {

/// The parameters of a connection.
struct ConnectionAttributes {
  verbs::QueuePairOptions queue_pair;
  std::uint32_t credits = 0;           ///< most receives reserved for the peer
  std::uint32_t mtu = 0;               ///< requested path MTU, bytes
  std::int32_t psn = -1;               ///< -1: random
  Access access = Access::remote_all;  ///< most rights that a key may give the peer
  bool own_domain = false;             ///< has its own protection domain
  LeaseLimits leases;
  bool raw = false;  ///< a raw connection, whose sizes are in `queue_pair`
};

/// The attributes of connections without their own settings. `config` must have passed check() and
/// be limited to the device's abilities.
[[nodiscard]] ConnectionAttributes default_attributes(const Config& config,
                                                      const verbs::Device& device);
/// The attributes of a connection with `settings`. `through_cm`: rdma_cm finds port and GID.
/// Errors:
///   invalid_argument  names the member, its value and its range
///   limit             own_domain, but connections.own_domains is 0
/// and those of Device::find_place() and check(): limit, no_device, system.
[[nodiscard]] Result<ConnectionAttributes> resolve(const Config& config, verbs::Device& device,
                                                   const ConnectionSettings& settings,
                                                   bool through_cm);

/// Checks whether a key may give a peer the rights `asked` if `most` are allowed. `whose` names the
/// source of `most` in the error. Errors: invalid_argument; unsupported (no atomics).
Result<void> check_access(Access most, Access asked, const DeviceInfo& device, const char* whose);

/// Checks that a time-out is 0 or in the range of connections. Errors: invalid_argument.
Result<void> check_timeout(const char* asked, Nanoseconds timeout);

}  // namespace spinwire::config
