// The options of spinwire-perf.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "common/perf_protocol.h"
#include "spinwire/clock.h"
#include "spinwire/config.h"
#include "spinwire/operation.h"

namespace spinwire::tools {

/// When operations of this window reach the device.
constexpr Post post_of(Post asked, std::uint32_t window) noexcept {
  if (asked != Post::automatic) return asked;
  return window == 1 ? Post::now : Post::defer;
}

struct PerfOptions {
  static constexpr std::uint32_t kMostClients = 64;

  PerfTest test = PerfTest::lat;
  PerfOp op = PerfOp::send;
  std::uint64_t size = 0;        ///< bytes
  std::uint32_t window = 0;      ///< operations in flight
  std::uint64_t count = 0;       ///< measured operations
  std::uint64_t warmup = 0;      ///< operations before the measurement
  std::uint64_t reply_size = 0;  ///< rpc: bytes
  std::uint32_t batch = 1;       ///< rpc: calls that are sent together
  std::uint32_t sessions = 1;    ///< rpc: sessions that share the calls
  bool symmetric = false;        ///< rpc: the server calls as well
  bool prefetch = true;          ///< rpc: the next session's records, with more than the window
  Post post = Post::automatic;   ///< automatic: deferred, unless the window is 1
  std::string host;              ///< empty: serve
  std::string bind;
  int port = 0;
  Nanoseconds wait{};                    ///< for the server to come up
  int cpu = -1;                          ///< -1: any
  std::uint32_t clients = kMostClients;  ///< served at once
  bool once = false;
  bool one_thread = false;
  bool json = false;
  bool all_sizes = false;  ///< one measurement for each power of two
  bool histogram = false;  ///< draw the durations
  std::string hdr;         ///< file for the durations; empty: none
  Config config;
};

/// A measurement ends after this long without progress.
inline constexpr Nanoseconds kProgressTimeout = std::chrono::seconds(30);

}  // namespace spinwire::tools
