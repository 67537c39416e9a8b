#include "sim/control_network.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/error.h"

namespace spinwire::sim {

using control::EpollSet;
using control::Event;
using control::Interest;
using control::system_error;

namespace {

constexpr std::uint32_t kFirstHost = 10u << 24 | 1;  // 10.0.0.1

Address address_of(std::uint32_t host, std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(kFirstHost + host);
  return *Address::from(reinterpret_cast<const sockaddr*>(&address), sizeof address);
}

/// An IPv4 address as a number; 0 for other families.
std::uint32_t ipv4_of(const Address& address) noexcept {
  if (address.family() != AF_INET) return 0;
  const auto bytes = address.as_v6();
  std::uint32_t number = 0;
  for (std::size_t i = 12; i < bytes.size(); ++i) number = number << 8 | bytes[i];
  return number;
}

constexpr bool is_loopback(std::uint32_t ipv4) noexcept { return ipv4 >> 24 == 127; }

}  // namespace

Result<std::optional<Accepted>> SimulatedListener::accept(int fd) {
  if (waiting.empty()) return std::nullopt;
  std::uint64_t count = 0;
  (void)!::read(fd, &count, sizeof count);  // a semaphore: counts one connection down
  Accepted first = std::move(waiting.front());
  waiting.pop_front();
  return std::optional<Accepted>(std::move(first));
}

void SimulatedListener::add(Accepted connection) {
  waiting.push_back(std::move(connection));
  const std::uint64_t one = 1;
  (void)!::write(kept ? kept.get() : event, &one, sizeof one);
}

// Without a descriptor or memory the listener ends, and its port is free.
void SimulatedListener::release() noexcept {
  kept.reset(::fcntl(event, F_DUPFD_CLOEXEC, 0));
  try {
    if (kept) network.released_.push_back(shared_from_this());
  } catch (...) {
    kept.reset();
  }
}

Address SimulatedHost::address(std::uint16_t port) const { return address_of(number_, port); }

Result<control::Network::Listening> SimulatedHost::listen(const Address& address) {
  const std::string asked = base::format("listen on {}", address.text().view());
  const std::uint32_t ipv4 = ipv4_of(address);
  if (!address.is_any() && !is_loopback(ipv4) && ipv4 != kFirstHost + number_)
    return tl::unexpected(system_error(asked, "bind", EADDRNOTAVAIL));
  std::uint16_t port = address.port();
  while (port == 0 || (address.port() == 0 && network_.find(number_, port) != nullptr))
    port = next_port_ = static_cast<std::uint16_t>(next_port_ == 65535 ? 49152 : next_port_ + 1);
  if (network_.find(number_, port) != nullptr)
    return tl::unexpected(system_error(asked, "bind", EADDRINUSE));
  Listening made;
  made.fd.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE));
  if (!made.fd) return tl::unexpected(system_error(asked, "eventfd", errno));
  auto listener = std::make_shared<SimulatedListener>(network_);
  listener->at = made.local = this->address(port);
  listener->host = number_;
  listener->event = made.fd.get();
  std::erase_if(network_.listeners_, [](const auto& each) { return each.expired(); });
  network_.listeners_.push_back(listener);
  made.queue = std::move(listener);
  return made;
}

Result<control::Network::Listening> SimulatedHost::adopt(int fd) {
  auto& released = network_.released_;
  const auto found = std::find_if(released.begin(), released.end(), [&](const auto& each) {
    return each->event == fd && each->host == number_;
  });
  if (found == released.end()) return Network::adopt(fd);
  std::shared_ptr<SimulatedListener> listener = std::move(*found);
  released.erase(found);
  listener->kept.reset();
  Listening made{base::UniqueFd(fd), listener->at, {}};
  made.queue = std::move(listener);
  return made;
}

Result<Connecting> SimulatedHost::connect(const Address& remote) {
  const auto failed = [&](const char* call) {
    return tl::unexpected(
        system_error(base::format("connect to {}", remote.text().view()), call, errno));
  };
  int near[2] = {-1, -1}, far[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, near) != 0)
    return failed("socketpair");
  Connecting connecting{base::UniqueFd(near[0]), 0};
  base::UniqueFd facing_us(near[1]);
  const std::uint32_t to = network_.host_of(remote, number_);
  const bool reached = to < ControlNetwork::kMostHosts && network_.model_.is_up(number_, to);
  auto listener = network_.find(to, remote.port());
  if (reached && listener == nullptr) {
    connecting.error = ECONNREFUSED;
    return connecting;
  }
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, far) != 0)
    return failed("socketpair");
  auto link = std::make_unique<ControlNetwork::Link>();
  link->hosts[0] = number_;
  link->hosts[1] = to;
  link->ends[0] = std::move(facing_us);
  link->ends[1].reset(far[0]);
  next_port_ = static_cast<std::uint16_t>(next_port_ == 65535 ? 49152 : next_port_ + 1);
  link->called = {base::UniqueFd(far[1]), address(next_port_)};
  link->listener = listener;
  if (auto added = network_.add(std::move(link)); !added) return tl::unexpected(added.error());
  return connecting;
}

Result<void> ControlNetwork::open() {
  auto set = EpollSet::open();
  if (!set) return tl::unexpected(set.error());
  ready_ = std::move(*set);
  return {};
}

Result<void> ControlNetwork::add(std::unique_ptr<Link> link) {
  link->number = ++last_link_;
  for (const unsigned from : {0u, 1u}) {
    const std::uint64_t token = std::uint64_t{link->number} << 1 | from;
    if (auto watched = ready_.add(link->ends[from].get(), token, Interest::read); !watched)
      return watched;
  }
  links_.push_back(std::move(link));
  return {};
}

SimulatedHost& ControlNetwork::add_host() {
  hosts_.push_back(
      std::make_unique<SimulatedHost>(*this, static_cast<std::uint32_t>(hosts_.size())));
  return *hosts_.back();
}

std::shared_ptr<SimulatedListener> ControlNetwork::find(std::uint32_t host,
                                                        std::uint16_t port) const {
  for (const auto& each : listeners_) {
    auto listener = each.lock();
    if (listener != nullptr && listener->host == host && listener->at.port() == port)
      return listener;
  }
  return nullptr;
}

std::uint32_t ControlNetwork::host_of(const Address& address, std::uint32_t seen_by) const {
  const std::uint32_t ipv4 = ipv4_of(address);
  if (is_loopback(ipv4)) return seen_by;
  const std::uint32_t host = ipv4 - kFirstHost;
  return host < hosts_.size() ? host : kMostHosts;
}

void ControlNetwork::poll_links() {
  if (links_.empty()) return;
  std::array<Event, EpollSet::kEventsMax> events;
  for (std::size_t i = ready_.wait(events); i-- != 0;) {
    const auto number = static_cast<std::uint32_t>(events[i].token >> 1);
    const auto found = std::lower_bound(
        links_.begin(), links_.end(), number,
        [](const auto& link, std::uint32_t wanted) { return link->number < wanted; });
    if (found != links_.end() && (*found)->number == number)
      (*found)->streams[events[i].token & 1].ready = true;
  }
}

void ControlNetwork::run(std::uint64_t now) {
  poll_links();
  for (const auto& link : links_) {
    advance(*link, now);
    if (link->over) {  // both ends are about to close
      for (const std::uint32_t host : link->hosts) notify(host);
    }
  }
  std::erase_if(links_, [](const auto& link) { return link->over; });
}

void ControlNetwork::notify(std::uint32_t host) noexcept {
  if (host < hosts_.size()) ++hosts_[host]->changes_;
}

void ControlNetwork::advance(Link& link, std::uint64_t now) {
  for (const unsigned from : {0u, 1u}) collect_sent(link, from, now);
  if (!link.announced) announce(link, now);
  for (const unsigned from : {0u, 1u}) deliver_due(link, from, now);
  if (link.streams[0].end_delivered && link.streams[1].end_delivered) link.over = true;
}

void ControlNetwork::announce(Link& link, std::uint64_t now) {
  if (link.hosts[1] >= kMostHosts || !model_.is_up(link.hosts[0], link.hosts[1])) {
    if (link.streams[0].ended) link.over = true;  // the caller gave up before a response
    return;
  }
  if (!std::exchange(link.begun, true))
    link.announced_at = now + model_.draw_control_delay(link.hosts[0], link.hosts[1]);
  if (now < link.announced_at) return;
  auto listener = link.listener.lock();
  if (listener == nullptr) {
    link.over = true;  // the listener is gone
    return;
  }
  link.announced = true;
  listener->add(std::move(link.called));
  notify(link.hosts[1]);
}

void ControlNetwork::collect_sent(Link& link, unsigned from, std::uint64_t now) {
  ByteStream& stream = link.streams[from];
  std::array<std::byte, 4096> bytes;
  while (std::exchange(stream.ready, false) && !stream.ended) {
    const ssize_t got = ::recv(link.ends[from].get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    notify(link.hosts[from]);  // the sender has room again
    const std::uint64_t delay = model_.draw_control_delay(link.hosts[from], link.hosts[1 - from]);
    stream.last_due = std::max(stream.last_due, now + delay);
    stream.ended = got <= 0;  // closed, possibly with unread bytes
    if (stream.ended) ready_.remove(link.ends[from].get());
    Piece piece{stream.last_due, {}};
    if (got > 0) piece.bytes.assign(bytes.begin(), bytes.begin() + got);
    stream.pieces.push_back(std::move(piece));
  }
}

void ControlNetwork::deliver_due(Link& link, unsigned from, std::uint64_t now) {
  ByteStream& stream = link.streams[from];
  const int to = link.ends[1 - from].get();
  while (link.announced && !stream.pieces.empty() && stream.pieces.front().due <= now &&
         model_.is_up(link.hosts[from], link.hosts[1 - from])) {
    const Piece piece = std::move(stream.pieces.front());
    stream.pieces.pop_front();
    notify(link.hosts[1 - from]);
    if (piece.bytes.empty()) {
      ::shutdown(to, SHUT_WR);
      stream.end_delivered = true;
    } else {
      // Fails only if the end has closed: handshakes fit into any socket buffer.
      (void)::send(to, piece.bytes.data(), piece.bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
  }
}

std::uint64_t ControlNetwork::next_of(const Link& link) const {
  std::uint64_t next = kNever;
  for (const unsigned from : {0u, 1u}) {
    const bool up =
        link.hosts[1] < kMostHosts && model_.is_up(link.hosts[from], link.hosts[1 - from]);
    if (!up) continue;
    if (!link.announced && from == 0) next = std::min(next, link.begun ? link.announced_at : 0);
    if (link.announced && !link.streams[from].pieces.empty())
      next = std::min(next, link.streams[from].pieces.front().due);
  }
  return next;
}

std::uint64_t ControlNetwork::next() const {
  std::uint64_t next = kNever;
  for (const auto& link : links_) next = std::min(next, next_of(*link));
  return next;
}

}  // namespace spinwire::sim
