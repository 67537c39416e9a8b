// How the device's calls fail: like those of libibverbs, with null and errno. Cold.
#pragma once

#include <errno.h>

#include <cstddef>
#include <new>
#include <string>
#include <utility>

namespace spinwire::softverbs {

/// Sets errno. Null, for calls that return a pointer.
inline std::nullptr_t refuse_with(int error) noexcept {
  errno = error;
  return nullptr;
}
/// Also says why.
inline std::nullptr_t refuse_with(int error, std::string& why, std::string text) noexcept {
  why = std::move(text);
  return refuse_with(error);
}
/// Calls `make`, which returns a pointer; null and ENOMEM without memory.
template <typename Make>
auto or_no_memory(Make&& make) noexcept -> decltype(make()) {
  try {
    return make();
  } catch (const std::bad_alloc&) {
    return refuse_with(ENOMEM);
  }
}

}  // namespace spinwire::softverbs
