// Non-blocking TCP sockets for the handshake. Every descriptor is close-on-exec, and every call
// returns at once. Set-up and control-step code.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "base/unique_fd.h"
#include "control/address.h"
#include "spinwire/status.h"

namespace spinwire::control {

/// The Error of a failed system call, with a remedy. Status: `limit` for descriptors and ephemeral
/// ports, `no_memory`, `in_use`, `invalid_argument` (the address), `unsupported` (the IP version),
/// `refused`, `timed_out`, `peer_lost`, or else `system`.
Error system_error(ErrorText asked, std::string_view call, int error) noexcept;

/// A connection that a listener accepted.
struct Accepted {
  base::UniqueFd fd;
  Address peer;
};

/// The waiting connections of a simulated network's listener.
class AcceptQueue {
 public:
  virtual ~AcceptQueue() = default;
  /// Accepts the first waiting connection; none if none waits. `fd` is the listener's descriptor.
  virtual Result<std::optional<Accepted>> accept(int fd) = 0;
  /// The listener's owner gives its descriptor away; Network::adopt() takes it.
  virtual void release() noexcept {}
};

/// A connection being made. `error` is an errno value that the network reported at once;
/// finish_connect() reports it like a later one.
struct Connecting {
  base::UniqueFd fd;
  int error = 0;
};

/// A simulated network, as one of its hosts sees it. Its sockets are real descriptors, so that
/// exchanges and epoll sets need no special case.
class Network {
 public:
  struct Listening {
    base::UniqueFd fd;  ///< readable while a connection waits
    Address local;
    std::shared_ptr<AcceptQueue> queue;
  };
  virtual ~Network() = default;
  /// Listens on one of this host's addresses; port 0 takes a free port. Errors: in_use,
  /// invalid_argument (another host's address), limit, system.
  virtual Result<Listening> listen(const Address& address) = 0;
  /// Takes a listener over that another owner on this host has released. Errors: invalid_argument
  /// (no such listener).
  virtual Result<Listening> adopt(int fd);
  /// Begins to connect. Errors: limit, system.
  virtual Result<Connecting> connect(const Address& remote) = 0;
  /// Counts the changes of this host's descriptors; for EpollSet::follow().
  [[nodiscard]] virtual const std::uint64_t* change_count() const noexcept = 0;
};

/// A listening socket that works even without free descriptors.
class ListenSocket {
 public:
  /// Binds and listens; port 0 takes a free port, see local(). On a simulated network if one is
  /// given. An IPv6 listener accepts IPv6 connections only. Errors:
  ///   in_use            names the address
  ///   invalid_argument  not an address of this host, or an IPv4 address in IPv6 form
  ///   limit             descriptors are used up
  ///   no_memory         no memory for the socket
  ///   system            the operating system refused
  static Result<ListenSocket> open(const Address& address, int backlog, Network* network = nullptr);

  /// Owns a socket that listens already, and makes it non-blocking and close-on-exec. On a
  /// simulated network if one is given. After an error the socket is still the caller's. Errors:
  ///   invalid_argument  not a listening TCP socket, or an IPv6 one that takes IPv4 connections; on
  ///                     a simulated network, not the descriptor of a listener that was released
  ///   limit             descriptors are used up
  ///   system            the operating system refused
  static Result<ListenSocket> adopt(int fd, Network* network = nullptr);
  /// Gives the socket to the caller, who closes it.
  [[nodiscard]] int release() noexcept {
    if (simulated_ != nullptr) std::exchange(simulated_, nullptr)->release();
    return fd_.release();
  }

  /// A closed socket.
  ListenSocket() noexcept = default;

  /// Accepts one waiting connection; none if none waits, or if the waiting one is gone again.
  /// Errors: no_memory, system (the socket is unusable), limit.
  ///
  /// When descriptors run out, accept() answers `limit` and drops one waiting connection by means
  /// of a spare descriptor: its peer learns at once, and the socket does not stay readable. The
  /// caller may call again at once, but at most once a step.
  Result<std::optional<Accepted>> accept();

  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  [[nodiscard]] const Address& local() const noexcept { return local_; }
  explicit operator bool() const noexcept { return static_cast<bool>(fd_); }

 private:
  static Result<ListenSocket> from(Network::Listening&& simulated);
  void drop_one() noexcept;

  base::UniqueFd fd_;
  base::UniqueFd spare_;
  Address local_;
  std::shared_ptr<AcceptQueue> simulated_;
};

/// Begins to connect, on a simulated network if one is given. Errors of this host only:
/// invalid_argument (port 0), limit, no_memory, system.
Result<Connecting> begin_connect(const Address& remote, Network* network = nullptr);

/// True if connected, false while the attempt continues. Errors: refused, timed_out, peer_lost,
/// limit, system; each names the address.
Result<bool> finish_connect(const Connecting& connecting, const Address& remote);

/// Sends small frames at once instead of gathering them. Errors: system.
Result<void> set_no_delay(int fd);

/// The address of this end of a socket. Errors: unsupported (no TCP socket), system.
Result<Address> local_address(int fd);

}  // namespace spinwire::control
