// A program in a terminal.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "eventually.h"
#include "tools/programs.h"

namespace tools_test {

/// A program in a terminal of its own, whose screen is kept as text.
class InTerminal {
 public:
  explicit InTerminal(Words words, int columns = 100, const char* locale = "C", int lines = 20) {
    master_ = ::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    EXPECT_EQ(::grantpt(master_), 0);
    EXPECT_EQ(::unlockpt(master_), 0);
    const winsize size{static_cast<unsigned short>(lines), static_cast<unsigned short>(columns), 0,
                       0};
    EXPECT_EQ(::ioctl(master_, TIOCSWINSZ, &size), 0);
    const std::string terminal = ::ptsname(master_);
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::setsid();
      const int fd = ::open(terminal.c_str(), O_RDWR);
      for (int i = 0; i < 3; ++i) ::dup2(fd, i);
      ::setenv("LC_ALL", locale, 1);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
  }
  InTerminal(const InTerminal&) = delete;
  InTerminal& operator=(const InTerminal&) = delete;
  ~InTerminal() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    ::close(master_);
  }
  /// Reads until `done()`.
  template <typename Done>
  bool until(Done&& done) {
    return waiting::eventually(
        [&] {
          read_some();
          return done();
        },
        kLimit);
  }
  /// Reads until the program has written this so often.
  bool wait_for(std::string_view what, std::size_t times) {
    return until([&] { return count(what) >= times; });
  }
  /// How often the program has written this, as far as it was read.
  [[nodiscard]] std::size_t count(std::string_view what) const {
    std::size_t found = 0;
    for (std::size_t at = text_.find(what); at != std::string::npos; at = text_.find(what, at + 1))
      ++found;
    return found;
  }
  void signal(int number) const { ::kill(pid_, number); }
  void press(char key) const { EXPECT_EQ(::write(master_, &key, 1), 1); }
  int wait() {
    int status = 0;
    EXPECT_TRUE(waiting::eventually(
        [&] {
          read_some();
          return ::waitpid(pid_, &status, WNOHANG) == pid_;
        },
        kLimit));
    pid_ = -1;
    while (read_some()) {
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  [[nodiscard]] const std::string& text() const { return text_; }
  [[nodiscard]] tcflag_t local_modes() const {
    termios modes{};
    EXPECT_EQ(::tcgetattr(master_, &modes), 0);
    return modes.c_lflag;
  }

 private:
  bool read_some() {
    pollfd polled{master_, POLLIN, 0};
    if (::poll(&polled, 1, 20) <= 0) return false;
    std::array<char, 4096> bytes{};
    const ssize_t got = ::read(master_, bytes.data(), bytes.size());
    if (got > 0) text_.append(bytes.data(), static_cast<std::size_t>(got));
    return got > 0;
  }

  int master_ = -1;
  pid_t pid_ = -1;
  std::string text_;
};

}  // namespace tools_test
