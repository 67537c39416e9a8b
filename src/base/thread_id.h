// A word that tells the calling thread from every other running thread.
#pragma once

#include <cstdint>

namespace spinwire::base {

/// The thread pointer: unique among the running threads of the process, never 0, low bit 0. A new
/// thread may get the word of one that has ended. In a forked child the forking thread keeps its
/// word. Hot: one register read.
[[nodiscard]] inline std::uintptr_t thread_id() noexcept {
#if defined(__has_builtin) && __has_builtin(__builtin_thread_pointer)
  return reinterpret_cast<std::uintptr_t>(__builtin_thread_pointer());
#else
  alignas(8) static thread_local char anchor;
  return reinterpret_cast<std::uintptr_t>(&anchor);
#endif
}

}  // namespace spinwire::base
