#include "common/stat_serve.h"

#include <arpa/inet.h>
#include <fmt/core.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "common/cli.h"

namespace spinwire::tools {
namespace {

using Time = std::chrono::steady_clock;
constexpr std::chrono::seconds kClientLimit{30};  ///< for a request, and for its answer
constexpr int kTurnMs = 100;                      ///< between looks for a stop signal
constexpr std::size_t kMostClients = 32;
/// In a turn. A client then has several turns for its request before newer ones make it give way.
constexpr std::size_t kMostAccepted = 8;
/// Clients that ask within that time get the same metrics, so that many of them cost no more than
/// one.
constexpr std::chrono::milliseconds kTextAge{200};

tl::unexpected<Error> fail_serving(Status status, const std::string& address,
                                   std::string_view found, const char* remedy) {
  return tl::unexpected(Error(status, "serve metrics on " + address, found, remedy));
}

/// A socket that closes itself.
class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  [[nodiscard]] int fd() const { return fd_; }

 private:
  int fd_;
};

struct Loopback {
  sockaddr_storage address{};
  socklen_t size = 0;
};

std::optional<Loopback> parse_loopback(std::string_view text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return std::nullopt;
  const std::string_view host = text.substr(0, colon);
  const std::string_view digits = text.substr(colon + 1);
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (digits.empty() || error != std::errc() || end != digits.data() + digits.size())
    return std::nullopt;
  Loopback loopback;
  if (host == "127.0.0.1" || host == "localhost") {
    sockaddr_in v4{};
    v4.sin_family = AF_INET;
    v4.sin_port = htons(port);
    v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    std::memcpy(&loopback.address, &v4, loopback.size = sizeof v4);
  } else if (host == "[::1]") {
    sockaddr_in6 v6{};
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(port);
    v6.sin6_addr = in6addr_loopback;
    std::memcpy(&loopback.address, &v6, loopback.size = sizeof v6);
  } else {
    return std::nullopt;
  }
  return loopback;
}

std::string response(std::string_view status, std::string_view type, std::string_view body) {
  return fmt::format(
      "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}",
      status, type, body.size(), body);
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return out;
}

/// Whether a request names this host, and once. The page of another site, whose name was made to
/// lead to a loopback address, names that site.
bool is_for_this_host(std::string_view request) {
  constexpr std::string_view kName = "\r\nhost:";
  const std::string headers = lower(request);
  const std::size_t at = headers.find(kName);
  if (at == std::string::npos || headers.find(kName, at + 1) != std::string::npos) return false;
  const std::size_t begin = headers.find_first_not_of(" \t", at + kName.size());
  std::string host = headers.substr(begin, headers.find('\r', begin) - begin);
  host.erase(host.find_last_not_of(" \t") + 1);
  const std::size_t port = host.find_last_not_of("0123456789");
  if (port != std::string::npos && port != 0 && host[port] == ':') host.resize(port);
  return host == "127.0.0.1" || host == "[::1]" || host == "localhost";
}

/// What a request gets whose headers are complete.
std::string answer_to(std::string_view request, const MetricsText& text) {
  constexpr std::string_view kPlain = "text/plain; charset=utf-8";
  if (!is_for_this_host(request))
    return response("403 Forbidden", kPlain, "the host is localhost, 127.0.0.1 or [::1]\n");
  if (!request.starts_with("GET "))
    return response("405 Method Not Allowed", kPlain, "GET /metrics\n");
  if (!request.starts_with("GET /metrics ") && !request.starts_with("GET /metrics?"))
    return response("404 Not Found", kPlain, "the metrics are at /metrics\n");
  const auto metrics = text();
  if (!metrics)
    return response("500 Internal Server Error", kPlain, metrics.error().message() + '\n');
  return response("200 OK", "text/plain; version=0.0.4; charset=utf-8", *metrics);
}

/// A client's connection: it sends a request, and then gets the answer.
class Client {
 public:
  explicit Client(int fd) : fd_(fd), end_(Time::now() + kClientLimit) {}

  [[nodiscard]] int fd() const { return fd_.fd(); }
  [[nodiscard]] short events() const { return answer_.empty() ? POLLIN : POLLOUT; }
  [[nodiscard]] bool is_late() const { return Time::now() >= end_; }
  /// Goes on after an event. Returns false when the connection is to be closed.
  bool go_on(const MetricsText& text) {
    if (answer_.empty() && !receive(text)) return false;
    return answer_.empty() || send();
  }

 private:
  bool receive(const MetricsText& text) {
    constexpr std::size_t kMost = 8192;
    std::array<char, 2048> bytes{};
    const ssize_t got = ::recv(fd(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    if (got == 0) return false;
    request_.append(bytes.data(), static_cast<std::size_t>(got));
    const std::size_t end = request_.find("\r\n\r\n");
    if (end == std::string::npos) return request_.size() < kMost;
    answer_ = answer_to(std::string_view(request_).substr(0, end + 2), text);
    end_ = Time::now() + kClientLimit;  // reading many engines may have taken a while
    return true;
  }
  bool send() {
    const std::string_view rest = std::string_view(answer_).substr(sent_);
    const ssize_t put = ::send(fd(), rest.data(), rest.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (put < 0) return errno == EAGAIN || errno == EINTR;
    sent_ += static_cast<std::size_t>(put);
    return sent_ < answer_.size();
  }

  Socket fd_;
  Time::time_point end_;
  std::string request_;
  std::string answer_;
  std::size_t sent_ = 0;
};

/// Serves several clients at once, so that one that says nothing delays no other.
class Clients {
 public:
  explicit Clients(int listener) : listener_(listener) {}

  /// Waits for a while, and serves clients that are ready.
  void turn(const MetricsText& text) {
    std::vector<pollfd> polled{{listener_, POLLIN, 0}};
    for (const auto& client : clients_) polled.push_back({client->fd(), client->events(), 0});
    if (::poll(polled.data(), polled.size(), kTurnMs) < 0) return;
    std::size_t at = 0;
    std::erase_if(clients_, [&](const std::unique_ptr<Client>& client) {
      const bool is_ready = polled[++at].revents != 0;
      return (is_ready && !client->go_on(text)) || client->is_late();
    });
    if (polled[0].revents != 0) accept();
  }

 private:
  /// The oldest clients give way to new ones.
  void accept() {
    for (std::size_t i = 0; i < kMostAccepted; ++i) {
      const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (fd < 0) return;
      if (clients_.size() == kMostClients) clients_.erase(clients_.begin());
      clients_.push_back(std::make_unique<Client>(fd));
    }
  }

  int listener_;
  std::vector<std::unique_ptr<Client>> clients_;  ///< the oldest first
};

/// Makes the metrics, once for all clients that ask within kTextAge.
class RecentText {
 public:
  explicit RecentText(const MetricsText& make) : make_(make) {}
  Result<std::string> get() {
    const Time::time_point now = Time::now();
    if (!text_ || !*text_ || now - made_at_ >= kTextAge) {
      text_ = make_();
      made_at_ = Time::now();
    }
    return *text_;
  }

 private:
  const MetricsText& make_;
  std::optional<Result<std::string>> text_;
  Time::time_point made_at_;
};

/// Where the socket listens, after port 0 too.
std::string address_of(int fd, std::string_view asked) {
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  std::uint16_t port = 0;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) == 0)
    std::memcpy(&port, reinterpret_cast<const char*>(&own) + 2, sizeof port);
  return fmt::format("{}:{}", asked.substr(0, asked.rfind(':')), ntohs(port));
}

}  // namespace

Result<void> serve_metrics(const std::string& address, const MetricsText& text) {
  const auto loopback = parse_loopback(address);
  if (!loopback) {
    return fail_serving(Status::invalid_argument, address, "it is no address of this host alone",
                        "give 127.0.0.1:PORT or [::1]:PORT; let a proxy serve other hosts");
  }
  const Socket listener(
      ::socket(loopback->address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  (void)::setsockopt(listener.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(listener.fd(), reinterpret_cast<const sockaddr*>(&loopback->address),
             loopback->size) != 0 ||
      ::listen(listener.fd(), SOMAXCONN) != 0) {
    const int error = errno;
    return fail_serving(error == EADDRINUSE ? Status::in_use : Status::system, address,
                        std::strerror(error), "choose another port");
  }
  fmt::print("serving http://{}/metrics\n", address_of(listener.fd(), address));
  std::fflush(stdout);
  RecentText recent(text);
  const MetricsText get = [&] { return recent.get(); };
  Clients clients(listener.fd());
  while (!stop_requested()) clients.turn(get);
  return {};
}

}  // namespace spinwire::tools
