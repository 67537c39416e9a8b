// Copies memory of a peer's process that cannot be mapped, through the kernel. Cold.
#pragma once

#include <cstddef>
#include <cstdint>

#include "softverbs/lane/lane_data.h"
#include "softverbs/memory/remote_access.h"

namespace spinwire::softverbs {

/// Copies `length` bytes between local elements and the peer's memory at `address`. On failure
/// returns false and sets errno. ESRCH: the process has ended; EACCES, EPERM: the kernel forbids
/// the access, which is logged; EFAULT: the range is not wholly mapped.
bool copy_private_memory(Peer& peer, std::uint64_t address, const ibv_sge* sges,
                         std::uint32_t count, std::size_t length, Copy direction) noexcept;

}  // namespace spinwire::softverbs
