// Runs tests of this program again in a new process with an environment variable for the harness.
#pragma once

#include <fcntl.h>
#include <fnmatch.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>

namespace engine_test {

/// Whether a test of this program fits a pattern of a filter.
inline bool names_a_test(const std::string& pattern) {
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *all.GetTestSuite(i);
    for (int k = 0; k < suite.total_test_count(); ++k) {
      const std::string name = std::string(suite.name()) + "." + suite.GetTestInfo(k)->name();
      if (fnmatch(pattern.c_str(), name.c_str(), 0) == 0) return true;
    }
  }
  return false;
}

/// Each pattern of a filter must fit a test, also those that leave tests out. Else a suite with a
/// new name would vanish from the filter.
inline void expect_names_tests(const std::string& filter) {
  for (std::size_t at = 0; at < filter.size();) {
    const std::size_t end = std::min(filter.find_first_of(":-", at), filter.size());
    const std::string pattern = filter.substr(at, end - at);
    EXPECT_TRUE(pattern.empty() || names_a_test(pattern)) << pattern << " names no test";
    at = end + 1;
  }
}

/// Returns the output. A failure in the new process is a failure here.
inline std::string run_again(const char* variable, const char* value, const std::string& filter) {
  expect_names_tests(filter);
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
