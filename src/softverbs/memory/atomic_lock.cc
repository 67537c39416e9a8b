#include "softverbs/memory/atomic_lock.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/unique_fd.h"
#include "softverbs/lane/attached_peer.h"
#include "softverbs/lane/local_segments.h"
#include "softverbs/memory/remote_access.h"

namespace spinwire::softverbs {
namespace {

/// Low bits of a process's start time; 0 if it cannot be read.
std::uint32_t start_time(std::uint32_t pid) noexcept {
  char text[1024];
  std::snprintf(text, sizeof text, "/proc/%u/stat", pid);
  const base::UniqueFd fd(::open(text, O_RDONLY | O_CLOEXEC));
  const ssize_t n = fd ? read(fd.get(), text, sizeof text - 1) : 0;
  text[std::max<ssize_t>(n, 0)] = '\0';
  // The name, in parentheses, may contain any byte; the start time is the 20th field after it.
  const char* at = std::strrchr(text, ')');
  for (int field = 0; at != nullptr && field < 20; ++field) at = std::strchr(at + 1, ' ');
  return at == nullptr ? 0 : static_cast<std::uint32_t>(std::strtoull(at, nullptr, 10));
}

/// Whether the process that holds the lock has ended.
bool holder_dead(std::uint64_t holder) noexcept {
  const auto pid = static_cast<std::uint32_t>(holder);
  const auto started = static_cast<std::uint32_t>(holder >> 32);
  if (process_ended(pid)) return true;
  const std::uint32_t now_there = start_time(pid);
  return now_there != 0 && started != 0 && now_there != started;
}

AtomicLock* lock_table(Peer& peer) noexcept {
  if (peer.same_process) return reinterpret_cast<AtomicLock*>(peer.context->locks->data());
  const ObjectEntry& entry = peer.segment->objects[kLockObject];
  const std::uint32_t generation = entry.generation.load(std::memory_order_acquire);
  const MappedObject* table = object_of(peer, kLockObject, generation);
  if (table == nullptr || table->size < kAtomicLocks * sizeof(AtomicLock)) return nullptr;
  return reinterpret_cast<AtomicLock*>(table->base);
}

}  // namespace

std::atomic<std::uint64_t>* lock_of(Peer& peer, std::uint64_t address) noexcept {
  AtomicLock* table = lock_table(peer);
  return table == nullptr ? nullptr : &table[address / sizeof(address) % kAtomicLocks].holder;
}

std::uint64_t process_word(std::uint32_t pid) noexcept {
  return std::uint64_t{start_time(pid)} << 32 | pid;
}

bool acquire_lock(std::atomic<std::uint64_t>& lock, std::uint64_t self) noexcept {
  constexpr int kSpins = 500;
  std::uint64_t holder = 0;
  for (int i = 0; i < kSpins; ++i) {
    holder = lock.load(std::memory_order_relaxed);
    if (holder == 0 && lock.compare_exchange_strong(holder, self, std::memory_order_acquire))
      return true;
    __builtin_ia32_pause();
  }
  // Only one process can replace a dead holder's word, because that word never returns.
  return holder != 0 && holder_dead(holder) &&
         lock.compare_exchange_strong(holder, self, std::memory_order_acquire);
}

}  // namespace spinwire::softverbs
