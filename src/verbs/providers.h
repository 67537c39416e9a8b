// The providers that this build has.
#pragma once

#include <span>

#include "verbs/provider.h"

namespace spinwire::verbs {

/// The embedded device: same host, same user, no NIC.
const Provider& softverbs_provider() noexcept;
/// The devices of libibverbs: InfiniBand, RoCE, kernel Soft-RoCE.
const Provider& rdmacore_provider() noexcept;

/// All providers, in the order in which a plain device name is searched.
std::span<const Provider* const> providers() noexcept;

}  // namespace spinwire::verbs
