// The lock for atomics on memory that peers cannot map. It lies in shared memory of the owning
// process and survives the death of its holder. Cold: such an atomic costs two system calls.
#pragma once

#include <atomic>
#include <cstdint>

#include "softverbs/objects.h"

namespace spinwire::softverbs {

/// The lock for a word of the peer's private memory, mapped on first use; null if it cannot be
/// mapped.
std::atomic<std::uint64_t>* lock_of(Peer& peer, std::uint64_t address) noexcept;

/// Identifies a process by its pid and, in the upper half, its start time, so that a later process
/// with the same pid differs. Makes system calls.
std::uint64_t process_word(std::uint32_t pid) noexcept;

/// Acquires the lock for `self` (a process_word), also from a dead holder. Spins for microseconds
/// at most; false while a living process holds it.
bool acquire_lock(std::atomic<std::uint64_t>& lock, std::uint64_t self) noexcept;

inline void release_lock(std::atomic<std::uint64_t>& lock) noexcept {
  lock.store(0, std::memory_order_release);
}

}  // namespace spinwire::softverbs
