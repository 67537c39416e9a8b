// The providers that this build has.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "verbs/provider.h"

namespace spinwire::verbs {

/// The embedded device: same host, same user, no NIC.
const Provider& softverbs_provider() noexcept;
/// The devices of libibverbs: InfiniBand, RoCE, kernel Soft-RoCE.
const Provider& rdmacore_provider() noexcept;

/// The process of this host that owns the embedded device with this GID; 0: it is no such GID.
std::uint32_t process_of_embedded(const std::array<std::uint8_t, 16>& gid) noexcept;

/// All providers, in the order in which a plain device name is searched.
std::span<const Provider* const> providers() noexcept;

}  // namespace spinwire::verbs
