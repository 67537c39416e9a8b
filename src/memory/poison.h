// Marks free memory for AddressSanitizer, which reports any access to it. Does nothing in other
// builds.
#pragma once

#include <cstddef>

#include "base/sanitizers.h"

#if SPINWIRE_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace spinwire::memory {

inline void poison([[maybe_unused]] const void* data, [[maybe_unused]] std::size_t size) noexcept {
#if SPINWIRE_ASAN
  __asan_poison_memory_region(data, size);
#endif
}

inline void unpoison([[maybe_unused]] const void* data,
                     [[maybe_unused]] std::size_t size) noexcept {
#if SPINWIRE_ASAN
  __asan_unpoison_memory_region(data, size);
#endif
}

}  // namespace spinwire::memory
