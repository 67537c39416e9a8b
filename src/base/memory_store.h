// Reuses the memory of closed engines for later ones.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "base/shared_memory.h"

namespace spinwire::base {

/// Keeps released sparse memory for the next request of the same size: new memory costs a file, a
/// mapping and a fault for every page. Kept memory is zeroed, so it equals new memory. Use it only
/// for engines that no other process connects to, such as those of simulations: a process that
/// still has the memory mapped would see its later contents. Any thread.
class MemoryStore {
 public:
  /// Keeps up to `most` pieces. A piece with more than kMostBytes in use is not kept: zeroing it
  /// would cost more than it saves.
  explicit MemoryStore(std::size_t most) { kept_.reserve(most); }
  static constexpr std::size_t kMostBytes = std::size_t{8} << 20;

  /// While it exists, sparse memory that its thread makes comes from the store and returns to it.
  class Scope {
   public:
    explicit Scope(std::shared_ptr<MemoryStore> store) noexcept;
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope();
  };
  /// Null outside of a Scope.
  [[nodiscard]] static std::shared_ptr<MemoryStore> of_thread() noexcept;

  /// Takes a piece out; empty if the store has none of that size.
  [[nodiscard]] SharedMemory take(std::size_t size) noexcept;
  /// Stores `memory`. False if it is not to be kept; `memory` is then unchanged, but for its
  /// contents.
  bool keep(SharedMemory& memory) noexcept;

 private:
  std::mutex mutex_;
  std::vector<SharedMemory> kept_;
};

}  // namespace spinwire::base
