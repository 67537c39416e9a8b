#include "base/memory_store.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace spinwire::base {
namespace {

thread_local std::shared_ptr<MemoryStore> store_in_scope;

/// Zeroes the pages that were ever touched; the others do not exist. False if they exceed
/// kMostBytes, or if the kernel does not report them.
bool zero_pages(const SharedMemory& memory) noexcept {
  const auto end = static_cast<off_t>(memory.size());
  std::size_t zeroed = 0;
  for (off_t at = 0; at < end;) {
    const off_t from = ::lseek(memory.fd(), at, SEEK_DATA);
    if (from < 0) return errno == ENXIO;  // nothing further
    at = ::lseek(memory.fd(), from, SEEK_HOLE);
    if (at <= from) return false;
    const auto length = static_cast<std::size_t>(at - from);
    zeroed += length;
    if (zeroed > MemoryStore::kMostBytes) return false;
    std::memset(memory.data() + from, 0, length);
  }
  return true;
}

}  // namespace

MemoryStore::Scope::Scope(std::shared_ptr<MemoryStore> store) noexcept {
  store_in_scope = std::move(store);
}
MemoryStore::Scope::~Scope() { store_in_scope.reset(); }

std::shared_ptr<MemoryStore> MemoryStore::of_thread() noexcept { return store_in_scope; }

SharedMemory MemoryStore::take(std::size_t size) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(kept_.rbegin(), kept_.rend(),
                                  [=](const SharedMemory& each) { return each.size() == size; });
  if (found == kept_.rend()) return {};
  SharedMemory memory = std::move(*found);
  *found = std::move(kept_.back());
  kept_.pop_back();
  return memory;
}

bool MemoryStore::keep(SharedMemory& memory) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (kept_.size() == kept_.capacity() || !zero_pages(memory)) return false;
  kept_.push_back(std::move(memory));
  return true;
}

}  // namespace spinwire::base
