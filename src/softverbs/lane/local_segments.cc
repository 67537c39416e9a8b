#include "softverbs/lane/local_segments.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "base/process_wide.h"
#include "softverbs/context_gid.h"
#include "softverbs/lane/segment.h"

namespace spinwire::softverbs {
namespace {

struct Known {
  ibv_gid gid;
  std::weak_ptr<base::SharedMemory> segment;
  std::weak_ptr<const OwnRegion[]> regions;
  std::weak_ptr<const QueuePairRights[]> queue_pairs;
  std::weak_ptr<LocalAccesses> accesses;
  std::weak_ptr<WakePipe> wake_pipe;
};

struct Registry : base::ProcessWide {
  std::vector<Known> all;
  std::weak_ptr<base::SharedMemory> locks;

  /// The child makes its own table of locks: its parent's guard other memory.
  void after_fork() noexcept { locks.reset(); }
};

Registry& registry() noexcept { return base::process_wide<Registry>(); }

}  // namespace

void add_local_segment(const ibv_gid& gid, const LocalSegment& local) {
  Registry& known = registry();
  const std::lock_guard<std::mutex> lock(known.mutex);
  std::erase_if(known.all, [](const Known& k) { return k.segment.expired(); });
  known.all.push_back(
      {gid, local.segment, local.regions, local.queue_pairs, local.accesses, local.wake_pipe});
}

Result<std::shared_ptr<base::SharedMemory>> process_locks() {
  Registry& known = registry();
  const std::lock_guard<std::mutex> lock(known.mutex);
  if (auto locks = known.locks.lock()) return locks;
  base::SharedMemoryOptions options;
  options.name = "spinwire-locks";
  auto made = base::SharedMemory::create(kAtomicLocks * sizeof(AtomicLock), options);
  if (!made) return tl::unexpected(made.error());
  auto locks = std::make_shared<base::SharedMemory>(std::move(*made));
  known.locks = locks;
  return locks;
}

LocalSegment find_local_segment(const ibv_gid& gid) noexcept {
  Registry& known = registry();
  const std::lock_guard<std::mutex> lock(known.mutex);
  for (const Known& k : known.all) {
    if (same_gid(k.gid, gid))
      return {k.segment.lock(), k.regions.lock(), k.queue_pairs.lock(), k.accesses.lock(),
              k.wake_pipe.lock()};
  }
  return {};
}

}  // namespace spinwire::softverbs
