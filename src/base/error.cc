#include "base/error.h"

#include <fmt/core.h>

#include <cstring>

namespace spinwire::base {

Error make_error(Status status, std::string asked, std::string found, std::string remedy) {
  return Error{status, std::move(asked), std::move(found), std::move(remedy)};
}

tl::unexpected<Error> fail(Status status, std::string asked, std::string found,
                           std::string remedy) {
  return tl::unexpected<Error>(
      make_error(status, std::move(asked), std::move(found), std::move(remedy)));
}

tl::unexpected<Error> fail_errno(Status status, std::string asked, std::string_view call, int error,
                                 std::string remedy) {
  return fail(status, std::move(asked), fmt::format("{}: {}", call, errno_text(error)),
              std::move(remedy));
}

std::string errno_text(int error) {
  // Neither touches a static buffer, unlike strerror(); both answer null for unknown values.
  const char* text = strerrordesc_np(error);
  const char* name = strerrorname_np(error);
  if (text == nullptr || name == nullptr) return fmt::format("error {}", error);
  if (error == 0) return "no error";
  return fmt::format("{} ({})", text, name);
}

Error out_of_memory() noexcept {
  return Error{Status::no_memory, "allocate", "out of memory", "free memory"};
}

Error unexpected_exception(std::string_view asked, std::string_view what) noexcept {
  try {
    return Error{Status::system, std::string(asked), std::string(what),
                 "see what the exception says"};
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  }
}

}  // namespace spinwire::base
