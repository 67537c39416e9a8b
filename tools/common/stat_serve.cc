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
#include <optional>
#include <string_view>

#include "common/cli.h"

namespace spinwire::tools {
namespace {

using Time = std::chrono::steady_clock;
constexpr std::chrono::seconds kRequestLimit{2};
constexpr int kTurnMs = 100;  ///< between looks for a stop signal

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

/// Waits for the socket, at most until `end`. False: in vain, or stopped.
bool wait_for(int fd, short events, Time::time_point end) {
  while (Time::now() < end && !stop_requested()) {
    pollfd polled{fd, events, 0};
    if (::poll(&polled, 1, kTurnMs) > 0) return true;
  }
  return false;
}

/// The first line of a request whose headers are complete; empty if none comes in time.
std::string read_request(int fd) {
  constexpr std::size_t kMost = 8192;
  const auto end = Time::now() + kRequestLimit;
  std::string request;
  while (request.size() < kMost && wait_for(fd, POLLIN, end)) {
    std::array<char, 2048> bytes{};
    const ssize_t got = ::recv(fd, bytes.data(), bytes.size(), 0);
    if (got <= 0) return {};
    request.append(bytes.data(), static_cast<std::size_t>(got));
    if (request.find("\r\n\r\n") != std::string::npos) return request.substr(0, request.find('\r'));
  }
  return {};
}

void write_all(int fd, std::string_view text) {
  const auto end = Time::now() + kRequestLimit;
  while (!text.empty() && wait_for(fd, POLLOUT, end)) {
    const ssize_t put = ::send(fd, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (put < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (put <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(put));
  }
}

std::string response(std::string_view status, std::string_view type, std::string_view body) {
  return fmt::format(
      "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}",
      status, type, body.size(), body);
}

void answer(int fd, const std::function<std::string()>& text) {
  const std::string request = read_request(fd);
  if (request.empty()) return;
  constexpr std::string_view kPlain = "text/plain; charset=utf-8";
  const bool is_get = request.starts_with("GET ");
  const bool is_metrics =
      request.starts_with("GET /metrics ") || request.starts_with("GET /metrics?");
  if (is_metrics) {
    write_all(fd, response("200 OK", "text/plain; version=0.0.4; charset=utf-8", text()));
  } else if (is_get) {
    write_all(fd, response("404 Not Found", kPlain, "the metrics are at /metrics\n"));
  } else {
    write_all(fd, response("405 Method Not Allowed", kPlain, "GET /metrics\n"));
  }
}

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

Result<void> serve_metrics(const std::string& address, const std::function<std::string()>& text) {
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
      ::listen(listener.fd(), 16) != 0) {
    const int error = errno;
    return fail_serving(error == EADDRINUSE ? Status::in_use : Status::system, address,
                        std::strerror(error), "choose another port");
  }
  fmt::print("serving http://{}/metrics\n", address_of(listener.fd(), address));
  std::fflush(stdout);
  while (!stop_requested()) {
    pollfd polled{listener.fd(), POLLIN, 0};
    if (::poll(&polled, 1, kTurnMs) <= 0) continue;
    const Socket client(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (client.fd() >= 0) answer(client.fd(), text);
  }
  return {};
}

}  // namespace spinwire::tools
