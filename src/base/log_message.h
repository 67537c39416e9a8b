// The library's log messages. They go to the callback given to set_log(), or nowhere.
#pragma once

#include <fmt/core.h>

#include <atomic>
#include <cstdint>
#include <utility>

#include "spinwire/log.h"

namespace spinwire::base {

namespace detail {
/// `log_least` while no callback is set: one above `error`.
inline constexpr std::uint8_t kNobody = static_cast<std::uint8_t>(LogLevel::error) + 1;
extern std::atomic<std::uint8_t> log_least;
/// Formats the message and calls the callback. Catches exceptions of both.
void log_message(LogLevel level, fmt::string_view format, fmt::format_args args) noexcept;
}  // namespace detail

/// Whether a callback is set for messages of this level. Hot: one load.
[[nodiscard]] inline bool log_enabled(LogLevel level) noexcept {
  return static_cast<std::uint8_t>(level) >= detail::log_least.load(std::memory_order_relaxed);
}

/// Formats and delivers a message if a callback is set for its level. Any thread; never throws.
/// Cold, but for the test of the level.
template <typename... Args>
void log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) noexcept {
  if (!log_enabled(level)) [[likely]]
    return;
  detail::log_message(level, format, fmt::make_format_args(args...));
}

}  // namespace spinwire::base
