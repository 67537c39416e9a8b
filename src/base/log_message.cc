#include "base/log_message.h"

#include <fmt/format.h>

#include <iterator>
#include <mutex>
#include <new>

namespace spinwire {
namespace {

/// A log callback and its level. Sinks are never freed, because another thread may be calling one.
/// The list keeps replaced sinks reachable; a program sets only a few.
struct Sink {
  LogCallback callback;
  LogLevel least;
  Sink* older;
};

std::atomic<Sink*> current_sink{nullptr};

std::mutex& sinks_mutex() {
  static std::mutex mutex;
  return mutex;
}
Sink* newest_sink = nullptr;  // under sinks_mutex()

}  // namespace

namespace base::detail {

constinit std::atomic<std::uint8_t> log_least{kNobody};

void log_message(LogLevel level, fmt::string_view format, fmt::format_args args) noexcept {
  const Sink* sink = current_sink.load(std::memory_order_acquire);
  if (sink == nullptr || level < sink->least) return;
  try {
    fmt::memory_buffer text;
    fmt::vformat_to(std::back_inserter(text), format, args);
    sink->callback(level, std::string_view(text.data(), text.size()));
  } catch (...) {
    // A message that cannot be formatted or delivered is lost; the call that logs it goes on.
    return;
  }
}

}  // namespace base::detail

void set_log(LogCallback callback, LogLevel least) noexcept {
  const std::lock_guard<std::mutex> lock(sinks_mutex());
  Sink* sink = nullptr;
  if (callback) {
    sink = new (std::nothrow) Sink{callback, least, newest_sink};
    if (sink != nullptr) newest_sink = sink;
  }
  current_sink.store(sink, std::memory_order_release);
  base::detail::log_least.store(
      sink != nullptr ? static_cast<std::uint8_t>(least) : base::detail::kNobody,
      std::memory_order_release);
}

}  // namespace spinwire
