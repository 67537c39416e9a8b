#include "doctor/link.h"

#include <fmt/core.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <span>
#include <thread>
#include <utility>

namespace spinwire::doctor {
namespace {

static_assert(std::endian::native == std::endian::little);

struct LinkHead {
  static constexpr std::uint32_t kMagic = 0x52445753;  // "SWDR"

  std::uint32_t magic = kMagic;
  std::uint16_t version = kLinkVersion;
  std::uint16_t kind = 0;
  std::uint32_t length = 0;
};
static_assert(sizeof(LinkHead) == 12);

constexpr std::size_t kMostFacts = 200;

using LinkClock = std::chrono::steady_clock;

/// After `end` it only looks, so that a limit of 0 means without waiting.
bool wait_for(int fd, short events, LinkClock::time_point end) {
  const auto left = std::chrono::duration_cast<Link::Limit>(end - LinkClock::now());
  pollfd polled{fd, events, 0};
  return ::poll(&polled, 1, std::max(static_cast<int>(left.count()), 0)) > 0;
}

tl::unexpected<Error> link_error(Status status, std::string found) {
  return tl::unexpected(Error{status, "talk to the other doctor", std::move(found),
                              "spinwire-doctor --serve ADDRESS  # there, of the same version"});
}

/// Moves all bytes by `move`, which is send() or recv().
template <typename Byte, typename Move>
Result<void> move_all(int fd, std::span<Byte> bytes, short events, LinkClock::time_point end,
                      Move&& move) {
  while (!bytes.empty()) {
    if (!wait_for(fd, events, end))
      return link_error(Status::timed_out, "it does not answer in time");
    const ssize_t moved = move(fd, bytes.data(), bytes.size());
    if (moved < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (moved <= 0) return link_error(Status::peer_lost, "it has closed the connection");
    bytes = bytes.subspan(static_cast<std::size_t>(moved));
  }
  return {};
}

Result<void> receive_all(int fd, std::span<char> bytes, LinkClock::time_point end) {
  return move_all(fd, bytes, POLLIN, end, [](int from, char* at, std::size_t size) {
    return ::recv(from, at, size, MSG_DONTWAIT);
  });
}

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

/// Errors: invalid_argument.
Result<Addresses> look_up(const std::string& host, int port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error == 0) return Addresses(found, ::freeaddrinfo);
  return tl::unexpected(Error{Status::invalid_argument, fmt::format("find host '{}'", host),
                              ::gai_strerror(error),
                              "getent hosts HOST  # give a name that it finds, or an address"});
}

/// The error of connecting, 0 for none.
int connect_within(int fd, const addrinfo& to, LinkClock::time_point end) {
  if (::connect(fd, to.ai_addr, to.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  if (!wait_for(fd, POLLOUT, end)) return ETIMEDOUT;
  int error = 0;
  socklen_t length = sizeof error;
  ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
  return error;
}

std::string host_text(const sockaddr_storage& address, socklen_t length, std::string& port) {
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> service{};
  if (::getnameinfo(reinterpret_cast<const sockaddr*>(&address), length, host.data(), host.size(),
                    service.data(), service.size(), NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return {};
  port = service.data();
  return address.ss_family == AF_INET6 ? fmt::format("[{}]", host.data()) : host.data();
}

}  // namespace

std::string encode_facts(const Facts& facts) {
  std::string text;
  for (const auto& [name, value] : facts) text += fmt::format("{}={}\n", name, value);
  return text;
}

Facts decode_facts(std::string_view text) {
  Facts facts;
  while (!text.empty() && facts.size() < kMostFacts) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string line(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    for (char& c : line) {
      if (c < ' ' || c > '~') c = '?';
    }
    const std::size_t equals = line.find('=');
    if (equals != std::string::npos && equals != 0)
      facts.insert_or_assign(line.substr(0, equals), line.substr(equals + 1));
  }
  return facts;
}

std::string fact(const Facts& facts, std::string_view name) {
  const auto found = facts.find(name);
  return found == facts.end() ? std::string() : found->second;
}

std::optional<std::uint32_t> number_fact(const Facts& facts, std::string_view name,
                                         std::uint32_t most) {
  const std::string text = fact(facts, name);
  std::uint32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number == 0 || number > most)
    return std::nullopt;
  return number;
}

std::string interface_fact(const Facts& facts, std::string_view name) {
  constexpr std::string_view kAllowed =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.@-";
  constexpr std::size_t kLongest = 15;  // IFNAMSIZ without the zero
  std::string text = fact(facts, name);
  // A name that begins with '-' would be an option.
  const bool is_name = !text.empty() && text.size() <= kLongest && text.front() != '-' &&
                       text.find_first_not_of(kAllowed) == std::string::npos;
  return is_name ? text : "INTERFACE";
}

Link::Link(Link&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
Link::~Link() {
  if (fd_ >= 0) ::close(fd_);
}

Result<Link> Link::connect(const std::string& host, int port, Limit limit) {
  const auto found = look_up(host, port, 0);
  if (!found) return tl::unexpected(found.error());
  const auto end = LinkClock::now() + limit;
  int error = 0;
  for (const addrinfo* to = found->get(); to != nullptr; to = to->ai_next) {
    Link link(::socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    error = link.fd_ < 0 ? errno : connect_within(link.fd_, *to, end);
    if (error == 0) return link;
  }
  const Status status = error == ECONNREFUSED ? Status::refused
                        : error == ETIMEDOUT  ? Status::timed_out
                                              : Status::system;
  return tl::unexpected(Error{status, fmt::format("connect to {} port {} over TCP", host, port),
                              std::strerror(error),
                              fmt::format("spinwire-doctor --serve ADDRESS:{}  # there; and let "
                                          "its firewall pass TCP",
                                          port)});
}

Result<Link> Link::listen(const std::string& address, int port) {
  const auto found = look_up(address, port, AI_NUMERICHOST | AI_PASSIVE);
  if (!found) return tl::unexpected(found.error());
  const addrinfo& at = **found;
  Link link(::socket(at.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int yes = 1;
  if (link.fd_ >= 0) ::setsockopt(link.fd_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (link.fd_ >= 0 && ::bind(link.fd_, at.ai_addr, at.ai_addrlen) == 0 &&
      ::listen(link.fd_, SOMAXCONN) == 0)
    return link;
  const int error = errno;
  return tl::unexpected(Error{error == EADDRINUSE ? Status::in_use : Status::system,
                              fmt::format("listen at {} port {}", address, port),
                              std::strerror(error),
                              "give an address of this host and a free port"});
}

int Link::accept(Limit limit) const {
  const auto end = LinkClock::now() + limit;
  if (!wait_for(fd_, POLLIN, end)) return -1;
  const int client = ::accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  // Without a free descriptor the client stays in the queue, so the next wait would be none.
  if (client < 0) std::this_thread::sleep_until(end);
  return client;
}

Result<void> Link::send(LinkKind kind, std::string_view text, Limit limit) {
  LinkHead head;
  head.kind = static_cast<std::uint16_t>(kind);
  head.length = static_cast<std::uint32_t>(text.size());
  std::string frame(reinterpret_cast<const char*>(&head), sizeof head);
  frame += text;
  return move_all(fd_, std::span<const char>(frame), POLLOUT, LinkClock::now() + limit,
                  [](int to, const char* from, std::size_t size) {
                    return ::send(to, from, size, MSG_NOSIGNAL | MSG_DONTWAIT);
                  });
}

Result<std::string> Link::receive(LinkKind kind, Limit limit) {
  return receive_either(kind, kind, limit).map([](Frame frame) { return std::move(frame.text); });
}

Result<Link::Frame> Link::receive_either(LinkKind one, LinkKind other, Limit limit) {
  const auto end = LinkClock::now() + limit;
  LinkHead head;
  std::array<char, sizeof head> bytes{};
  if (auto got = receive_all(fd_, std::span<char>(bytes), end); !got)
    return tl::unexpected(got.error());
  std::memcpy(&head, bytes.data(), sizeof head);
  if (head.magic != LinkHead::kMagic) return link_error(Status::protocol, "it is no doctor");
  if (head.version != kLinkVersion)
    return link_error(Status::unsupported,
                      fmt::format("it speaks version {} of the protocol, ours is {}", head.version,
                                  kLinkVersion));
  const auto kind = static_cast<LinkKind>(head.kind);
  if ((kind != one && kind != other) || head.length > kMostText)
    return link_error(Status::protocol, "it sent a frame that does not belong here");
  std::string text(head.length, '\0');
  if (auto got = receive_all(fd_, std::span<char>(text), end); !got)
    return tl::unexpected(got.error());
  return Frame{kind, std::move(text)};
}

std::optional<std::string> Link::peek(LinkKind kind) const {
  LinkHead head;
  std::string bytes(sizeof head + kMostText, '\0');
  const ssize_t got = ::recv(fd_, bytes.data(), bytes.size(), MSG_PEEK | MSG_DONTWAIT);
  if (got < static_cast<ssize_t>(sizeof head)) return std::nullopt;
  std::memcpy(&head, bytes.data(), sizeof head);
  const std::size_t come = static_cast<std::size_t>(got) - sizeof head;
  if (head.magic != LinkHead::kMagic || head.version != kLinkVersion ||
      static_cast<LinkKind>(head.kind) != kind || head.length > come)
    return std::nullopt;
  return bytes.substr(sizeof head, head.length);
}

bool Link::is_readable(Limit limit) const noexcept {
  pollfd polled{fd_, POLLIN, 0};
  return ::poll(&polled, 1, static_cast<int>(limit.count())) > 0;
}

std::optional<LinkKind> Link::next_kind() const noexcept {
  LinkHead head;
  const ssize_t got = ::recv(fd_, &head, sizeof head, MSG_PEEK | MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
  if (got > 0 && got < static_cast<ssize_t>(sizeof head)) return std::nullopt;
  const bool is_frame = got > 0 && head.magic == LinkHead::kMagic && head.version == kLinkVersion;
  return is_frame ? static_cast<LinkKind>(head.kind) : LinkKind::end;
}

std::string Link::peer_host() const {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  std::string port;
  if (::getpeername(fd_, reinterpret_cast<sockaddr*>(&address), &length) != 0) return {};
  return host_text(address, length, port);
}

std::string Link::local_address() const {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  std::string port;
  if (::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length) != 0) return {};
  const std::string host = host_text(address, length, port);
  return fmt::format("{}:{}", host, port);
}

bool split_address(std::string_view text, std::string& host, int& port) {
  const bool in_brackets = text.starts_with('[');
  const std::size_t end = std::min(text.find(in_brackets ? ']' : ':'), text.size());
  host = text.substr(in_brackets ? 1 : 0, in_brackets ? end - 1 : end);
  text.remove_prefix(std::min(in_brackets ? end + 1 : end, text.size()));
  if (host.empty() || text.empty()) return !host.empty();
  const auto [at, error] = std::from_chars(text.data() + 1, text.data() + text.size(), port);
  return text.front() == ':' && error == std::errc() && at == text.data() + text.size() &&
         port >= 0 && port <= 65535;
}

}  // namespace spinwire::doctor
