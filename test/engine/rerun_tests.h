// Runs tests of this program again in a new process with an environment variable for the harness.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace engine_test {

/// Returns the output. A failure in the new process is a failure here.
inline std::string run_again(const char* variable, const char* value, const std::string& filter) {
  int out[2];
  EXPECT_EQ(pipe2(out, O_CLOEXEC), 0);
  const std::string option = "--gtest_filter=" + filter;
  const pid_t pid = fork();
  if (pid == 0) {
    (void)dup2(out[1], 1);
    (void)dup2(out[1], 2);
    (void)setenv(variable, value, 1);
    (void)execl("/proc/self/exe", "spinwire-tests", option.c_str(), "--gtest_color=no", nullptr);
    _exit(127);
  }
  close(out[1]);
  std::string text;
  char piece[4096];
  for (ssize_t n = 0; (n = read(out[0], piece, sizeof piece)) > 0;)
    text.append(piece, static_cast<std::size_t>(n));
  close(out[0]);
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << text;
  return text;
}

/// The number of tests that passed.
inline int passed(const std::string& text) {
  constexpr const char* kSign = "[  PASSED  ] ";
  const std::size_t at = text.rfind(kSign);
  return at != std::string::npos ? std::stoi(text.substr(at + std::string(kSign).size())) : 0;
}

}  // namespace engine_test
