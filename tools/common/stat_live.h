// The terminal of spinwire-stat's live view.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>

namespace spinwire::tools {

struct ScreenSize {
  std::size_t lines = 0;  ///< 0: stdout is no terminal
  std::size_t width = 0;
};
/// Makes the text of a screen of this size; empty: the view ends.
using DrawScreen = std::function<std::string(ScreenSize)>;

/// Draws every `interval`, `count` times (0: without end), until a stop signal or the key q. In a
/// terminal it replaces the screen and restores it in the end; else it prints one text after the
/// other. Returns false if `draw` ended the view.
bool show_live(const DrawScreen& draw, std::chrono::nanoseconds interval, std::size_t count);

}  // namespace spinwire::tools
