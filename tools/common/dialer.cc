#include "common/dialer.h"

#include <fmt/core.h>
#include <netdb.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <memory>
#include <utility>

namespace spinwire::tools {
namespace {

constexpr Nanoseconds kBetweenTries = std::chrono::milliseconds(50);

}  // namespace

bool worth_retrying(Status status) {
  switch (status) {
    case Status::ok:
    case Status::refused:
    case Status::timed_out:
    case Status::peer_lost:
    case Status::flushed:
    case Status::system:
      return true;
    default:
      return false;
  }
}

Result<std::string> resolve(std::string_view host, int port) {
  std::string bare(host);
  if (bare.size() > 2 && bare.front() == '[' && bare.back() == ']') {
    bare = bare.substr(1, bare.size() - 2);
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(bare.c_str(), nullptr, &hints, &found);
  if (error != 0) {
    return tl::unexpected(Error{Status::invalid_argument, fmt::format("find host '{}'", host),
                                ::gai_strerror(error), "give a name or a numeric address"});
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> keep(found, ::freeaddrinfo);
  std::array<char, NI_MAXHOST> text{};
  ::getnameinfo(found->ai_addr, found->ai_addrlen, text.data(), text.size(), nullptr, 0,
                NI_NUMERICHOST);
  return fmt::format(fmt::runtime(found->ai_family == AF_INET6 ? "[{}]:{}" : "{}:{}"), text.data(),
                     port);
}

Dialer::Dialer(Engine& engine, std::string address, const ConnectionHandlers& handlers,
               Nanoseconds timeout)
    : engine_(engine),
      clock_(engine.clock()),
      address_(std::move(address)),
      handlers_(handlers),
      deadline_(engine.clock(), timeout),
      retry_at_(engine.clock(), Nanoseconds::zero()) {}

Dialer::State Dialer::turn() {
  if (state_ != State::trying || dialing_) return state_;
  if (deadline_.passed()) {
    state_ = State::failed;
  } else if (retry_at_.passed()) {
    ConnectOptions options;
    options.handlers.on_ready = [this](Connection c) { on_ready(c); };
    options.handlers.on_closed = [this](Connection, const Error& e) { on_closed(e); };
    dialing_ = true;
    auto connection = engine_.connect(address_, options);
    if (!connection) give_up(connection.error());
  }
  return state_;
}

void Dialer::on_ready(Connection connection) {
  (void)connection.set_handlers(handlers_);
  connection_ = connection;
  state_ = State::ready;
  if (handlers_.on_ready) handlers_.on_ready(connection);
}

void Dialer::on_closed(const Error& error) {
  error_ = error;
  dialing_ = false;
  retry_at_ = Deadline(clock_, kBetweenTries);
  if (!worth_retrying(error.status)) give_up(error);
}

void Dialer::give_up(const Error& error) {
  error_ = error;
  dialing_ = false;
  state_ = State::failed;
}

Error Dialer::error() const {
  if (error_.status != Status::ok) return error_;
  return {Status::refused, fmt::format("connect to {}", address_),
          "the server closed the connection before it was ready",
          "read the server's messages; it may be busy with another client"};
}

}  // namespace spinwire::tools
