// Maps the memory of slabs in hugepages or ordinary pages, populated and, if configured, locked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/shared_memory.h"
#include "spinwire/config.h"
#include "spinwire/status.h"

namespace spinwire::memory {

/// The system's hugepages of one size, at the time of the call.
struct HugepageSize {
  std::size_t bytes = 0;       ///< page size
  std::uint64_t total = 0;     ///< persistent pages (nr_hugepages)
  std::uint64_t free = 0;      ///< free pages, including reserved ones
  std::uint64_t reserved = 0;  ///< pages of `free` that mappings have reserved
  std::uint64_t growth = 0;    ///< pages that the kernel may add on demand (overcommit)
  bool is_default = false;     ///< the size that vm.nr_hugepages counts
  std::string mount;           ///< mount point of hugetlbfs for this size; empty if none

  /// Pages that can be mapped now.
  [[nodiscard]] std::uint64_t available() const noexcept {
    return (free > reserved ? free - reserved : 0) + growth;
  }
  [[nodiscard]] std::uint64_t pages_for(std::size_t size) const noexcept {
    return size / bytes + (size % bytes != 0 ? 1 : 0);
  }
};

/// The sizes that this machine offers, smallest first; empty if it has no hugepages. May throw
/// std::bad_alloc. Set-up.
[[nodiscard]] std::vector<HugepageSize> hugepage_sizes();

/// The sizes to try for `size` bytes, largest first: those with enough pages that waste at most an
/// eighth of `size`. The smallest size may waste more. May throw std::bad_alloc. Set-up.
[[nodiscard]] std::vector<HugepageSize> fitting_sizes(std::span<const HugepageSize> sizes,
                                                      std::size_t size);

/// The Error for hugepages missing for `size` bytes: pages needed, pages free, and the command that
/// provides them. May throw std::bad_alloc. Set-up.
[[nodiscard]] Error missing_hugepages(std::span<const HugepageSize> sizes, std::size_t size);

/// Maps `size` bytes, rounded up to whole pages, zeroed, populated and sealed.
///   require  hugepages or an error
///   prefer   hugepages, else ordinary pages that the kernel is asked to merge; the first fallback
///            of the process is logged as a warning that names the command to run
///   off      ordinary pages
/// Hugepages are never swapped, so only ordinary pages are locked:
///   require  locked or an error that names the limits
///   prefer   locked, else a warning
///   off      not locked
/// Ordinary pages that this machine or its cgroup does not have are refused before one is touched.
/// Errors: no_memory, limit, invalid_argument, system. Set-up.
[[nodiscard]] Result<base::SharedMemory> map_pages(std::size_t size, HugepagePolicy hugepages,
                                                   LockPolicy lock, const std::string& name);

/// Whether the memory lies in hugepages of hugetlbfs.
[[nodiscard]] bool is_hugetlb(const base::SharedMemory& memory) noexcept;

/// Logs the next fallback again. For tests.
void rearm_fallback_warning() noexcept;

}  // namespace spinwire::memory
