// What the slices of a comparison tell: medians, ratios, a table or JSON.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "peers/placement.h"

namespace spinwire::bench {

inline constexpr std::size_t kPeers = 4;
enum PeerIndex : std::size_t { kRing, kUcx, kSpinwire, kCalls };

inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// The slices of one way to run, by peer and placement; each is nanoseconds per round trip.
struct Comparison {
  const char* mode = "";
  std::uint32_t window = 0;
  std::array<std::array<std::vector<double>, kPlacements>, kPeers> slices;
  std::uint64_t moved = 0;      ///< set aside: the probes around them disagree
  std::uint64_t preempted = 0;  ///< set aside: something else ran on one of the processors

  [[nodiscard]] std::size_t fewest(std::size_t placement) const {
    std::size_t least = ~std::size_t{0};
    for (const auto& peer : slices) least = std::min(least, peer[placement].size());
    return least;
  }
  [[nodiscard]] std::size_t best_class() const {
    std::size_t best = 0;
    for (std::size_t p = 0; p < kPlacements; ++p) {
      if (fewest(p) > fewest(best)) best = p;
    }
    return best;
  }
};

struct Row {
  std::size_t count;
  std::array<double, kPeers> ns;
  double to_ring;       ///< spinwire / ring
  double ucx_relation;  ///< ucx / spinwire
  double ucx_to_call;   ///< ucx / spinwire's remote calls
};
inline Row row_of(const Comparison& c, std::size_t placement) {
  Row row{c.fewest(placement), {}, 0, 0, 0};
  for (std::size_t p = 0; p < kPeers; ++p) row.ns[p] = median(c.slices[p][placement]);
  if (row.count != 0) {
    row.to_ring = row.ns[kSpinwire] / row.ns[kRing];
    row.ucx_relation = row.ns[kUcx] / row.ns[kSpinwire];
    row.ucx_to_call = row.ns[kUcx] / row.ns[kCalls];
  }
  return row;
}

inline void print_head(bool json) {
  if (json) return;
  fmt::print("ns per round trip of 32 bytes, medians of slices in which nothing else ran\n\n");
  fmt::print("{:<14} {:>6} {:<5} {:>6} {:>8} {:>8} {:>9} {:>8} {:>14} {:>13} {:>9}\n", "mode",
             "window", "cores", "slices", "ring", "ucx", "spinwire", "calls", "spinwire/ring",
             "ucx/spinwire", "ucx/calls");
}

/// One row, or JSON line, per placement that was met with every peer.
inline void print(const Comparison& c, std::size_t wanted, bool json) {
  bool any = false;
  for (std::size_t p = 0; p < kPlacements; ++p) {
    const Row r = row_of(c, p);
    if (r.count == 0) continue;
    any = true;
    if (json) {
      fmt::print(
          "{{\"mode\":\"{}\",\"window\":{},\"cores\":\"{}\",\"slices\":{},\"enough\":{},"
          "\"ring_ns\":{:.1f},\"ucx_ns\":{:.1f},\"spinwire_ns\":{:.1f},\"call_ns\":{:.1f},"
          "\"spinwire_to_ring\":{:.3f},\"ucx_to_spinwire\":{:.3f},\"ucx_to_call\":{:.3f},"
          "\"moved\":{},\"preempted\":{}}}\n",
          c.mode, c.window, kPlacementNames[p], r.count, r.count >= wanted, r.ns[kRing], r.ns[kUcx],
          r.ns[kSpinwire], r.ns[kCalls], r.to_ring, r.ucx_relation, r.ucx_to_call, c.moved,
          c.preempted);
    } else {
      fmt::print(
          "{:<14} {:>6} {:<5} {:>6} {:>8.1f} {:>8.1f} {:>9.1f} {:>8.1f} {:>14.2f} {:>13.2f} "
          "{:>9.2f}{}\n",
          c.mode, c.window, kPlacementNames[p], r.count, r.ns[kRing], r.ns[kUcx], r.ns[kSpinwire],
          r.ns[kCalls], r.to_ring, r.ucx_relation, r.ucx_to_call, r.count < wanted ? "  few" : "");
    }
  }
  if (!json && (!any || c.moved + c.preempted != 0)) {
    fmt::print("{:<14} {:>6} set aside: {} slices preempted, {} while the cores moved\n", c.mode,
               c.window, c.preempted, c.moved);
  }
  std::fflush(stdout);
}

}  // namespace spinwire::bench
