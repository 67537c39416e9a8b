#include "softverbs/lane/local_segments.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <vector>

#include "softverbs/context_gid.h"
#include "softverbs/lane/segment.h"

namespace spinwire::softverbs {
namespace {

struct Known {
  ibv_gid gid;
  std::weak_ptr<base::SharedMemory> segment;
};

struct Registry {
  std::mutex mutex;
  std::vector<Known> all;
  std::weak_ptr<base::SharedMemory> locks;
};

/// Never destroyed, as contexts may outlive other statics. Locked across a fork, so that a child
/// finds it unlocked. A child makes locks of its own: those of its parent guard other words.
Registry& registry() noexcept {
  alignas(Registry) static std::byte storage[sizeof(Registry)];
  static Registry* const instance = [] {
    auto* made = new (storage) Registry;
    ::pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                     [] {
                       registry().locks.reset();
                       registry().mutex.unlock();
                     });
    return made;
  }();
  return *instance;
}

}  // namespace

void add_local_segment(const ibv_gid& gid, const std::shared_ptr<base::SharedMemory>& segment) {
  Registry& known = registry();
  const std::lock_guard<std::mutex> lock(known.mutex);
  std::erase_if(known.all, [](const Known& k) { return k.segment.expired(); });
  known.all.push_back({gid, segment});
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

std::shared_ptr<base::SharedMemory> find_local_segment(const ibv_gid& gid) noexcept {
  Registry& known = registry();
  const std::lock_guard<std::mutex> lock(known.mutex);
  for (const Known& k : known.all) {
    if (same_gid(k.gid, gid)) return k.segment.lock();
  }
  return nullptr;
}

}  // namespace spinwire::softverbs
