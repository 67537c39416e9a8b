// Connects to a server that may not be up yet.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "common/spin.h"
#include "spinwire/engine.h"

namespace spinwire::tools {

/// Returns "host:port" with a numeric address. Looks names up and may block. Errors:
/// invalid_argument.
Result<std::string> resolve(std::string_view host, int port);

/// Whether another attempt may succeed after `status`.
bool worth_retrying(Status status);

/// Tries to connect until the connection is ready or the time is over. The handlers are installed
/// once it is ready, so on_closed reports only later events. Set-up.
class Dialer {
 public:
  enum class State : std::uint8_t { trying, ready, failed };

  /// `address` is "a.b.c.d:port" or "[v6]:port". The dialer must stay where it is. It must outlive
  /// the engine unless it is ready or failed.
  Dialer(Engine& engine, std::string address, const ConnectionHandlers& handlers,
         Nanoseconds timeout);
  Dialer(const Dialer&) = delete;
  Dialer& operator=(const Dialer&) = delete;

  /// Call it between polls.
  State turn();
  [[nodiscard]] Connection connection() const noexcept { return connection_; }
  [[nodiscard]] const std::string& address() const noexcept { return address_; }
  /// The reason of the failure.
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
