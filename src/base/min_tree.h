// Numbers at fixed positions, searched by value. A tree of minima in one array.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <vector>

namespace spinwire::base {

/// `size` numbers, each kNone at first. set() and searches take O(log size) and allocate nothing.
/// One thread.
class MinTree {
 public:
  /// A position without a number; greater than every number.
  static constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();

  /// May throw std::bad_alloc. Set-up.
  explicit MinTree(std::uint32_t size)
      : leaves_(std::bit_ceil(std::max(size, 1u))), nodes_(2 * std::size_t{leaves_}, kNone) {}

  [[nodiscard]] std::uint64_t at(std::uint32_t position) const noexcept {
    return nodes_[leaves_ + position];
  }
  void set(std::uint32_t position, std::uint64_t value) noexcept {
    std::uint32_t node = leaves_ + position;
    nodes_[node] = value;
    while (node > 1) {
      node /= 2;
      const std::uint64_t least = std::min(nodes_[2 * node], nodes_[2 * node + 1]);
      if (nodes_[node] == least) return;
      nodes_[node] = least;
    }
  }
  [[nodiscard]] std::uint64_t least() const noexcept { return nodes_[1]; }

  /// The first position whose number is at most `value`. least() must be at most `value`.
  [[nodiscard]] std::uint32_t first_at_most(std::uint64_t value) const noexcept {
    std::uint32_t node = 1;
    while (node < leaves_) node = 2 * node + (nodes_[2 * node] <= value ? 0 : 1);
    return node - leaves_;
  }
  /// The position of the least number of [begin, end), which is not empty; of equal numbers, one.
  [[nodiscard]] std::uint32_t least_of(std::uint32_t begin, std::uint32_t end) const noexcept {
    std::uint32_t from = leaves_ + begin, to = leaves_ + end, best = from;
    const auto compare = [&](std::uint32_t node) {
      if (nodes_[node] < nodes_[best]) best = node;
    };
    for (; from < to; from /= 2, to /= 2) {  // the nodes that cover the range
      if (from % 2 == 1) compare(from++);
      if (to % 2 == 1) compare(--to);
    }
    while (best < leaves_) best = 2 * best + (nodes_[2 * best] == nodes_[best] ? 0 : 1);
    return best - leaves_;
  }

  /// Whether each node is the least of the two below it. For audits.
  [[nodiscard]] bool is_consistent() const noexcept {
    for (std::uint32_t node = 1; node < leaves_; ++node) {
      if (nodes_[node] != std::min(nodes_[2 * node], nodes_[2 * node + 1])) return false;
    }
    return true;
  }

 private:
  std::uint32_t leaves_;              ///< a power of two
  std::vector<std::uint64_t> nodes_;  ///< [1]: the root; below node n: 2n and 2n + 1
};

}  // namespace spinwire::base
