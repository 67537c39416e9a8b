// Runs other programs, each within a time.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "spinwire/status.h"

namespace spinwire::doctor {

using SteadyTime = std::chrono::steady_clock::time_point;
inline SteadyTime now() { return std::chrono::steady_clock::now(); }

/// How to start a program, and how long its output is waited for.
struct Command {
  std::vector<std::string> words;  ///< the first is a path, or a name to search in PATH
  std::vector<std::pair<std::string, std::string>> environment{};  ///< added to ours
  int cpu = -1;  ///< the processor to run on; negative: any
  /// A socket. When its peer has closed, this process need not wait any longer: the program is
  /// late. Negative: none.
  int watched_fd = -1;

  /// The command as one types it in a shell.
  [[nodiscard]] std::string text() const;
};

/// A started program in a process group of its own. Its output and errors are read line by line.
/// The destructor kills the group. Ends with this process.
class RunningProgram {
 public:
  /// Errors: system.
  static Result<RunningProgram> start(const Command& command);
  RunningProgram(RunningProgram&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)),
        fd_(std::exchange(other.fd_, -1)),
        watched_fd_(other.watched_fd_) {}
  RunningProgram(const RunningProgram&) = delete;
  RunningProgram& operator=(const RunningProgram&) = delete;
  ~RunningProgram();

  enum class Got : std::uint8_t { line, end, late };
  /// Waits for the next line; `end`: there are no more. Also late: this program was told to stop,
  /// or the peer of Command::watched_fd has closed.
  Got next_line(std::string& line, SteadyTime deadline);
  /// Waits for the end; the exit status, or 128 plus the signal. Kills a program that is late.
  int wait(SteadyTime deadline);
  [[nodiscard]] pid_t pid() const noexcept { return pid_; }

 private:
  RunningProgram(pid_t pid, int fd, int watched_fd) noexcept
      : pid_(pid), fd_(fd), watched_fd_(watched_fd) {}
  /// Whether this program was told to stop, or nobody waits for the result.
  [[nodiscard]] bool is_over() const;

  pid_t pid_;
  int fd_;
  int watched_fd_;
  std::string text_;  ///< read, and not taken yet
};

/// The output of a program that ends in time. Errors: system, timed_out.
Result<std::string> output_of(const Command& command, SteadyTime deadline);

}  // namespace spinwire::doctor
