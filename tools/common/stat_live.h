// The terminal of spinwire-stat's live view.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace spinwire::tools {

struct ScreenSize {
  std::size_t lines = 0;  ///< 0: stdout is no terminal
  std::size_t width = 0;
};
/// Makes the text of a screen of this size; `reads_again`, or what was read for the last one.
/// Empty: the view ends.
using DrawScreen = std::function<std::string(ScreenSize, bool reads_again)>;
enum class KeyMeans : std::uint8_t { nothing, redraw, quit };
/// What a key does.
using OnKey = std::function<KeyMeans(char)>;

/// Draws every `interval`, and after keys that change what is shown, `count` times (0: without
/// end), until a stop signal or a key that quits. In a terminal it replaces the screen and restores
/// it in the end; else it prints one text after the other. Returns false if `draw` ended the view.
bool show_live(const DrawScreen& draw, const OnKey& on_key, std::chrono::nanoseconds interval,
               std::size_t count);

}  // namespace spinwire::tools
