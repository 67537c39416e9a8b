// The slices of a run, and the line that a peer program prints of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "peers/harness/options.h"
#include "peers/harness/placement.h"

namespace spinwire::bench {

/// Nanoseconds per operation, slice by slice.
class Slices {
 public:
  /// A slice between two probes; `preempted`: something else ran on one of the processors.
  void add(double ns, Placement before, Placement after, bool preempted);
  [[nodiscard]] std::string to_json(std::string_view peer, const Options& options, double seconds,
                                    std::uint64_t operations, std::uint64_t bad) const;

 private:
  struct Slice {
    double ns;
    Placement placement;
    bool moved;  ///< the probes before and after it disagree
    bool preempted;
  };

  std::vector<Slice> slices_;
};

}  // namespace spinwire::bench
