// Verbs that the embedded device does not have: the one place where they would be plugged in.
#pragma once

#include <infiniband/verbs.h>

#include <cerrno>

namespace spinwire::preload::later {

inline int modify_srq(ibv_srq*, ibv_srq_attr*, int) noexcept { return EOPNOTSUPP; }
inline int query_srq(ibv_srq*, ibv_srq_attr*) noexcept { return EOPNOTSUPP; }
inline ibv_mw* alloc_mw(ibv_pd*, ibv_mw_type) noexcept {
  errno = EOPNOTSUPP;
  return nullptr;
}
inline int dealloc_mw(ibv_mw*) noexcept { return EOPNOTSUPP; }
inline ibv_ah* create_ah(ibv_pd*, ibv_ah_attr*) noexcept {
  errno = EOPNOTSUPP;
  return nullptr;
}
inline int destroy_ah(ibv_ah*) noexcept { return EOPNOTSUPP; }

}  // namespace spinwire::preload::later
