// Translates settings into the device that they select.
#pragma once

#include "spinwire/clock.h"
#include "spinwire/config.h"
#include "verbs/opened_device.h"

namespace spinwire::engine {

[[nodiscard]] verbs::DeviceWish device_wish(const Config& config);
[[nodiscard]] verbs::DeviceOptions device_options(const Config& config, const Clock& clock);

}  // namespace spinwire::engine
