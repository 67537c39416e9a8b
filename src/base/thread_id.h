// A word that tells the calling thread apart from every other living one.
#pragma once

#include <cstdint>

namespace spinwire::base {

/// The thread pointer: unique among the living threads of the process, never 0, low bit 0. A thread
/// made after another has ended may get the same word. In a forked child the forking thread keeps
/// its word. Hot: one register read.
[[nodiscard]] inline std::uintptr_t thread_id() noexcept {
#if defined(__has_builtin) && __has_builtin(__builtin_thread_pointer)
  return reinterpret_cast<std::uintptr_t>(__builtin_thread_pointer());
#else
  alignas(8) static thread_local char anchor;
  return reinterpret_cast<std::uintptr_t>(&anchor);
#endif
}

}  // namespace spinwire::base
