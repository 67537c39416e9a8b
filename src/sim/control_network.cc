#include "sim/control_network.h"

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

/// The last four bytes of an IPv4 address, as a number; 0 for others.
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
  (void)!::read(fd, &count, sizeof count);  // a semaphore: one of those that wait
  Accepted first = std::move(waiting.front());
  waiting.pop_front();
  return std::optional<Accepted>(std::move(first));
}

void SimulatedListener::add(Accepted connection) {
  waiting.push_back(std::move(connection));
  const std::uint64_t one = 1;
  (void)!::write(event, &one, sizeof one);
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
  auto listener = std::make_shared<SimulatedListener>();
  listener->at = made.local = this->address(port);
  listener->host = number_;
  listener->event = made.fd.get();
  std::erase_if(network_.listeners_, [](const auto& each) { return each.expired(); });
  network_.listeners_.push_back(listener);
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
  const bool reached = to < SimulatedNetwork::kMostHosts && network_.model_.open(number_, to);
  auto listener = network_.find(to, remote.port());
  if (reached && listener == nullptr) {
    connecting.error = ECONNREFUSED;
    return connecting;
  }
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, far) != 0)
    return failed("socketpair");
  auto link = std::make_unique<SimulatedNetwork::Link>();
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

Result<void> SimulatedNetwork::open() {
  auto set = EpollSet::open();
  if (!set) return tl::unexpected(set.error());
  ready_ = std::move(*set);
  return {};
}

Result<void> SimulatedNetwork::add(std::unique_ptr<Link> link) {
  link->number = ++last_link_;
  for (const unsigned from : {0u, 1u}) {
    const std::uint64_t token = std::uint64_t{link->number} << 1 | from;
    if (auto watched = ready_.add(link->ends[from].get(), token, Interest::read); !watched)
      return watched;
  }
  links_.push_back(std::move(link));
  return {};
}

SimulatedHost& SimulatedNetwork::add_host() {
  hosts_.push_back(
      std::make_unique<SimulatedHost>(*this, static_cast<std::uint32_t>(hosts_.size())));
  return *hosts_.back();
}

std::shared_ptr<SimulatedListener> SimulatedNetwork::find(std::uint32_t host,
                                                          std::uint16_t port) const {
  for (const auto& each : listeners_) {
    auto listener = each.lock();
    if (listener != nullptr && listener->host == host && listener->at.port() == port)
      return listener;
  }
  return nullptr;
}

std::uint32_t SimulatedNetwork::host_of(const Address& address, std::uint32_t seen_by) const {
  const std::uint32_t ipv4 = ipv4_of(address);
  if (is_loopback(ipv4)) return seen_by;
  const std::uint32_t host = ipv4 - kFirstHost;
  return host < hosts_.size() ? host : kMostHosts;
}

void SimulatedNetwork::look() {
  if (links_.empty()) return;
  std::array<Event, EpollSet::kEventsMax> events;
  for (std::size_t i = ready_.wait(events); i-- != 0;) {
    const auto number = static_cast<std::uint32_t>(events[i].token >> 1);
    const auto found = std::lower_bound(
        links_.begin(), links_.end(), number,
        [](const auto& link, std::uint32_t wanted) { return link->number < wanted; });
    if (found != links_.end() && (*found)->number == number)
      (*found)->ways[events[i].token & 1].ready = true;
  }
}

void SimulatedNetwork::run(std::uint64_t now) {
  look();
  for (const auto& link : links_) {
    advance(*link, now);
    if (link->over) {  // its ends are about to be closed
      for (const std::uint32_t host : link->hosts) notify(host);
    }
  }
  std::erase_if(links_, [](const auto& link) { return link->over; });
}

void SimulatedNetwork::notify(std::uint32_t host) noexcept {
  if (host < hosts_.size()) ++hosts_[host]->changes_;
}

void SimulatedNetwork::advance(Link& link, std::uint64_t now) {
  for (const unsigned from : {0u, 1u}) take(link, from, now);
  if (!link.announced) announce(link, now);
  for (const unsigned from : {0u, 1u}) bring(link, from, now);
  if (link.ways[0].told && link.ways[1].told) link.over = true;
}

void SimulatedNetwork::announce(Link& link, std::uint64_t now) {
  if (link.hosts[1] >= kMostHosts || !model_.open(link.hosts[0], link.hosts[1])) {
    if (link.ways[0].ended) link.over = true;  // no answer came within the caller's time-out
    return;
  }
  if (!std::exchange(link.begun, true))
    link.announced_at = now + model_.delay(link.hosts[0], link.hosts[1]);
  if (now < link.announced_at) return;
  auto listener = link.listener.lock();
  if (listener == nullptr) {
    link.over = true;  // its process has ended meanwhile
    return;
  }
  link.announced = true;
  listener->add(std::move(link.called));
  notify(link.hosts[1]);
}

void SimulatedNetwork::take(Link& link, unsigned from, std::uint64_t now) {
  Way& way = link.ways[from];
  std::array<std::byte, 4096> bytes;
  while (std::exchange(way.ready, false) && !way.ended) {
    const ssize_t got = ::recv(link.ends[from].get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    notify(link.hosts[from]);  // there is room again
    const std::uint64_t delay = model_.delay(link.hosts[from], link.hosts[1 - from]);
    way.last_due = std::max(way.last_due, now + delay);
    way.ended = got <= 0;  // closed, or closed with bytes left unread
    if (way.ended) ready_.remove(link.ends[from].get());
    Piece piece{way.last_due, {}};
    if (got > 0) piece.bytes.assign(bytes.begin(), bytes.begin() + got);
    way.pieces.push_back(std::move(piece));
  }
}

void SimulatedNetwork::bring(Link& link, unsigned from, std::uint64_t now) {
  Way& way = link.ways[from];
  const int to = link.ends[1 - from].get();
  while (link.announced && !way.pieces.empty() && way.pieces.front().due <= now &&
         model_.open(link.hosts[from], link.hosts[1 - from])) {
    const Piece piece = std::move(way.pieces.front());
    way.pieces.pop_front();
    notify(link.hosts[1 - from]);
    if (piece.bytes.empty()) {
      ::shutdown(to, SHUT_WR);
      way.told = true;
    } else {
      // An end that has closed hears nothing; handshakes fit into any socket's room.
      (void)::send(to, piece.bytes.data(), piece.bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
  }
}

std::uint64_t SimulatedNetwork::next_of(const Link& link) const {
  std::uint64_t next = kNever;
  for (const unsigned from : {0u, 1u}) {
    const bool open =
        link.hosts[1] < kMostHosts && model_.open(link.hosts[from], link.hosts[1 - from]);
    if (!open) continue;
    if (!link.announced && from == 0) next = std::min(next, link.begun ? link.announced_at : 0);
    if (link.announced && !link.ways[from].pieces.empty())
      next = std::min(next, link.ways[from].pieces.front().due);
  }
  return next;
}

std::uint64_t SimulatedNetwork::next() const {
  std::uint64_t next = kNever;
  for (const auto& link : links_) next = std::min(next, next_of(*link));
  return next;
}

}  // namespace spinwire::sim
