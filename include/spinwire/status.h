// Outcomes. Hot functions answer a Status; set-up functions answer a Result, whose Error is text
// for people.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#if !__has_include(<tl/expected.hpp>)
#error "Spinwire's headers need tl/expected.hpp: install libexpected-dev (Debian), or tl-expected"
#endif
#include <tl/expected.hpp>
#include <utility>

#include "spinwire/export.h"
#include "spinwire/goodbye.h"

namespace spinwire {

/// Outcome of a call or an operation.
enum class [[nodiscard]] Status : std::uint8_t{
    ok = 0,  ///< done; or accepted, of an operation or call that ends later
    // The call was refused and took nothing; the caller still owns what it passed.
    would_block,       ///< A queue or the peer's credit is used up; try again after poll().
    no_buffer,         ///< The pool has no free block; it gets some as buffers are released.
    invalid_argument,  ///< An argument is outside its documented range.
    out_of_bounds,     ///< A slice has no memory or bytes to move, or exceeds its buffer or region.
    message_too_long,  ///< Longer than the connection's message limit.
    not_connected,     ///< The connection or session is not `ready`, or its engine is gone.
    wrong_thread,      ///< Called from another thread than the one that opened the engine.
    reentrant,         ///< Called from inside a callback, where it is not allowed.
    forked_child,      ///< Called in a child made by fork(); only the parent owns the engine.
    unsupported,       ///< The device, the kind of connection, or the peer cannot do it.
    // An accepted operation failed.
    flushed,        ///< The connection was closed or failed before the operation ran.
    peer_lost,      ///< The peer died, or did not answer within the configured time.
    remote_access,  ///< The peer's device refused: bad key, bounds or access rights.
    remote_error,   ///< The peer's device answered with an error of its own.
    local_error,    ///< Our device refused: local key, length or queue-pair state.
    timed_out,      ///< A time-out passed.
    refused,        ///< The peer refused.
    protocol,       ///< The peer sent bytes that are not a valid message.
    // Set-up.
    bad_config,  ///< A setting is unknown, malformed or out of range.
    no_device,   ///< No such device.
    no_memory,   ///< Not enough memory, hugepages or locked memory.
    in_use,      ///< Something else uses the address, key or object.
    limit,       ///< A configured or device limit is reached.
    system,      ///< The operating system refused a call; the error names it.

    cancelled,  ///< The application cancelled the accepted operation or call.

    lease_expired,  ///< The lease, or the token's deadline, has expired, or is about to.

    /// The peer does not prove that it has our key, or there is no key for an address that other
    /// hosts reach.
    unauthenticated,
};
/// Number of statuses.
inline constexpr int kStatusCount = static_cast<int>(Status::unauthenticated) + 1;

namespace detail {
/// What may succeed later after a failure.
enum class Retry : std::uint8_t {
  never,       ///< nothing, before a program, a device or a setting changes
  connection,  ///< a new connection or session, but not the same request
  request,     ///< the same request, perhaps after connecting again
};

/// The one table behind is_retryable() and Reconnect.
constexpr Retry retry_after(Status status) noexcept {
  switch (status) {
    case Status::would_block:
    case Status::no_buffer:
    case Status::not_connected:
    case Status::flushed:
    case Status::peer_lost:
    case Status::timed_out:
    case Status::refused:
    case Status::no_memory:
    case Status::in_use:
    case Status::limit:
    case Status::system:
      return Retry::request;
    case Status::remote_access:
    case Status::remote_error:
    case Status::local_error:
    case Status::unauthenticated:
      return Retry::connection;
    default:
      return Retry::never;
  }
}
}  // namespace detail

/// Whether the same request may succeed later, although neither program nor settings change: after
/// a poll(), when the connection or session is ready again or made again, or when others have
/// released what is used up. Any thread. True for:
///   would_block    poll first
///   no_buffer      poll first
///   not_connected  wait until ready, or connect again; but not while this engine drains
///   flushed        connect again
///   peer_lost      connect again
///   timed_out      the peer or the network may be faster next time
///   refused        nothing listened there, or the peer's application may decide otherwise
///   no_memory      others may free memory
///   in_use         others may release it
///   limit          others may release what is used up; not if the device or a setting has less
///   system         there may be a route, or a descriptor, again; see the error
/// False for ok, for mistakes of the program, and for what only a change to a program, a device or
/// a setting can cure.
///
/// Does not say whether an accepted operation or call that failed has taken effect. After flushed,
/// peer_lost, timed_out, cancelled, remote_error and local_error it may have; a call also after
/// limit, if the server dropped its reply (Reply::status()).
constexpr bool is_retryable(Status status) noexcept {
  return detail::retry_after(status) == detail::Retry::request;
}

/// The status's name, as written above. Any thread; never allocates.
SPINWIRE_API std::string_view to_string(Status status) noexcept;

/// A part of an error's text. Never throws: the text is empty if memory has run out.
struct ErrorText {
  ErrorText() noexcept = default;
  /// The text; empty if memory has run out.
  ErrorText(const char* text) noexcept : ErrorText(std::string_view(text)) {}
  /// The text; empty if memory has run out.
  ErrorText(std::string_view text) noexcept {
    try {
      value = text;
    } catch (...) {  // the status is enough
    }
  }
  /// The text; empty if memory has run out.
  ErrorText(const std::string& text) noexcept : ErrorText(std::string_view(text)) {}
  /// The text; empty if memory has run out.
  ErrorText(std::string&& text) noexcept : value(std::move(text)) {}

  std::string value;  ///< the text
};

/// Why a set-up call failed: what was asked for, what was found, and what to do about it. If the
/// peer's application has refused (PeerRequest::refuse()), `found` is the application's text.
/// Making and copying an Error never throws: the texts are empty if memory has run out.
struct Error {
  Error() noexcept = default;
  /// An error with these texts.
  Error(Status what, ErrorText ask, ErrorText find, ErrorText advice) noexcept
      : status(what),
        asked(std::move(ask.value)),
        found(std::move(find.value)),
        remedy(std::move(advice.value)) {}
  Error(Error&&) noexcept = default;
  Error& operator=(Error&&) noexcept = default;
  Error(const Error& from) noexcept
      : Error(from.status, ErrorText(from.asked), ErrorText(from.found), ErrorText(from.remedy)) {
    code = from.code;
    goodbye = from.goodbye;
  }
  Error& operator=(const Error& from) noexcept { return *this = Error(from); }
  ~Error() = default;

  Status status = Status::system;     ///< the kind of error, for programs
  std::string asked;                  ///< what was asked for
  std::string found;                  ///< what was found instead
  std::string remedy;                 ///< what to do
  std::optional<std::uint32_t> code;  ///< the refusal's, if the peer's application has refused
  /// The peer's goodbye, if the peer has closed or refused with one.
  Goodbye goodbye{};

  /// One line: "asked: found; remedy".
  [[nodiscard]] SPINWIRE_API std::string message() const noexcept;
};

/// Whether a connection or session that has ended with this error, or could not be made, may be
/// made again, although neither program nor settings change here. Reconnect decides by it. Any
/// thread. True whenever the peer invites us back (Goodbye::invites_back()). Otherwise false for:
///   a refusal by the peer's application (Error::code)
///   ok, the peer's plain close()
///   protocol, unsupported, invalid_argument, no_device, bad_config, cancelled, lease_expired, and
///   mistakes of the program
/// True for all other errors: for what is_retryable(Status) names, and for:
///   remote_access    the peer may have closed the key just then; it gives new ones
///   remote_error     a device has ended the connection
///   local_error      a device has ended the connection
///   unauthenticated  another program may have answered in the peer's place, and must not end us;
///                    or the peer has other keys for now, as in a rotation. If the key file here
///                    is the wrong one, all attempts fail.
[[nodiscard]] inline bool is_retryable(const Error& error) noexcept {
  if (error.goodbye.invites_back()) return true;
  return !error.code && detail::retry_after(error.status) != detail::Retry::never;
}

/// A value, or the error that prevented it.
template <typename T>
using Result = tl::expected<T, Error>;

}  // namespace spinwire
