// Shows the progress of a transfer on stderr.
#pragma once

#include <cstdint>
#include <string>

#include "program.h"

namespace push {

/// A bar that is redrawn on a terminal; elsewhere a line every other second.
class Progress {
 public:
  Progress(std::string what, std::uint64_t total, const spinwire::Clock& clock);
  /// Draws if a redraw is due.
  void update(std::uint64_t done);
  /// Completes the bar, if one was drawn.
  void finish(std::uint64_t done);

 private:
  void draw(std::uint64_t done) const;

  std::string what_;
  std::uint64_t total_;
  spinwire::Clock clock_;
  bool terminal_;
  bool drawn_ = false;
  program::Deadline next_;
};

}  // namespace push
