// How much memory this process can still take, before the kernel ends a process for want of it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "spinwire/status.h"

namespace spinwire::base {

/// Where the kernel tells; tests give other folders.
struct MemoryFiles {
  std::string proc = "/proc";
  std::string cgroup = "/sys/fs/cgroup";
};

struct AvailableMemory {
  static constexpr std::uint64_t kUnlimited = ~std::uint64_t{0};

  std::uint64_t bytes = kUnlimited;
  std::string found;  ///< the limit that is reached first, and its use; for an Error
};

/// The least that the machine, the cgroups of this process (version 1 or 2) and its limit on
/// address space leave. Memory of caches counts as available, and so does swap space. A limit that
/// cannot be read does not count. May throw std::bad_alloc. Set-up.
[[nodiscard]] AvailableMemory available_memory(const MemoryFiles& files = {});

/// Checks that `bytes` more can be taken. Other processes may take memory at the same time. Errors:
/// no_memory. May throw std::bad_alloc. Set-up.
[[nodiscard]] Result<void> check_available_memory(std::uint64_t bytes, std::string_view asked,
                                                  std::string_view remedy,
                                                  const MemoryFiles& files = {});

/// Checks that the records of a large table can be taken. Throws NotEnoughMemory, or
/// std::bad_alloc. Set-up.
void require_record_memory(std::uint64_t bytes);

}  // namespace spinwire::base
