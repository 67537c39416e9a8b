// A second process for programs that show both ends at once.
#pragma once

#include <sys/types.h>

#include <string>

#include "common/spin.h"
#include "spinwire/callback.h"
#include "spinwire/status.h"

namespace spinwire::tools {

/// Tells the parent process where this one listens: one line into the descriptor `announce`,
/// or onto stdout if that is negative.
void announce_address(int announce, const std::string& address);

/// A child made by fork() that serves; it dies with its parent. Make it before any engine is
/// opened: an engine belongs to the process that opened it.
class ServerChild {
 public:
  /// Runs `serve(announce)` in a child, which exits with what it answers, and waits until it has
  /// called announce_address(). Errors: system, timed_out.
  static Result<ServerChild> start(Callback<int(int)> serve);

  ServerChild(ServerChild&& other) noexcept;
  ServerChild(const ServerChild&) = delete;
  ServerChild& operator=(const ServerChild&) = delete;
  /// Ends the child if it is still there.
  ~ServerChild();

  [[nodiscard]] const std::string& address() const noexcept { return address_; }
  /// Waits for the child to exit and answers its code; -1, and the child is ended, if it takes
  /// longer or dies of a signal.
  int wait(Nanoseconds timeout);

 private:
  ServerChild(pid_t pid, std::string address);

  pid_t pid_;
  std::string address_;
};

}  // namespace spinwire::tools
