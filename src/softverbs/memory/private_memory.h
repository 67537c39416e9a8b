// Memory of a peer's process that cannot be mapped: it is copied by the kernel. Cold.
#pragma once

#include <cstddef>
#include <cstdint>

#include "softverbs/lane/lane_cursor.h"
#include "softverbs/memory/remote_access.h"

namespace spinwire::softverbs {

/// Copies `length` bytes between elements of ours and the peer's memory at `address`. False and
/// errno: ESRCH: the process has ended; EACCES, EPERM: the kernel forbids it, which is logged;
/// EFAULT: not all of it is mapped there.
bool copy_private_memory(Peer& peer, std::uint64_t address, const ibv_sge* sges,
                         std::uint32_t count, std::size_t length, Copy direction) noexcept;

}  // namespace spinwire::softverbs
