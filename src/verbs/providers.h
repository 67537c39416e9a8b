// The providers that this build has.
#pragma once

#include "verbs/provider.h"

namespace spinwire::verbs {

/// The embedded device: same host, same user, no NIC.
const Provider& softverbs_provider() noexcept;

}  // namespace spinwire::verbs
