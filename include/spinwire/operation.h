// Operations of a connection: when they reach the device, their names, and how they ended.
#pragma once

#include <cstddef>
#include <cstdint>

#include "spinwire/callback.h"
#include "spinwire/status.h"

namespace spinwire {

/// When an operation reaches the device. On softverbs, short messages without a callback and calls
/// that are deferred may leave at any time before.
enum class Post : std::uint8_t {
  automatic,  ///< `now` between polls, `defer` inside callbacks
  now,        ///< at once, behind the operations that the connection has deferred
  defer,      ///< at the next Connection::flush() (not calls) or Engine::flush(), or in poll()
};

/// How an accepted operation ended.
struct Completion {
  /// Any operation may end with:
  ///   ok             it is done
  ///   cancelled      by Connection::cancel()
  ///   timed_out      by Connection::set_timeout()
  ///   flushed        the connection ended first
  /// A message of up to connections.eager_bytes, any raw message, a write, a read and an atomic
  /// also with the following, which end the connection:
  ///   peer_lost      the peer died, or did not answer in time
  ///   remote_error   the peer's device failed, or its raw receive is too short
  ///   local_error    our device refused the memory, the length or the queue pair's state
  /// A write, a read and an atomic also with the following, which ends the connection:
  ///   remote_access  the peer's device refused the key, the bounds or the rights
  /// A message longer than connections.eager_bytes also with:
  ///   refused        the peer's application refused it (Offer::refuse())
  ///   no_buffer      the peer's pool had no block for it in time
  Status status = Status::ok;
  std::size_t bytes = 0;    ///< payload bytes moved; 0 unless ok
  std::uint64_t value = 0;  ///< value that an atomic found, in host order; else 0
};
/// Runs inside poll(), exactly once for each accepted operation.
using CompletionCallback = Callback<void(const Completion&)>;

/// Names an accepted operation until it has ended. Plain data. A value is used again after 2^32
/// operations at the earliest.
struct OperationId {
  std::uint64_t value = ~std::uint64_t{0};  ///< all bits are set: empty
  explicit operator bool() const noexcept { return value != ~std::uint64_t{0}; }
  friend bool operator==(const OperationId&, const OperationId&) noexcept = default;
};

}  // namespace spinwire
