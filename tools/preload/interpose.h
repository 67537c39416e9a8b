// How a definition here overrides that of libibverbs, and calls it.
#pragma once

#include <dlfcn.h>
#include <infiniband/verbs.h>

#include <cerrno>

// The header defines macros for these functions; here the functions are meant.
#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

#define SOFTVERBS_INTERPOSED extern "C" __attribute__((visibility("default")))

/// libibverbs' definition of the same function, for objects of other devices.
#define SOFTVERBS_NEXT(function)                                                \
  ([] {                                                                         \
    static auto* const next =                                                   \
        reinterpret_cast<decltype(&(function))>(::dlsym(RTLD_NEXT, #function)); \
    return next;                                                                \
  }())

namespace spinwire::preload {

template <typename T = void>
T* refuse_with(int error) noexcept {
  errno = error;
  return nullptr;
}

}  // namespace spinwire::preload
