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

/// What a failed system call means for its caller: `limit` for descriptors and ephemeral ports,
/// `no_memory`, `in_use`, `invalid_argument` (the address), `unsupported` (the IP version),
/// `refused`, `timed_out`, `peer_lost` or else `system`; with what to do.
Error system_error(ErrorText asked, std::string_view call, int error) noexcept;

/// A connection that a listener took.
struct Accepted {
  base::UniqueFd fd;
  Address peer;
};

/// The connections that wait at a listener of a simulated network.
class AcceptQueue {
 public:
  virtual ~AcceptQueue() = default;
  /// Takes the first of them; none if none waits. `fd` is the listener's descriptor.
  virtual Result<std::optional<Accepted>> accept(int fd) = 0;
};

/// A connection being made. An error that the network reported at once is in `error`, an errno
/// value; finish_connect() reports it like a later one.
struct Connecting {
  base::UniqueFd fd;
  int error = 0;
};

/// A simulated network, as one of its hosts sees it. Sockets of a simulated network are real
/// descriptors, so that exchanges and epoll sets do not notice.
class Network {
 public:
  struct Listening {
    base::UniqueFd fd;  ///< readable while a connection waits
    Address local;
    std::shared_ptr<AcceptQueue> queue;
  };
  virtual ~Network() = default;
  /// On one of this host's addresses; port 0 takes a free one. Errors: in_use, invalid_argument
  /// (another host's address), limit, system.
  virtual Result<Listening> listen(const Address& address) = 0;
  /// Begins to connect. Errors: limit, system.
  virtual Result<Connecting> connect(const Address& remote) = 0;
  /// Counts the changes of this host's descriptors; for EpollSet::follow().
  [[nodiscard]] virtual const std::uint64_t* change_count() const noexcept = 0;
};

/// A listening socket that survives the lack of descriptors.
class ListenSocket {
 public:
  /// Binds and listens; port 0 takes a free one, which local() tells. An IPv6 listener takes IPv6
  /// connections only. Errors: in_use naming the address, invalid_argument (an address that this
  /// host does not have, or an IPv4 one in IPv6 form), limit, no_memory, system.
  /// On a simulated network if one is given.
  static Result<ListenSocket> open(const Address& address, int backlog, Network* network = nullptr);

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
  std::shared_ptr<AcceptQueue> simulated_;
};

/// Begins to connect, from a simulated network if one is given. Errors of this host only:
/// invalid_argument (port 0), limit, no_memory, system.
Result<Connecting> begin_connect(const Address& remote, Network* network = nullptr);

/// True once connected, false while it is still being tried. Errors: refused, timed_out, peer_lost,
/// limit, system, naming the address.
Result<bool> finish_connect(const Connecting& connecting, const Address& remote);

/// Sends small frames at once instead of gathering them. Errors: system.
Result<void> set_no_delay(int fd);

/// This end of a socket. Errors: unsupported (no TCP socket), system.
Result<Address> local_address(int fd);

}  // namespace spinwire::control
