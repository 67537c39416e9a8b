// State shared by all contexts of this process: one mapping of each context's segment, in place of
// one for each peer, and the locks for atomics. Any thread; takes a lock. Set-up.
#pragma once

#include <infiniband/verbs.h>

#include <memory>

#include "base/shared_memory.h"

namespace spinwire::softverbs {

/// Registers the segment with this GID for as long as its owner holds it. May throw bad_alloc.
void add_local_segment(const ibv_gid& gid, const std::shared_ptr<base::SharedMemory>& segment);

/// The segment with this GID; null if it is not of this process, or gone.
std::shared_ptr<base::SharedMemory> find_local_segment(const ibv_gid& gid) noexcept;

/// The table of AtomicLocks, the same for all contexts as long as there are any.
Result<std::shared_ptr<base::SharedMemory>> process_locks();

}  // namespace spinwire::softverbs
