// Ways to make an Error, and to keep exceptions of the standard library inside set-up calls.
#pragma once

#include <fmt/core.h>

#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "spinwire/status.h"

namespace spinwire::base {

/// fmt::format for the texts of errors and of the log: empty where memory has run out, as no error
/// may end a process. Set-up.
template <typename... Args>
[[nodiscard]] std::string format(fmt::format_string<Args...> how, Args&&... args) noexcept {
  try {
    return fmt::format(how, std::forward<Args>(args)...);
  } catch (...) {
    return {};
  }
}

/// An Error of these parts; give them with format() where they hold values. Set-up.
[[nodiscard]] Error make_error(Status status, ErrorText asked, ErrorText found,
                               ErrorText remedy) noexcept;

/// The same, ready to be returned from a function that answers Result<T>. Set-up.
[[nodiscard]] tl::unexpected<Error> fail(Status status, ErrorText asked, ErrorText found,
                                         ErrorText remedy) noexcept;

/// A system call refused: `found` becomes "CALL: TEXT OF THE ERRNO VALUE". Set-up.
[[nodiscard]] tl::unexpected<Error> fail_errno(Status status, ErrorText asked,
                                               std::string_view call, int error,
                                               ErrorText remedy) noexcept;

/// What an errno value means and its name, e.g. "Permission denied (EACCES)". Any thread. Set-up.
[[nodiscard]] std::string errno_text(int error) noexcept;

/// Memory ran out. Its texts are short enough to need none.
[[nodiscard]] Error out_of_memory() noexcept;
/// An exception that says `what` came from below a set-up call that was asked for `asked`.
[[nodiscard]] Error unexpected_exception(std::string_view asked, std::string_view what) noexcept;

/// Runs `body`, which answers a Result<T>, and turns whatever it throws into an Error: the frame
/// of a public set-up call. Set-up.
template <typename Body>
[[nodiscard]] std::invoke_result_t<Body> no_throw(std::string_view asked, Body&& body) noexcept {
  try {
    return std::forward<Body>(body)();
  } catch (const std::bad_alloc&) {
    return tl::unexpected<Error>(out_of_memory());
  } catch (const std::exception& e) {
    return tl::unexpected<Error>(unexpected_exception(asked, e.what()));
  } catch (...) {
    return tl::unexpected<Error>(unexpected_exception(asked, "an exception of unknown type"));
  }
}

}  // namespace spinwire::base
