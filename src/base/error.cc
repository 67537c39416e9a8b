#include "base/error.h"

#include <cerrno>
#include <cstring>

namespace spinwire::base {

Error make_error(Status status, ErrorText asked, ErrorText found, ErrorText remedy) noexcept {
  return Error{status, std::move(asked), std::move(found), std::move(remedy)};
}

Error goodbye_error(Status status, ErrorText asked, const Goodbye& goodbye) noexcept {
  Error error{status, {}, {}, {}};
  if (goodbye.invites_back()) {
    const bool drains = goodbye.reason == GoodbyeReason::draining;
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(goodbye.retry_after);
    error = {status, std::move(asked), drains ? "the peer is draining" : "the peer is overloaded",
             format("come back after {} ms, or use another peer", ms.count())};
  }
  error.goodbye = goodbye;
  return error;
}

tl::unexpected<Error> fail(Status status, ErrorText asked, ErrorText found,
                           ErrorText remedy) noexcept {
  return tl::unexpected<Error>(
      make_error(status, std::move(asked), std::move(found), std::move(remedy)));
}

tl::unexpected<Error> fail_errno(Status status, ErrorText asked, std::string_view call, int error,
                                 ErrorText remedy) noexcept {
  if (error == EMFILE || error == ENFILE) {
    status = Status::limit;
    remedy = error == EMFILE ? kProcessFilesRemedy : kSystemFilesRemedy;
  }
  return fail(status, std::move(asked), format("{}: {}", call, errno_text(error)),
              std::move(remedy));
}

std::string errno_text(int error) noexcept {
  // Unlike strerror(), neither function uses a static buffer; both return null for unknown values.
  const char* text = strerrordesc_np(error);
  const char* name = strerrorname_np(error);
  if (text == nullptr || name == nullptr) return format("error {}", error);
  if (error == 0) return "no error";  // short enough not to allocate
  return format("{} ({})", text, name);
}

Error out_of_memory() noexcept {
  return Error{Status::no_memory, "allocate", "out of memory", "free memory"};
}

Error unexpected_exception(std::string_view asked, std::string_view what) noexcept {
  return Error{Status::system, asked, what, "see what the exception says"};
}

}  // namespace spinwire::base
