// From settings, the engine's and a connection's, to the attributes of a queue pair.
#pragma once

#include "agent/engine_context.h"
#include "spinwire/config.h"
#include "spinwire/connection_settings.h"
#include "verbs/device.h"

namespace spinwire::engine {

/// What connections have whose settings say nothing. `config` has been checked, and corrected to
/// what the device has.
[[nodiscard]] agent::Attributes default_attributes(const Config& config,
                                                   const verbs::Device& device);
/// The same with what `settings` give. `through_cm`: rdma_cm finds the place. Errors:
/// invalid_argument naming the member, what was asked and its range; limit, no_device, system as
/// Device::find_place() and check(); limit also for own_domain where none is allowed.
[[nodiscard]] Result<agent::Attributes> resolve(const Config& config, verbs::Device& device,
                                                const ConnectionSettings& settings,
                                                bool through_cm);

/// Whether a key may give a peer rights `asked` where `most` are allowed; `whose` is for the error.
/// Errors: invalid_argument; unsupported (the device has no atomics).
Result<void> check_access(Access most, Access asked, const DeviceInfo& device, const char* whose);

}  // namespace spinwire::engine
