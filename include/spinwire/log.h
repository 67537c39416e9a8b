// The library's log. It never prints: without a callback, messages are dropped.
#pragma once

#include <cstdint>
#include <string_view>

#include "spinwire/callback.h"
#include "spinwire/export.h"

namespace spinwire {

/// Importance of a message of the library.
enum class LogLevel : std::uint8_t {
  debug,    ///< details, such as a device's events of single connections
  info,     ///< what happens in good order: an engine opens, a peer is refused
  warning,  ///< something works worse than asked, or a peer was not authenticated; all else goes on
  error,    ///< a defect, lost memory or descriptors, or an exception that left a callback
};

/// Receives messages of the library.
using LogCallback = Callback<void(LogLevel, std::string_view)>;

/// Sets the process's callback for messages of level `least` and above; an empty callback drops
/// all. Call it before the first engine is opened. The callback may run on any thread that calls
/// the library, and must not call the library. Set-up.
SPINWIRE_API void set_log(LogCallback callback, LogLevel least = LogLevel::warning) noexcept;

}  // namespace spinwire
