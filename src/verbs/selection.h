// Finds the device, port and GID that the settings mean, and keeps why. Set-up.
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
  /// Of a device, "PROVIDER:DEVICE", or "auto": the best of libibverbs' devices. A plain name is
  /// looked for among the providers in order.
  std::string name = "auto";
  std::uint8_t port = 0;  ///< 0: chosen
  GidWish gid;
};

/// A device that is open, and where on it to be. The taker closes it.
struct Selection {
  const Provider* provider = nullptr;
  ibv_context* context = nullptr;
  std::string name;
  std::uint8_t port = 0;
  ibv_port_attr port_attr{};
  GidEntry gid;
  std::vector<DeviceCandidate> candidates;
};

/// Errors: no_device, naming those that there are, or each that was rejected and why.
Result<Selection> select_device(std::span<const Provider* const> providers, const DeviceWish& wish,
                                const Clock& clock);

/// The same without keeping anything open: what there is, whatever `wish.name` says, and which of
/// it select_device() would take.
std::vector<DeviceCandidate> survey_devices(std::span<const Provider* const> providers,
                                            const DeviceWish& wish, const Clock& clock);

LinkLayer layer_of(const ibv_port_attr& port) noexcept;

/// Why a port in this state cannot be used and what to do about it; empty if it can.
std::string port_trouble(const ibv_port_attr& port);

}  // namespace spinwire::verbs
