#include "control/socket.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "base/error.h"

namespace spinwire::control {
namespace {

struct Meaning {
  Status status;
  std::string_view remedy;
};

Meaning meaning(int error) noexcept {
  switch (error) {
    case EMFILE:
      return {Status::limit, base::kProcessFilesRemedy};
    case ENFILE:
      return {Status::limit, base::kSystemFilesRemedy};
    case EAGAIN:
      return {Status::limit, "widen net.ipv4.ip_local_port_range: no ephemeral port is free"};
    case ENOMEM:
    case ENOBUFS:
      return {Status::no_memory, "free memory, or raise the memory limit of the control group"};
    case EADDRINUSE:
      return {Status::in_use, "stop what listens there (`ss -ltnp` tells) or take another port"};
    case EADDRNOTAVAIL:
      return {Status::invalid_argument, "take an address of this host (`ip address` lists them)"};
    case EINVAL:
      return {Status::invalid_argument,
              "write an IPv4 address as such, and a link-local one with its scope (%interface)"};
    case EACCES:
    case EPERM:
      return {Status::system, "take a port above 1023, and see whether a firewall rule forbids it"};
    case ECONNREFUSED:
      return {Status::refused, "start the peer first, and check its address and port"};
    case ETIMEDOUT:
      return {Status::timed_out, "check the peer's address, its host and firewalls between"};
    case ECONNRESET:
    case ECONNABORTED:
    case EPIPE:
      return {Status::peer_lost, "see the peer's own log for why it closed the connection"};
    case ENETUNREACH:
    case EHOSTUNREACH:
      return {Status::system, "check the address and this host's routes (`ip route get`)"};
    case EAFNOSUPPORT:
      return {Status::unsupported, "use the other IP version: this host has that one disabled"};
    default:
      return {Status::system, "the text of the errno value says what the system objected to"};
  }
}

base::UniqueFd open_socket(const Address& address) noexcept {
  return base::UniqueFd(
      ::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP));
}

Result<void> set_option(int fd, int level, int option, std::string_view name) {
  const int on = 1;
  if (::setsockopt(fd, level, option, &on, sizeof(on)) == 0) return {};
  return tl::make_unexpected(
      system_error(base::format("set socket option {}", name), "setsockopt", errno));
}

// Errors of accept4 about a connection that ended before we accepted it, or a network error on it.
// The listener itself works.
bool concerns_one_connection(int error) noexcept {
  switch (error) {
    case EAGAIN:
    case EINTR:
    case ECONNABORTED:
    case EPROTO:
    case EPERM:
    case ENETDOWN:
    case ENOPROTOOPT:
    case EHOSTDOWN:
    case ENONET:
    case EHOSTUNREACH:
    case EOPNOTSUPP:
    case ENETUNREACH:
    case ETIMEDOUT:
      return true;
    default:
      return false;
  }
}

// A connection to a free ephemeral port of this host can be a connection to itself (TCP's
// simultaneous open).
bool is_connected_to_itself(int fd) noexcept {
  sockaddr_storage ends[2]{};
  socklen_t sizes[2]{sizeof(ends[0]), sizeof(ends[1])};
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&ends[0]), &sizes[0]) != 0) return false;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&ends[1]), &sizes[1]) != 0) return false;
  const auto local = Address::from(reinterpret_cast<sockaddr*>(&ends[0]), sizes[0]);
  const auto peer = Address::from(reinterpret_cast<sockaddr*>(&ends[1]), sizes[1]);
  return local && peer && *local == *peer;
}

}  // namespace

Error system_error(ErrorText asked, std::string_view call, int error) noexcept {
  const Meaning m = meaning(error);
  return base::make_error(m.status, std::move(asked),
                          base::format("{}: {}", call, base::errno_text(error)), m.remedy);
}

Result<Network::Listening> Network::adopt(int fd) {
  return base::fail(Status::invalid_argument, base::format("adopt descriptor {} as a listener", fd),
                    "no listener of this simulated host was released under it",
                    "give what Listener::release() answered on the same host");
}

Result<ListenSocket> ListenSocket::from(Network::Listening&& simulated) {
  ListenSocket result;
  result.fd_ = std::move(simulated.fd);
  result.local_ = simulated.local;
  result.simulated_ = std::move(simulated.queue);
  return result;
}

Result<ListenSocket> ListenSocket::open(const Address& address, int backlog, Network* network) {
  const std::string asked = base::format("listen on {}", address.text().view());
  if (network != nullptr) {
    auto simulated = network->listen(address);
    if (!simulated) return tl::make_unexpected(std::move(simulated.error()));
    return from(std::move(*simulated));
  }
  const auto failed = [&](std::string_view call) {
    return tl::make_unexpected(system_error(asked, call, errno));
  };
  base::UniqueFd fd = open_socket(address);
  if (!fd) return failed("socket");
  auto set = set_option(fd.get(), SOL_SOCKET, SO_REUSEADDR, "SO_REUSEADDR");
  if (set && address.family() == AF_INET6)
    set = set_option(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, "IPV6_V6ONLY");
  if (!set) return tl::make_unexpected(std::move(set.error()));
  if (::bind(fd.get(), address.data(), address.size()) != 0) return failed("bind");
  if (::listen(fd.get(), backlog) != 0) return failed("listen");
  auto local = local_address(fd.get());
  if (!local) return tl::make_unexpected(std::move(local.error()));

  ListenSocket result;
  result.spare_.reset(::eventfd(0, EFD_CLOEXEC));
  if (!result.spare_) return failed("eventfd");
  result.fd_ = std::move(fd);
  result.local_ = *local;
  return result;
}

namespace {

/// The value of a socket option; -1 if `fd` has none such.
int option_of(int fd, int level, int option) noexcept {
  int value = -1;
  socklen_t size = sizeof(value);
  return ::getsockopt(fd, level, option, &value, &size) == 0 ? value : -1;
}

/// What keeps a descriptor from being a listening socket of ours; null: nothing.
const char* find_objection(int fd) noexcept {
  const int domain = option_of(fd, SOL_SOCKET, SO_DOMAIN);
  if (domain < 0) return "it is no socket";
  if ((domain != AF_INET && domain != AF_INET6) ||
      option_of(fd, SOL_SOCKET, SO_TYPE) != SOCK_STREAM ||
      option_of(fd, SOL_SOCKET, SO_PROTOCOL) != IPPROTO_TCP)
    return "it is no TCP socket";
  if (option_of(fd, SOL_SOCKET, SO_ACCEPTCONN) != 1) return "it does not listen";
  if (domain == AF_INET6 && option_of(fd, IPPROTO_IPV6, IPV6_V6ONLY) != 1)
    return "it takes IPv4 connections besides IPv6 ones";
  return nullptr;
}

}  // namespace

Result<ListenSocket> ListenSocket::adopt(int fd, Network* network) {
  if (network != nullptr) {
    auto simulated = network->adopt(fd);
    if (!simulated) return tl::make_unexpected(std::move(simulated.error()));
    return from(std::move(*simulated));
  }
  const std::string asked = base::format("adopt descriptor {} as a listener", fd);
  if (const char* const objection = find_objection(fd); objection != nullptr) {
    return base::fail(Status::invalid_argument, asked, objection,
                      "give a TCP socket after listen(), for IPv6 with IPV6_V6ONLY (systemd: "
                      "BindIPv6Only=ipv6-only)");
  }
  const int status = ::fcntl(fd, F_GETFL);
  const int flags = ::fcntl(fd, F_GETFD);
  if (status < 0 || flags < 0 || ::fcntl(fd, F_SETFL, status | O_NONBLOCK) < 0 ||
      ::fcntl(fd, F_SETFD, flags | FD_CLOEXEC) < 0)
    return tl::make_unexpected(system_error(asked, "fcntl", errno));
  auto local = local_address(fd);
  if (!local) return tl::make_unexpected(std::move(local.error()));
  ListenSocket result;
  result.spare_.reset(::eventfd(0, EFD_CLOEXEC));
  if (!result.spare_) return tl::make_unexpected(system_error(asked, "eventfd", errno));
  result.fd_.reset(fd);
  result.local_ = *local;
  return result;
}

Result<std::optional<Accepted>> ListenSocket::accept() {
  if (simulated_ != nullptr) return simulated_->accept(fd_.get());
  sockaddr_storage peer{};
  socklen_t size = sizeof(peer);
  auto* const address = reinterpret_cast<sockaddr*>(&peer);
  base::UniqueFd fd(::accept4(fd_.get(), address, &size, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!fd) {
    const int error = errno;
    if (concerns_one_connection(error)) return std::nullopt;
    if (error == EMFILE || error == ENFILE) drop_one();
    return tl::make_unexpected(system_error(
        base::format("accept a connection on {}", local_.text().view()), "accept4", error));
  }
  auto parsed = Address::from(address, size);
  if (!parsed) return tl::make_unexpected(std::move(parsed.error()));
  // Fails only if the peer has already reset the connection; reading reports the reset.
  static_cast<void>(set_no_delay(fd.get()));
  return Accepted{std::move(fd), *parsed};
}

void ListenSocket::drop_one() noexcept {
  // Without the spare (another thread took its number), the connection stays in the queue.
  spare_.reset();
  { const base::UniqueFd dropped(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC)); }
  spare_.reset(::eventfd(0, EFD_CLOEXEC));
}

Result<Connecting> begin_connect(const Address& remote, Network* network) {
  // The text is made only for an error, so that a pooled exchange connects without heap.
  const auto asked = [&] { return base::format("connect to {}", remote.text().view()); };
  if (remote.port() == 0) {
    return base::fail(Status::invalid_argument, asked(), "port 0 stands for no port",
                      "give the port that the peer listens on");
  }
  if (network != nullptr) return network->connect(remote);
  base::UniqueFd fd = open_socket(remote);
  if (!fd) return tl::make_unexpected(system_error(asked(), "socket", errno));
  if (auto set = set_no_delay(fd.get()); !set) return tl::make_unexpected(std::move(set.error()));
  int error = ::connect(fd.get(), remote.data(), remote.size()) == 0 ? 0 : errno;
  // A signal does not end the attempt: it continues, as with EINPROGRESS.
  if (error == EINPROGRESS || error == EINTR) error = 0;
  return Connecting{std::move(fd), error};
}

Result<bool> finish_connect(const Connecting& connecting, const Address& remote) {
  const auto failed = [&](std::string_view call, int error) {
    return tl::make_unexpected(
        system_error(base::format("connect to {}", remote.text().view()), call, error));
  };
  if (connecting.error != 0) return failed("connect", connecting.error);
  pollfd waiting{connecting.fd.get(), POLLOUT, 0};
  const int ready = ::poll(&waiting, 1, 0);
  if (ready < 0 && errno != EINTR) return failed("poll", errno);
  if (ready <= 0) return false;
  int error = 0;
  socklen_t size = sizeof(error);
  if (::getsockopt(connecting.fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error != 0) return failed("connect", error);
  if (is_connected_to_itself(connecting.fd.get()))
    return failed("connect (to itself)", ECONNREFUSED);
  return true;
}

Result<void> set_no_delay(int fd) {
  return set_option(fd, IPPROTO_TCP, TCP_NODELAY, "TCP_NODELAY");
}

Result<Address> local_address(int fd) {
  sockaddr_storage local{};
  socklen_t size = sizeof(local);
  auto* const address = reinterpret_cast<sockaddr*>(&local);
  if (::getsockname(fd, address, &size) != 0) {
    return tl::make_unexpected(system_error("read a socket's address", "getsockname", errno));
  }
  return Address::from(address, size);
}

}  // namespace spinwire::control
