// Callback: what happens to an exception that leaves one. Callback::call() catches it.
#include "spinwire/callback.h"

#include <exception>
#include <utility>

#include "base/log_message.h"

namespace spinwire {

void detail::log_callback_exception() noexcept {
  static thread_local bool logging = false;  // the callback that threw may be the log's
  if (std::exchange(logging, true)) return;
  try {
    throw;
  } catch (const std::exception& e) {
    base::log(LogLevel::error, "an exception left a callback: {}", e.what());
  } catch (...) {
    base::log(LogLevel::error, "an exception left a callback");
  }
  logging = false;
}

}  // namespace spinwire
