#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/log_message.h"

namespace log_test {
namespace {

using spinwire::LogLevel;
using spinwire::base::log;
using spinwire::base::log_enabled;

/// Collects messages during its lifetime.
struct Listener {
  explicit Listener(LogLevel least) {
    spinwire::set_log(
        [this](LogLevel level, std::string_view text) { got.emplace_back(level, text); }, least);
  }
  ~Listener() { spinwire::set_log({}); }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  std::vector<std::pair<LogLevel, std::string>> got;
};

/// Counts how often it is formatted.
struct Counted {
  int* formatted;
};

}  // namespace
}  // namespace log_test

template <>
struct fmt::formatter<log_test::Counted> {
  static constexpr auto parse(format_parse_context& context) { return context.begin(); }
  static auto format(const log_test::Counted& counted, format_context& context) {
    ++*counted.formatted;
    if (*counted.formatted > 1) throw std::runtime_error("formats once only");
    return context.out();
  }
};

namespace log_test {
namespace {

TEST(Log, DeliversFormattedMessagesAtOrAboveTheLevel) {
  Listener listener(LogLevel::warning);
  log(LogLevel::debug, "no {}", 1);
  log(LogLevel::info, "no {}", 2);
  log(LogLevel::warning, "port {} of {}", 7, "rxe0");
  log(LogLevel::error, "plain");
  ASSERT_EQ(listener.got.size(), 2u);
  EXPECT_EQ(listener.got[0].first, LogLevel::warning);
  EXPECT_EQ(listener.got[0].second, "port 7 of rxe0");
  EXPECT_EQ(listener.got[1].first, LogLevel::error);
  EXPECT_EQ(listener.got[1].second, "plain");
}

TEST(Log, DeliversMessagesLongerThanItsBuffer) {
  Listener listener(LogLevel::info);
  const std::string text(10'000, 'x');
  log(LogLevel::info, "{}!", text);
  ASSERT_EQ(listener.got.size(), 1u);
  EXPECT_EQ(listener.got[0].second, text + "!");
}

TEST(Log, FormatsNothingWhenNobodyListens) {
  int formatted = 0;
  spinwire::set_log({}, LogLevel::debug);
  EXPECT_FALSE(log_enabled(LogLevel::error));
  log(LogLevel::error, "{}", Counted{&formatted});
  EXPECT_EQ(formatted, 0);
  {
    Listener listener(LogLevel::error);
    EXPECT_TRUE(log_enabled(LogLevel::error));
    EXPECT_FALSE(log_enabled(LogLevel::warning));
    log(LogLevel::warning, "{}", Counted{&formatted});
    EXPECT_EQ(formatted, 0);
    log(LogLevel::error, "{}", Counted{&formatted});
    EXPECT_EQ(formatted, 1);
  }
  EXPECT_FALSE(log_enabled(LogLevel::error));
}

TEST(Log, LetsNoExceptionOut) {
  int formatted = 1;  // the next time throws
  Listener listener(LogLevel::error);
  log(LogLevel::error, "{}", Counted{&formatted});
  EXPECT_EQ(formatted, 2);
  EXPECT_TRUE(listener.got.empty());
  spinwire::set_log([](LogLevel, std::string_view) { throw std::runtime_error("no"); });
  log(LogLevel::error, "goes nowhere");
}

TEST(Log, ALaterReceiverReplacesAnEarlierOne) {
  Listener first(LogLevel::debug);
  Listener second(LogLevel::debug);
  log(LogLevel::info, "to the second");
  EXPECT_TRUE(first.got.empty());
  EXPECT_EQ(second.got.size(), 1u);
}

TEST(ThreadsLog, ReceiversMayBeSetWhileOthersLog) {
  static std::atomic<int> received{0};
  received = 0;
  std::atomic<bool> stop{false};
  std::thread logger([&] {
    while (!stop.load()) log(LogLevel::error, "{}", 1);
  });
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (received.load() < 100 && std::chrono::steady_clock::now() < deadline) {
    spinwire::set_log([](LogLevel, std::string_view text) { received += text == "1" ? 1 : 0; });
    std::this_thread::yield();
  }
  spinwire::set_log({});
  stop = true;
  logger.join();
  EXPECT_GE(received.load(), 100);
}

TEST(Check, PassesWhenItHolds) {
  int evaluated = 0;
  SPINWIRE_CHECK(++evaluated == 1, "evaluated once");
  EXPECT_EQ(evaluated, 1);
}

TEST(Check, LogsWhyAndTrapsWhenItDoesNot) {
  std::array<int, 2> pipe_ends{};
  ASSERT_EQ(::pipe(pipe_ends.data()), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const int out = pipe_ends[1];
    spinwire::set_log([out](LogLevel, std::string_view text) {
      if (::write(out, text.data(), text.size()) < 0) ::_exit(1);
    });
    SPINWIRE_CHECK(out < 0, "the lists would disagree");
    ::_exit(0);
  }
  ::close(pipe_ends[1]);
  std::array<char, 512> text{};
  const ssize_t length = ::read(pipe_ends[0], text.data(), text.size() - 1);
  ::close(pipe_ends[0]);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_TRUE(WTERMSIG(status) == SIGILL || WTERMSIG(status) == SIGTRAP) << status;
  ASSERT_GT(length, 0);
  const std::string said(text.data());
  EXPECT_NE(said.find("broken invariant (out < 0): the lists would disagree"), std::string::npos)
      << said;
  EXPECT_NE(said.find("log_test.cc:"), std::string::npos) << said;
}

}  // namespace
}  // namespace log_test
