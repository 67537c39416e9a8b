// Test helper: an exception that a callback throws, and the count of those that the library logs.
#pragma once

#include <gtest/gtest.h>

#include <stdexcept>
#include <string_view>

#include "spinwire/log.h"

namespace rpc_test {

[[noreturn]] inline void fail() { throw std::runtime_error("it cannot go on"); }

/// Counts the exceptions that were logged.
class CountsThrownExceptions : public testing::Test {
 protected:
  void SetUp() override {
    logged = 0;
    spinwire::set_log([](spinwire::LogLevel level, std::string_view text) {
      const bool is_error = level == spinwire::LogLevel::error;
      logged += is_error && text == "an exception left a callback: it cannot go on" ? 1 : 0;
    });
  }
  void TearDown() override { spinwire::set_log({}); }
  static inline int logged = 0;
};

}  // namespace rpc_test
