// Chooses device, port and GID by the settings, and records the reasons. Set-up.
#pragma once

#include <infiniband/verbs.h>

#include <span>
#include <string>
#include <vector>

#include "spinwire/clock.h"
#include "spinwire/device.h"
#include "spinwire/status.h"
#include "verbs/gid.h"
#include "verbs/provider.h"

namespace spinwire::verbs {

struct DeviceWish {
  /// A device's name, "PROVIDER:DEVICE", or "auto" for the best of libibverbs' devices. A plain
  /// name is searched in all providers, in order.
  std::string name = "auto";
  std::uint8_t port = 0;  ///< 0: chosen
  GidWish gid;
};

/// An open device with port and GID. The caller closes it.
struct Selection {
  const Provider* provider = nullptr;
  ibv_context* context = nullptr;
  std::string name;
  std::uint8_t port = 0;
  ibv_port_attr port_attr{};
  GidEntry gid;
  std::vector<DeviceCandidate> candidates;
};

/// Opens the best device that `wish` allows. Errors: no_device, with the devices that exist, or
/// with the reason for each rejected one.
Result<Selection> select_device(std::span<const Provider* const> providers, const DeviceWish& wish,
                                const Clock& clock);

/// Lists all candidates, also those that `wish.name` excludes, and marks the one that
/// select_device() would choose. Leaves no device open.
std::vector<DeviceCandidate> survey_devices(std::span<const Provider* const> providers,
                                            const DeviceWish& wish, const Clock& clock);

Guid guid_of(const ibv_device_attr& device) noexcept;
LinkLayer layer_of(const ibv_port_attr& port) noexcept;

/// Why the port cannot be used and what to do about it; empty if it can.
std::string check_port(const ibv_port_attr& port);

}  // namespace spinwire::verbs
