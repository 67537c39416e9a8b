#include "common/perf_progress.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace spinwire::tools {
namespace {

constexpr auto kQuiet = std::chrono::seconds(1);  ///< shorter measurements show nothing
constexpr auto kPeriod = std::chrono::milliseconds(250);

}  // namespace

PerfProgress::PerfProgress() {
  if (::isatty(STDERR_FILENO) == 1) writer_ = std::thread([this] { run(); });
}

PerfProgress::~PerfProgress() {
  if (!writer_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    clear();
    is_stopped_ = true;
  }
  stopped_.notify_one();
  writer_.join();
}

void PerfProgress::begin(std::string what, std::uint64_t total) {
  const std::lock_guard lock(mutex_);
  what_ = std::move(what);
  total_ = total;
  began_ = std::chrono::steady_clock::now();
  report(0);
}

void PerfProgress::end() {
  const std::lock_guard lock(mutex_);
  clear();
  total_ = 0;
}

void PerfProgress::clear() {
  if (std::exchange(is_shown_, false)) fmt::print(stderr, "\r\x1b[K");
}

void PerfProgress::run() {
  std::unique_lock lock(mutex_);
  while (!stopped_.wait_for(lock, kPeriod, [this] { return is_stopped_; })) {
    const auto lasted = std::chrono::steady_clock::now() - began_;
    if (total_ == 0 || lasted < kQuiet) continue;
    const std::uint64_t done = std::min(done_.load(std::memory_order_relaxed), total_);
    fmt::print(stderr, "\r\x1b[K{}: {:.0f}%, {} of {}, {:.0f} s", what_,
               100 * static_cast<double>(done) / static_cast<double>(total_), done, total_,
               std::chrono::duration<double>(lasted).count());
    is_shown_ = true;
  }
}

}  // namespace spinwire::tools
