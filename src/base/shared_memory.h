// Memory that other processes of the same user can map: a sealed anonymous file, and its mapping.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/unique_fd.h"
#include "spinwire/status.h"

namespace spinwire::base {

class MemoryStore;

struct SharedMemoryOptions {
  std::string name = "spinwire";  ///< shown in /proc/PID/maps; at most 200 bytes
  std::size_t page_size = 0;      ///< bytes of a hugepage; 0: ordinary pages
  bool populate = true;           ///< false: pages are allocated when touched (sparse)
  bool kernel_populates = true;   ///< false: as on kernels before 5.14, without MADV_POPULATE_WRITE
};

/// A memfd of fixed size, mapped shared for reading and writing, zeroed when new. It is sealed
/// against shrinking and growing, so a change of size cannot raise SIGBUS in a process that maps
/// it. While it exists, find_shared_memory() finds it. Move-only. All calls are set-up.
class SharedMemory {
 public:
  /// `size` is rounded up to whole pages. Errors: invalid_argument; limit (open files, size of
  /// files); no_memory, which names the command that provides hugepages if they were asked for;
  /// system.
  static Result<SharedMemory> create(std::size_t size, const SharedMemoryOptions& options = {});

  SharedMemory() noexcept = default;
  SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  /// Unmaps and closes; peers that have mapped the memory keep it until they unmap it.
  ~SharedMemory();

  [[nodiscard]] std::byte* data() const noexcept { return mapping_.data; }
  [[nodiscard]] std::size_t size() const noexcept { return mapping_.size; }  ///< bytes mapped
  [[nodiscard]] std::size_t page_size() const noexcept { return mapping_.page_size; }
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  explicit operator bool() const noexcept { return mapping_.data != nullptr; }

 private:
  void reset() noexcept;

  struct Mapping {
    std::byte* data = nullptr;
    std::size_t size = 0;
    std::size_t page_size = 0;
    bool registered = false;  ///< find_shared_memory() finds it
  };

  UniqueFd fd_;
  Mapping mapping_;
  std::weak_ptr<MemoryStore> store_;  ///< the store it returns to; see memory_store.h
};

/// The SharedMemory of this process that holds an address range, and the range's offset.
struct SharedMemoryRef {
  int fd = -1;                ///< the owner's; valid while the mapping exists
  std::uint64_t offset = 0;   ///< of the asked address within the file
  std::byte* base = nullptr;  ///< start of the mapping, which is the start of the file
  std::size_t size = 0;       ///< bytes of the mapping
};

/// Finds the mapping that holds all of [address, address + length), if there is one. An empty range
/// lies in the mapping of its address. Any thread; takes a lock. Set-up.
[[nodiscard]] std::optional<SharedMemoryRef> find_shared_memory(const void* address,
                                                                std::size_t length) noexcept;

}  // namespace spinwire::base
