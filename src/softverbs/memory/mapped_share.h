// How much of this process's address space the objects of peers may take. Cold.
#pragma once

#include <cstdint>

namespace spinwire::softverbs {

/// Objects that are mapped, and their bytes.
struct Mapped {
  std::uint64_t objects = 0;
  std::uint64_t bytes = 0;
};

/// The most for all peers of this process: half of the mappings that Linux allows a process, and a
/// quarter of its address space.
inline constexpr Mapped kMostMapped{1u << 15, std::uint64_t{1} << 45};

/// Counts one more object in `own`, what a peer's process has mapped. It may have a quarter of what
/// others leave, so that there is always something left for another one. False: no more. Any
/// thread.
bool take_mapping(Mapped& own, std::uint64_t bytes) noexcept;
void return_mapping(Mapped& own, std::uint64_t bytes) noexcept;

}  // namespace spinwire::softverbs
