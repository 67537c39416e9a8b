// Shows how far a measurement is.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

namespace spinwire::tools {

/// Writes a line to stderr, if that is a terminal, from the first second of a measurement on. A
/// thread of its own writes it, so no measured operation waits for the terminal. Create it before
/// the process is pinned to a CPU: the thread may then use another one.
class PerfProgress {
 public:
  PerfProgress();
  PerfProgress(const PerfProgress&) = delete;
  PerfProgress& operator=(const PerfProgress&) = delete;
  ~PerfProgress();

  /// A measurement of `total` operations begins.
  void begin(std::string what, std::uint64_t total);
  /// So many operations are done. One relaxed store.
  void report(std::uint64_t done) noexcept { done_.store(done, std::memory_order_relaxed); }
  /// The measurement is over: clears the line.
  void end();

 private:
  void run();
  void clear();

  std::atomic<std::uint64_t> done_{0};
  std::mutex mutex_;  ///< of what follows, and of the line
  std::condition_variable stopped_;
  bool is_stopped_ = false;
  bool is_shown_ = false;
  std::string what_;
  std::uint64_t total_ = 0;  ///< 0: nothing is measured
  std::chrono::steady_clock::time_point began_;
  std::thread writer_;
};

}  // namespace spinwire::tools
