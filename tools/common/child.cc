#include "common/child.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

namespace spinwire::tools {
namespace {

constexpr Nanoseconds kStartTimeout = std::chrono::seconds(20);

/// Reads the line that announce_address() writes; empty if none arrives.
std::string read_line(int fd) {
  const Deadline deadline(Clock::real(), kStartTimeout);
  std::string line;
  while (!deadline.passed()) {
    pollfd wait{fd, POLLIN, 0};
    if (::poll(&wait, 1, 100) <= 0) continue;
    std::array<char, 128> bytes{};
    const ssize_t got = ::read(fd, bytes.data(), bytes.size());
    if (got <= 0) return {};
    line.append(bytes.data(), static_cast<std::size_t>(got));
    if (line.back() == '\n') return line.substr(0, line.size() - 1);
  }
  return {};
}

[[noreturn]] void run_child(Callback<int(int)> serve, int announce, pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The parent may have died before prctl().
  if (::getppid() != parent) ::_exit(1);
  const int code = serve(announce);
  std::fflush(nullptr);
  ::_exit(code);
}

}  // namespace

void announce_address(int announce, const std::string& address) {
  if (announce < 0) {
    fmt::print("listening on {}\n", address);
    std::fflush(stdout);
    return;
  }
  const std::string line = address + '\n';
  // A write fails only when the parent is gone, and then the child dies as well.
  [[maybe_unused]] const ssize_t written = ::write(announce, line.data(), line.size());
}

Result<ServerChild> ServerChild::start(Callback<int(int)> serve) {
  const auto refused = [](const char* call) {
    return tl::unexpected(Error{Status::system, "start a second process",
                                fmt::format("{}: {}", call, std::strerror(errno)),
                                "check the limits on processes and descriptors"});
  };
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return refused("pipe2");
  std::fflush(nullptr);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::close(ends[0]);
    run_child(serve, ends[1], parent);
  }
  ::close(ends[1]);
  if (pid < 0) {
    ::close(ends[0]);
    return refused("fork");
  }
  ServerChild child(pid, read_line(ends[0]));
  ::close(ends[0]);
  if (!child.address_.empty()) return child;
  return tl::unexpected(Error{Status::timed_out, "start a second process",
                              "it ended or hung before it listened",
                              "read its messages on stderr"});
}

ServerChild::ServerChild(pid_t pid, std::string address)
    : pid_(pid), address_(std::move(address)) {}

ServerChild::ServerChild(ServerChild&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), address_(std::move(other.address_)) {}

ServerChild::~ServerChild() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

int ServerChild::wait(Nanoseconds timeout) {
  const Deadline deadline(Clock::real(), timeout);
  while (pid_ >= 0 && !deadline.passed()) {
    int status = 0;
    if (::waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = -1;
      return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return -1;
}

}  // namespace spinwire::tools
