// Maps the memory of slabs: hugepages or ordinary pages, populated and, if configured, locked.
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

/// Hugepages of one size, as the system has them now.
struct HugepageSize {
  std::size_t bytes = 0;       ///< of a page
  std::uint64_t total = 0;     ///< pages that are kept for this use (nr_hugepages)
  std::uint64_t free = 0;      ///< free now, including reserved ones
  std::uint64_t reserved = 0;  ///< of `free`, reserved by mappings
  std::uint64_t growth = 0;    ///< pages that the kernel may make on demand (overcommit)
  bool is_default = false;     ///< the size that vm.nr_hugepages counts
  std::string mount;           ///< where hugetlbfs is mounted for it; empty if nowhere

  /// Pages that can be mapped now.
  [[nodiscard]] std::uint64_t available() const noexcept {
    return (free > reserved ? free - reserved : 0) + growth;
  }
  [[nodiscard]] std::uint64_t pages_for(std::size_t size) const noexcept {
    return size / bytes + (size % bytes != 0 ? 1 : 0);
  }
};

/// The sizes that this machine offers, smallest first; empty if it has no hugepages. Set-up; may
/// throw std::bad_alloc.
[[nodiscard]] std::vector<HugepageSize> hugepage_sizes();

/// The sizes to try for `size` bytes, best first: the largest whose pages suffice and whose last
/// page leaves at most an eighth of the bytes unused. Set-up; may throw std::bad_alloc.
[[nodiscard]] std::vector<HugepageSize> fitting_sizes(std::span<const HugepageSize> sizes,
                                                      std::size_t size);

/// Why hugepages cannot be had for `size` bytes: pages needed, pages free, and the command that
/// provides them. Set-up; may throw std::bad_alloc.
[[nodiscard]] Error missing_hugepages(std::span<const HugepageSize> sizes, std::size_t size);

/// `size` bytes, rounded up to whole pages, zeroed, populated and sealed.
///   require  hugepages or an error
///   prefer   hugepages, else ordinary pages that the kernel is asked to merge; the first fallback
///            of the process is logged as a warning that names the command to run
///   off      ordinary pages
/// Hugepages are never swapped, so locking is done for ordinary pages only:
///   require  locked or an error that names the limits
///   prefer   locked, else a warning
///   off      not locked
/// Set-up. Errors: no_memory, invalid_argument, system.
[[nodiscard]] Result<base::SharedMemory> map_pages(std::size_t size, HugepagePolicy hugepages,
                                                   LockPolicy lock, const std::string& name);

/// Whether the memory lies in hugepages of hugetlbfs.
[[nodiscard]] bool is_hugetlb(const base::SharedMemory& memory) noexcept;

/// Lets the next fallback be logged again. For tests.
void rearm_fallback_warning() noexcept;

}  // namespace spinwire::memory
