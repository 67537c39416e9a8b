// A second process, for programs that show both ends at once.
#pragma once

#include <sys/types.h>

#include <string>

#include "common/spin.h"
#include "spinwire/callback.h"
#include "spinwire/status.h"

namespace spinwire::tools {

/// Reports the listening address to the parent process: one line to the descriptor `announce`, or
/// to stdout if `announce` is negative.
void announce_address(int announce, const std::string& address);

/// A forked child that runs a server and dies with its parent. Fork it before any engine is opened:
/// an engine belongs to the process that opened it.
class ServerChild {
 public:
  /// Runs `serve(announce)` in a child and waits until the child calls announce_address(). The
  /// result of `serve` is the child's exit code. Errors: system, timed_out.
  static Result<ServerChild> start(Callback<int(int)> serve);

  ServerChild(ServerChild&& other) noexcept;
  ServerChild(const ServerChild&) = delete;
  ServerChild& operator=(const ServerChild&) = delete;
  /// Ends the child if it still runs.
  ~ServerChild();

  [[nodiscard]] const std::string& address() const noexcept { return address_; }
  /// Waits for the child to exit and returns its exit code; -1 after the timeout or if a signal
  /// ended it. The destructor ends a child that still runs.
  int wait(Nanoseconds timeout);

 private:
  ServerChild(pid_t pid, std::string address);

  pid_t pid_;
  std::string address_;
};

}  // namespace spinwire::tools
