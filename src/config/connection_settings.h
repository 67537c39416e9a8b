// The attributes of a connection's queue pair: the engine's settings, overridden by the
// connection's.
#pragma once

#include <cstdint>

#include "spinwire/config.h"
#include "spinwire/connection_settings.h"
#include "verbs/opened_device.h"

namespace spinwire::config {

/// What a connection is made with.
struct ConnectionAttributes {
  verbs::QueuePairOptions queue_pair;
  std::uint32_t mtu = 0;               ///< path MTU wanted, bytes
  std::int32_t psn = -1;               ///< -1: random
  Access access = Access::remote_all;  ///< most rights that a key may give the peer
  bool own_domain = false;             ///< with a protection domain of its own
  LeaseLimits leases;
  bool raw = false;  ///< a raw connection, whose sizes are in `queue_pair`
};

/// The attributes of connections without settings of their own. `config` has passed check() and is
/// limited to what the device can do.
[[nodiscard]] ConnectionAttributes default_attributes(const Config& config,
                                                      const verbs::Device& device);
/// The attributes of a connection with `settings`. `through_cm`: rdma_cm finds port and GID.
/// Errors: invalid_argument naming the member, its value and its range; limit, no_device, system as
/// Device::find_place() and check(); limit for own_domain if connections.own_domains is 0.
[[nodiscard]] Result<ConnectionAttributes> resolve(const Config& config, verbs::Device& device,
                                                   const ConnectionSettings& settings,
                                                   bool through_cm);

/// Checks whether a key may give a peer the rights `asked` where `most` are allowed. `whose` names
/// in the error what allows them. Errors: invalid_argument; unsupported (no atomics).
Result<void> check_access(Access most, Access asked, const DeviceInfo& device, const char* whose);

/// Whether a time-out is 0 or one that a connection may have. Errors: invalid_argument.
Result<void> check_timeout(const char* asked, Nanoseconds timeout);

}  // namespace spinwire::config
