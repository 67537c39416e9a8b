// Non-blocking TCP sockets for the handshake. Every descriptor is close-on-exec, every call answers
// at once. Set-up and control-step code.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/unique_fd.h"
#include "control/address.h"
#include "spinwire/status.h"

namespace spinwire::control {

class LocalHost;
struct LocalListener;

/// What a failed system call means for its caller: `limit` for descriptors and ephemeral ports,
/// `no_memory`, `in_use`, `invalid_argument` (the address), `unsupported` (the IP version),
/// `refused`, `timed_out`, `peer_lost` or else `system`; with what to do.
Error system_error(std::string asked, std::string_view call, int error);

/// A connection that a listener took.
struct Accepted {
  base::UniqueFd fd;
  Address peer;
};

/// A listening socket that survives the lack of descriptors.
class ListenSocket {
 public:
  /// Binds and listens; port 0 takes a free one, which local() tells. An IPv6 listener takes IPv6
  /// connections only. Errors: in_use naming the address, invalid_argument (an address that this
  /// host does not have, or an IPv4 one in IPv6 form), limit, no_memory, system.
  /// On a host of a simulated network if one is given.
  static Result<ListenSocket> open(const Address& address, int backlog, LocalHost* host = nullptr);

  /// A closed one.
  ListenSocket() noexcept = default;

  /// Takes one waiting connection; none if none waits, or if the one that did is gone again. When
  /// descriptors have run out it answers `limit`, and drops one waiting connection by means of a
  /// descriptor kept for that, so that its peer learns at once and the socket does not stay
  /// readable for ever; the caller need not wait before calling again, but at most once a step.
  /// Other errors: no_memory, system (the socket is of no use any more).
  Result<std::optional<Accepted>> accept();

  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  [[nodiscard]] const Address& local() const noexcept { return local_; }
  explicit operator bool() const noexcept { return static_cast<bool>(fd_); }

 private:
  void drop_one() noexcept;

  base::UniqueFd fd_;
  base::UniqueFd spare_;
  Address local_;
  std::shared_ptr<LocalListener> simulated_;
};

/// A connection being made. What the network answered at once is in `error`, an errno value, to be
/// told like a later answer.
struct Connecting {
  base::UniqueFd fd;
  int error = 0;
};

/// Begins to connect, from a host of a simulated network if one is given. Errors of this host only:
/// invalid_argument (port 0), limit, no_memory, system.
Result<Connecting> begin_connect(const Address& remote, LocalHost* host = nullptr);

/// True once connected, false while it is still being tried. Errors: refused, timed_out, peer_lost,
/// limit, system, naming the address.
Result<bool> finish_connect(const Connecting& connecting, const Address& remote);

/// Sends small frames at once instead of gathering them. Errors: system.
Result<void> set_no_delay(int fd);

/// This end of a socket. Errors: unsupported (no TCP socket), system.
Result<Address> local_address(int fd);

}  // namespace spinwire::control
