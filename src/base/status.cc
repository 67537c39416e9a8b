// Texts of Status and Error.
#include "spinwire/status.h"

#include <iterator>

namespace spinwire {

namespace {

/// By value.
constexpr std::string_view kNames[] = {"ok",
                                       "would_block",
                                       "no_buffer",
                                       "invalid_argument",
                                       "out_of_bounds",
                                       "message_too_long",
                                       "not_connected",
                                       "wrong_thread",
                                       "reentrant",
                                       "forked_child",
                                       "unsupported",
                                       "flushed",
                                       "peer_lost",
                                       "remote_access",
                                       "remote_error",
                                       "local_error",
                                       "timed_out",
                                       "refused",
                                       "protocol",
                                       "bad_config",
                                       "no_device",
                                       "no_memory",
                                       "in_use",
                                       "limit",
                                       "system",
                                       "cancelled",
                                       "lease_expired",
                                       "unauthenticated"};
static_assert(std::size(kNames) == kStatusCount);

}  // namespace

std::string_view to_string(Status status) noexcept {
  const auto value = static_cast<std::size_t>(status);
  return value < kStatusCount ? kNames[value] : "unknown status";
}

std::string Error::message() const noexcept try {
  std::string text = asked;
  if (!found.empty()) text += (text.empty() ? "" : ": ") + found;
  if (!remedy.empty()) text += (text.empty() ? "" : "; ") + remedy;
  return text.empty() ? std::string(to_string(status)) : text;
} catch (...) {  // out of memory
  return {};
}

}  // namespace spinwire
