// Connects to a server that may not be up yet.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "common/spin.h"
#include "spinwire/engine.h"

namespace spinwire::tools {

/// "host:port" with the host's address in numbers; looks names up and may block. Errors:
/// invalid_argument.
Result<std::string> resolve(std::string_view host, int port);

/// Whether a server that could not be reached so may think better of it.
bool worth_retrying(Status status);

/// Tries to connect, again and again, until the connection is ready or the time is over. The
/// handlers are installed when it is ready: their on_closed tells only of what comes after. Set-up.
class Dialer {
 public:
  enum class State : std::uint8_t { trying, ready, failed };

  /// `address` is "a.b.c.d:port" or "[v6]:port". The dialer stays where it is, and
  /// outlives the engine unless it is ready or failed.
  Dialer(Engine& engine, std::string address, const ConnectionHandlers& handlers,
         Nanoseconds timeout);
  Dialer(const Dialer&) = delete;
  Dialer& operator=(const Dialer&) = delete;

  /// To be called between polls.
  State turn();
  [[nodiscard]] Connection connection() const noexcept { return connection_; }
  [[nodiscard]] const std::string& address() const noexcept { return address_; }
  /// Why it failed.
  [[nodiscard]] Error error() const;

 private:
  void on_ready(Connection connection);
  void on_closed(const Error& error);
  void give_up(const Error& error);

  Engine& engine_;
  Clock clock_;
  std::string address_;
  ConnectionHandlers handlers_;
  Deadline deadline_;
  Deadline retry_at_;
  State state_ = State::trying;
  bool dialing_ = false;
  Connection connection_;
  Error error_;
};

}  // namespace spinwire::tools
