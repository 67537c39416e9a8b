// Whether the hot path samples operations, and polls look for stalls. Always, except in the library
// that `make count` compares with, to know what that costs: see bench/README.md.
#pragma once

namespace spinwire::observe {

#ifdef SPINWIRE_UNOBSERVED
inline constexpr bool kObservesHotPath = false;
#else
inline constexpr bool kObservesHotPath = true;
#endif

}  // namespace spinwire::observe
