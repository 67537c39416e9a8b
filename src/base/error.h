// Makes Errors, and keeps exceptions inside set-up calls.
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

/// fmt::format for the texts of errors and of the log. Returns an empty text when memory has run
/// out, so that reporting an error never ends the process. Set-up.
template <typename... Args>
[[nodiscard]] std::string format(fmt::format_string<Args...> how, Args&&... args) noexcept {
  try {
    return fmt::format(how, std::forward<Args>(args)...);
  } catch (...) {
    return {};
  }
}

/// The remedy of an Error for a peer that violates the protocol.
inline constexpr const char* kProtocolRemedy =
    "check that the peer runs a compatible release; if it does, report a defect";
/// The remedy of an Error for a peer whose device answers and whose process does not.
inline constexpr const char* kHangingPeerRemedy =
    "check that the peer's process runs and polls its engine, then connect again";
/// The remedy of an Error for a refusal, whose reason may be cut.
inline constexpr const char* kRefusalRemedy =
    "correct what the peer names, then connect again; its log has the reason in full";

/// Makes an Error of these parts; use format() for parts that hold values. Set-up.
[[nodiscard]] Error make_error(Status status, ErrorText asked, ErrorText found,
                               ErrorText remedy) noexcept;

/// Makes an Error, wrapped for a function that returns Result<T>. Set-up.
[[nodiscard]] tl::unexpected<Error> fail(Status status, ErrorText asked, ErrorText found,
                                         ErrorText remedy) noexcept;

/// What helps when EMFILE or ENFILE refuses a descriptor.
inline constexpr const char* kProcessFilesRemedy =
    "raise the limit of open files (ulimit -n, or LimitNOFILE=)";
inline constexpr const char* kSystemFilesRemedy =
    "raise the system's limit of open files (sysctl fs.file-max)";

/// Makes the Error of a failed system call: `found` becomes "CALL: TEXT OF THE ERRNO VALUE". When
/// it was descriptors that ran out, the status is Status::limit and the remedy names their limit.
/// Set-up.
[[nodiscard]] tl::unexpected<Error> fail_errno(Status status, ErrorText asked,
                                               std::string_view call, int error,
                                               ErrorText remedy) noexcept;

/// Makes the Error of an end that the peer's goodbye explains. Its texts are empty if the peer's
/// application has just closed. Set-up.
[[nodiscard]] Error goodbye_error(Status status, ErrorText asked, const Goodbye& goodbye) noexcept;

/// Text and name of an errno value, e.g. "Permission denied (EACCES)". Any thread. Set-up.
[[nodiscard]] std::string errno_text(int error) noexcept;

/// The Error for exhausted memory. Its texts are short enough not to allocate.
[[nodiscard]] Error out_of_memory() noexcept;
/// The Error for an exception with the text `what`, thrown inside a set-up call that was to do
/// `asked`.
[[nodiscard]] Error unexpected_exception(std::string_view asked, std::string_view what) noexcept;

/// Memory that would not be there, with the reason. Thrown instead of a plain std::bad_alloc before
/// large memory is taken.
class NotEnoughMemory : public std::bad_alloc {
 public:
  explicit NotEnoughMemory(Error error) noexcept : error_(std::move(error)) {}
  [[nodiscard]] const Error& error() const noexcept { return error_; }

 private:
  Error error_;
};

/// Runs `body`, which returns a Result<T>, and turns any exception into an Error: the frame of a
/// public set-up call. Set-up.
template <typename Body>
[[nodiscard]] std::invoke_result_t<Body> no_throw(std::string_view asked, Body&& body) noexcept {
  try {
    return std::forward<Body>(body)();
  } catch (const NotEnoughMemory& e) {
    return tl::unexpected<Error>(e.error());
  } catch (const std::bad_alloc&) {
    return tl::unexpected<Error>(out_of_memory());
  } catch (const std::exception& e) {
    return tl::unexpected<Error>(unexpected_exception(asked, e.what()));
  } catch (...) {
    return tl::unexpected<Error>(unexpected_exception(asked, "an exception of unknown type"));
  }
}

}  // namespace spinwire::base
