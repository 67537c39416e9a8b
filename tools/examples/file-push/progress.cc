#include "progress.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

namespace push {
namespace {

constexpr std::size_t kWidth = 40;

spinwire::Nanoseconds interval(bool terminal) {
  return terminal ? std::chrono::milliseconds(50) : std::chrono::milliseconds(2000);
}

}  // namespace

Progress::Progress(std::string what, std::uint64_t total, const spinwire::Clock& clock)
    : what_(std::move(what)),
      total_(total),
      clock_(clock),
      terminal_(::isatty(STDERR_FILENO) == 1),
      next_(clock, interval(terminal_)) {}

void Progress::update(std::uint64_t done) {
  if (!next_.passed()) return;
  next_ = program::Deadline(clock_, interval(terminal_));
  drawn_ = true;
  draw(done);
}

void Progress::finish(std::uint64_t done) {
  if (!terminal_ || !drawn_) return;
  draw(done);
  fmt::print(stderr, "\n");
}

void Progress::draw(std::uint64_t done) const {
  const double part =
      total_ == 0 ? 1 : static_cast<double>(std::min(done, total_)) / static_cast<double>(total_);
  const double percent = part * 100;
  if (!terminal_) {
    fmt::print(stderr, "{}: {:.0f} % of {} bytes\n", what_, percent, total_);
    return;
  }
  const auto full = static_cast<std::size_t>(part * kWidth);
  fmt::print(stderr, "\r{} [{:#<{}}{:.<{}}] {:3.0f} %", what_, "", full, "", kWidth - full,
             percent);
  std::fflush(stderr);
}

}  // namespace push
