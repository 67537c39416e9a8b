// What the examples need beside Spinwire: messages on stderr, signals, the command line, values
// that travel as their bytes, and a second process for programs that show both ends at once.
#pragma once

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>

#include "spinwire/spinwire.h"

namespace program {

// ---- messages and errors ----------------------------------------------------------------------

inline constexpr int kDone = 0;
inline constexpr int kFailed = 1;
inline constexpr int kMisused = 2;

/// Named in all messages; set by main().
inline std::string_view name = "program";

/// Prints a message on stderr; returns kFailed.
inline int fail(std::string_view message) {
  fmt::print(stderr, "{}: {}\n", name, message);
  return kFailed;
}
inline int fail(const spinwire::Error& error) { return fail(error.message()); }

/// An error to show to the user.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// Throws a Failure unless there is a value.
template <typename T>
T must(spinwire::Result<T> result) {
  if (!result) throw Failure(result.error().message());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}
inline void must(spinwire::Status status) {
  if (status != spinwire::Status::ok) throw Failure(std::string(to_string(status)));
}

/// Sends the library's messages of this level and above to stderr.
inline void log_to_stderr(spinwire::LogLevel least = spinwire::LogLevel::warning) {
  spinwire::set_log([least](spinwire::LogLevel level, std::string_view message) {
    const bool is_error = level == spinwire::LogLevel::error;
    if (is_error || least == spinwire::LogLevel::warning)
      fmt::print(stderr, "{}: {}: {}\n", name, is_error ? "error" : "warning", message);
  });
}

// ---- signals ----------------------------------------------------------------------------------

inline volatile std::sig_atomic_t stop = 0;

/// SIGINT and SIGTERM make stop_requested() true from now on; a second one ends the program.
inline void catch_stop_signals() {
  struct sigaction action {};
  action.sa_handler = [](int) { stop = 1; };
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}
inline bool stop_requested() noexcept { return stop != 0; }

// ---- the command line -------------------------------------------------------------------------

/// Bounds for CLI::Range(), whose error message names both.
inline constexpr std::uint64_t kOne = 1;
inline constexpr std::uint64_t kMostCount = 1'000'000'000'000'000;
/// Default address of servers: reachable from this host only.
inline constexpr const char* kDefaultAddress = "127.0.0.1:18515";

/// Returns true if the program should go on. If false, it ends with `code`; --help went to stdout,
/// an error to stderr.
inline bool parse_arguments(CLI::App& app, int argc, char** argv, int& code) {
  try {
    app.parse(argc, argv);
    return true;
  } catch (const CLI::ParseError& e) {
    code = app.exit(e) == 0 ? kDone : kMisused;
    return false;
  }
}

// ---- values -----------------------------------------------------------------------------------

template <typename T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}
/// Fails if the length differs from T's.
template <typename T>
bool decode(std::span<const std::byte> bytes, T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (bytes.size() != sizeof value) return false;
  std::memcpy(&value, bytes.data(), sizeof value);
  return true;
}

/// A point in time on a Spinwire clock.
class Deadline {
 public:
  Deadline(const spinwire::Clock& clock, spinwire::Nanoseconds from_now) noexcept
      : clock_(clock), at_(clock.now() + clock.ticks(from_now)) {}
  [[nodiscard]] bool passed() const noexcept { return clock_.now() >= at_; }

 private:
  spinwire::Clock clock_;
  std::uint64_t at_;
};

// ---- a second process -------------------------------------------------------------------------

/// Reports where a server listens: to the descriptor that start() has given, or, if that is
/// negative, to the user.
inline void announce_address(int announce, const std::string& address) {
  if (announce < 0) {
    fmt::print("listening on {}\n", address);
    std::fflush(stdout);
    return;
  }
  // A write fails only when the parent is gone, and then the child dies as well.
  [[maybe_unused]] const ssize_t written = ::write(announce, address.data(), address.size());
  ::close(announce);
}

/// A forked child that runs a server and dies with its parent. Fork it before any engine is opened:
/// an engine belongs to the process and thread that opened it.
class ServerChild {
 public:
  /// Runs `serve(announce)` in a child and waits until it calls announce_address(). What `serve`
  /// returns is the child's exit code. Throws a Failure.
  template <typename Serve>
  explicit ServerChild(const Serve& serve) {
    std::array<int, 2> ends{};
    const pid_t parent = ::getpid();
    std::fflush(nullptr);
    if (::pipe2(ends.data(), O_CLOEXEC) != 0 || (pid_ = ::fork()) < 0)
      throw Failure(std::string("cannot start a second process: ") + std::strerror(errno));
    if (pid_ == 0) {
      ::close(ends[0]);
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      // The parent may have died before prctl().
      const int code = ::getppid() == parent ? serve(ends[1]) : kFailed;
      std::fflush(nullptr);
      ::_exit(code);
    }
    ::close(ends[1]);
    std::array<char, 128> text{};
    const ssize_t got = ::read(ends[0], text.data(), text.size());
    ::close(ends[0]);
    if (got > 0) address_.assign(text.data(), static_cast<std::size_t>(got));
    if (address_.empty()) {
      end();
      throw Failure("the second process ended before it listened: read its messages above");
    }
  }
  ServerChild(const ServerChild&) = delete;
  ServerChild& operator=(const ServerChild&) = delete;
  /// Ends the child if it still runs.
  ~ServerChild() { end(); }

  [[nodiscard]] const std::string& address() const noexcept { return address_; }

  /// Waits for the child to exit and returns its exit code; -1 after ten seconds, or if a signal
  /// ended it.
  int wait() {
    for (int i = 0; i != 10'000; ++i) {
      int status = 0;
      if (::waitpid(pid_, &status, WNOHANG) == pid_) {
        pid_ = -1;
        return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return -1;
  }

 private:
  void end() {
    if (pid_ < 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

  pid_t pid_ = -1;
  std::string address_;
};

}  // namespace program
