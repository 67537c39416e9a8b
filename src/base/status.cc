#include "spinwire/status.h"

namespace spinwire {

std::string_view to_string(Status status) noexcept {
  // No default: a compiler then tells of a status that is missing here.
  switch (status) {
    case Status::ok:
      return "ok";
    case Status::would_block:
      return "would_block";
    case Status::no_buffer:
      return "no_buffer";
    case Status::invalid_argument:
      return "invalid_argument";
    case Status::out_of_bounds:
      return "out_of_bounds";
    case Status::message_too_long:
      return "message_too_long";
    case Status::not_connected:
      return "not_connected";
    case Status::wrong_thread:
      return "wrong_thread";
    case Status::reentrant:
      return "reentrant";
    case Status::forked_child:
      return "forked_child";
    case Status::unsupported:
      return "unsupported";
    case Status::flushed:
      return "flushed";
    case Status::peer_lost:
      return "peer_lost";
    case Status::remote_access:
      return "remote_access";
    case Status::remote_error:
      return "remote_error";
    case Status::local_error:
      return "local_error";
    case Status::timed_out:
      return "timed_out";
    case Status::refused:
      return "refused";
    case Status::protocol:
      return "protocol";
    case Status::bad_config:
      return "bad_config";
    case Status::no_device:
      return "no_device";
    case Status::no_memory:
      return "no_memory";
    case Status::in_use:
      return "in_use";
    case Status::limit:
      return "limit";
    case Status::system:
      return "system";
    case Status::cancelled:
      return "cancelled";
    case Status::lease_expired:
      return "lease_expired";
  }
  return "unknown status";
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
