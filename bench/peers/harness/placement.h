// Where the host has put the two processors at the moment, told by how long a cache line takes from
// one to the other and back. A virtual machine's processors move between hyper-threads, cores and
// chips, and a round trip between them changes fivefold with that.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace spinwire::bench {

inline double nanoseconds_now() noexcept {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<double>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

/// A word with cache lines of its own, including the neighbour that a prefetcher loads.
struct alignas(256) LonelyWord {
  std::atomic<std::uint64_t> value;
};

enum class Placement : std::uint8_t {
  smt,         ///< two threads of one core
  ccx,         ///< two cores that share their last-level cache
  far,         ///< neither
  one_thread,  ///< no second processor takes part
};
inline constexpr std::size_t kPlacements = 4;
inline constexpr std::array<const char*, kPlacements> kPlacementNames = {"smt", "ccx", "far",
                                                                         "one"};

constexpr Placement placement_of(double round_trip_ns) noexcept {
  return round_trip_ns < 95    ? Placement::smt
         : round_trip_ns < 230 ? Placement::ccx
                               : Placement::far;
}

inline constexpr int kProbeChunks = 6;
inline constexpr int kProbeRounds = 200;

/// Plays a probe with a partner that runs answer_probe(). Returns nanoseconds per round trip in the
/// best of several chunks.
inline double measure_probe(LonelyWord& ping, const LonelyWord& pong) noexcept {
  std::uint64_t n = ping.value.load(std::memory_order_relaxed);
  double best = 1e12;
  for (int chunk = 0; chunk < kProbeChunks; ++chunk) {
    const double begin = nanoseconds_now();
    for (int i = 0; i < kProbeRounds; ++i) {
      ping.value.store(++n, std::memory_order_release);
      while (pong.value.load(std::memory_order_acquire) != n) {
      }
    }
    best = std::min(best, (nanoseconds_now() - begin) / kProbeRounds);
  }
  return best;
}

/// Whether the partner has begun a probe.
inline bool is_probe_asked(const LonelyWord& ping, const LonelyWord& pong) noexcept {
  return ping.value.load(std::memory_order_relaxed) != pong.value.load(std::memory_order_relaxed);
}

inline void answer_probe(const LonelyWord& ping, LonelyWord& pong) noexcept {
  std::uint64_t n = pong.value.load(std::memory_order_relaxed);
  for (const std::uint64_t end = n + kProbeChunks * kProbeRounds; n != end;) {
    while (ping.value.load(std::memory_order_acquire) != n + 1) {
    }
    pong.value.store(++n, std::memory_order_release);
  }
}

}  // namespace spinwire::bench
