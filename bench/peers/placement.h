// Where the host has put the two processors just now, told by how long a cache line takes from one
// to the other and back. Virtual processors move, and a round trip between them with them.
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

/// A word that shares no cache line, nor the neighbour that a prefetcher takes along.
struct alignas(256) LonelyWord {
  std::atomic<std::uint64_t> value;
};

enum class Placement : std::uint8_t {
  smt,       ///< two threads of one core
  ccx,       ///< two cores that share their last-level cache
  far,       ///< neither
  together,  ///< no second processor takes part
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

/// Plays the probe with a partner that runs answer_probe; nanoseconds per round trip in the best of
/// several chunks.
inline double ask_probe(LonelyWord& ping, LonelyWord& pong) noexcept {
  std::uint64_t n = ping.value.load(std::memory_order_relaxed);
  double best = 1e12;
  for (int chunk = 0; chunk < kProbeChunks; ++chunk) {
    const double begun = nanoseconds_now();
    for (int i = 0; i < kProbeRounds; ++i) {
      ping.value.store(++n, std::memory_order_release);
      while (pong.value.load(std::memory_order_acquire) != n) {
      }
    }
    best = std::min(best, (nanoseconds_now() - begun) / kProbeRounds);
  }
  return best;
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
