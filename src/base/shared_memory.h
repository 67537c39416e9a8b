// Memory that other processes of the same user can map: an anonymous file, sealed and mapped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/unique_fd.h"
#include "spinwire/status.h"

namespace spinwire::base {

class MemoryStore;

struct SharedMemoryOptions {
  std::string name = "spinwire";  ///< shown in /proc/PID/maps; at most 200 bytes
  std::size_t page_size = 0;      ///< bytes of a hugepage; 0: ordinary pages
  bool populate = true;           ///< false: pages come when touched (sparse)
  bool kernel_populates = true;   ///< false: as on kernels before 5.14, without MADV_POPULATE_WRITE
};

/// A memfd of fixed size, mapped shared for reading and writing. It is sealed against shrinking and
/// growing, so a process that maps it cannot be hit by SIGBUS through a change of size. Zeroed when
/// new. While it lives find_shared_memory() finds it. Move-only. Set-up, all of it.
class SharedMemory {
 public:
  /// `size` is rounded up to whole pages. Errors: invalid_argument; no_memory, which names the
  /// command that provides hugepages when those were asked for; system.
  static Result<SharedMemory> create(std::size_t size, const SharedMemoryOptions& options = {});

  SharedMemory() noexcept = default;
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  /// Unmaps and closes; peers that have mapped it keep the memory until they unmap it.
  ~SharedMemory();

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }  ///< bytes mapped
  [[nodiscard]] std::size_t page_size() const noexcept { return page_size_; }
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  explicit operator bool() const noexcept { return data_ != nullptr; }

 private:
  void reset() noexcept;

  UniqueFd fd_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t page_size_ = 0;
  bool registered_ = false;
  std::weak_ptr<MemoryStore> store_;  ///< that it goes back to; see memory_store.h
};

/// Where registered bytes lie: in which living SharedMemory of this process.
struct SharedMemoryRef {
  int fd = -1;                ///< the owner's; valid as long as the mapping lives
  std::uint64_t offset = 0;   ///< of the asked address within the file
  std::byte* base = nullptr;  ///< start of the mapping, which is the start of the file
  std::size_t size = 0;       ///< bytes of the mapping
};

/// The mapping in which [address, address + length) lies wholly, if there is one. An empty range
/// lies in the mapping that its address lies in. Any thread; takes a lock. Set-up.
[[nodiscard]] std::optional<SharedMemoryRef> find_shared_memory(const void* address,
                                                                std::size_t length) noexcept;

}  // namespace spinwire::base
