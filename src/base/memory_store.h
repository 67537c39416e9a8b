// Memory of engines that are gone, for the next ones.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "base/shared_memory.h"

namespace spinwire::base {

/// Sparse memory that was dropped, for the next of its size: made anew it costs a file, a mapping
/// and a fault for every page. It is zeroed before it is kept, so that nobody can tell it from new
/// memory. For engines that follow each other in a process, as those of simulations do, and that no
/// other process meets: who has such memory mapped would see what becomes of it. Any thread.
class MemoryStore {
 public:
  /// Keeps so many pieces, but none of which more than kMostBytes were in use: zeroing them would
  /// cost more than it saves.
  explicit MemoryStore(std::size_t most) { kept_.reserve(most); }
  static constexpr std::size_t kMostBytes = std::size_t{8} << 20;

  /// While one lives, sparse memory that its thread makes comes from the store, and goes back to
  /// it.
  class Scope {
   public:
    explicit Scope(std::shared_ptr<MemoryStore> store) noexcept;
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope();
  };
  /// Null outside of a Scope.
  [[nodiscard]] static std::shared_ptr<MemoryStore> of_thread() noexcept;

  /// Empty if there is none of that size.
  [[nodiscard]] SharedMemory take(std::size_t size) noexcept;
  /// False, and `memory` as it was but for its bytes, if it is not to be kept.
  bool keep(SharedMemory& memory) noexcept;

 private:
  std::mutex mutex_;
  std::vector<SharedMemory> kept_;
};

}  // namespace spinwire::base
