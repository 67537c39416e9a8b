// Test helper: how many direct packets a peer sees before publish().
#pragma once

#include <algorithm>
#include <cstdint>

#include "softverbs/lane/direct_lane.h"

namespace softverbs_test {

/// Of so many packets sent after publish(), those in whole groups, which the peer sees.
inline std::uint64_t in_whole_groups(std::uint64_t sent) {
  std::uint64_t seen = 0;
  std::uint32_t group = spinwire::softverbs::kFirstGroup;
  while (seen + group <= sent) {
    seen += group;
    group = std::min(2 * group, spinwire::softverbs::kLargestGroup);
  }
  return seen;
}

}  // namespace softverbs_test
