// The lock for atomics on memory that peers cannot map: it lies in shared memory of the process
// that owns the memory and outlives whoever dies holding it. Cold: such an atomic costs two system
// calls anyhow.
#pragma once

#include <atomic>
#include <cstdint>

#include "softverbs/objects.h"

namespace spinwire::softverbs {

/// The lock for a word of the peer's private memory, mapped on first use; null if it cannot be.
std::atomic<std::uint64_t>* lock_of(Peer& peer, std::uint64_t address) noexcept;

/// Names a process for good: its pid, and above it when it was started, which tells it from a later
/// process of the same pid. System calls.
std::uint64_t process_word(std::uint32_t pid) noexcept;

/// Takes the lock in the name of `self` (a process_word), also from a holder that is dead. Tries
/// for microseconds only; false while a living process holds it.
bool take_lock(std::atomic<std::uint64_t>& lock, std::uint64_t self) noexcept;

inline void release_lock(std::atomic<std::uint64_t>& lock) noexcept {
  lock.store(0, std::memory_order_release);
}

}  // namespace spinwire::softverbs
