// Where the library's messages go. It never prints: without a callback they are dropped.
#pragma once

#include <cstdint>
#include <string_view>

#include "spinwire/callback.h"
#include "spinwire/export.h"

namespace spinwire {

enum class LogLevel : std::uint8_t { debug, info, warning, error };

using LogCallback = Callback<void(LogLevel, std::string_view)>;

/// Sets the process-wide receiver of messages at `least` or above; an empty callback drops them.
/// Set-up: call it before the first engine is opened. The callback may run on any thread that
/// calls the library and must not call it back.
SPINWIRE_API void set_log(LogCallback callback, LogLevel least = LogLevel::warning) noexcept;

}  // namespace spinwire
