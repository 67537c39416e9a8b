// The library's log. Without a callback, messages are dropped. The library prints nothing, except
// when SharedAccess or ExclusiveAccess ends the program, as assert() does.
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
  /// a defect, lost memory or descriptors, a device that failed, an engine that cannot sleep, or an
  /// exception that left a callback
  error,
};

/// Receives messages of the library.
using LogCallback = Callback<void(LogLevel, std::string_view)>;

/// Sets the process's callback for messages of level `least` and above; an empty callback drops
/// all. Call it before the first engine is opened. The callback may run on any thread that calls
/// the library, and must not call the library. Another thread may be in the former callback: what
/// its captures point to must stay valid, and the library keeps its record until the process ends.
/// Any thread. Set-up.
SPINWIRE_API void set_log(LogCallback callback, LogLevel least = LogLevel::warning) noexcept;

}  // namespace spinwire
