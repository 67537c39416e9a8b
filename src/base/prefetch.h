// Prefetching cache lines that are about to be written. Hot.
#pragma once

namespace spinwire::base {

/// Takes the cache line of `at` from other processors, so that a store to it does not wait. The
/// compiler's own prefetch for writing reads the line only, unless it builds for newer processors.
[[gnu::always_inline]] inline void prefetch_to_write(const void* at) noexcept {
#if defined(__x86_64__)
  asm volatile("prefetchw %0"
               :
               : "m"(*static_cast<const char*>(at)));  // NOLINT(hicpp-no-assembler)
#else
  __builtin_prefetch(at, 1);
#endif
}

}  // namespace spinwire::base
