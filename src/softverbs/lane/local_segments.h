// State shared by all contexts of this process: one mapping of each context's segment, in place of
// one for each peer, what its keys open, and the locks for atomics. Any thread; takes a lock.
// Set-up.
#pragma once

#include <infiniband/verbs.h>

#include <memory>

#include "base/shared_memory.h"
#include "softverbs/objects.h"

namespace spinwire::softverbs {

/// Registers the segment with this GID for as long as its owner holds it. May throw bad_alloc.
void add_local_segment(const ibv_gid& gid, const LocalSegment& local);

/// The segment with this GID; null if it is not of this process, or gone.
LocalSegment find_local_segment(const ibv_gid& gid) noexcept;

/// The process's table of AtomicLocks, which exists while any context does.
Result<std::shared_ptr<base::SharedMemory>> process_locks();

}  // namespace spinwire::softverbs
