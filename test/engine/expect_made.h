// Results of set-up calls that are expected to succeed.
#pragma once

#include <gtest/gtest.h>

#include <utility>

#include "spinwire/status.h"

namespace engine_test {

/// What a call made; empty, and a failure of the test, if it made nothing.
template <typename T>
T expect_made(spinwire::Result<T> made) {
  EXPECT_TRUE(made) << made.error().message();
  return made ? std::move(*made) : T();
}

}  // namespace engine_test
