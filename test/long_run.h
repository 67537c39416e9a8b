// How often tests repeat what has to go well each time.
#pragma once

#include <cstdint>
#include <cstdlib>

/// `all` if SPINWIRE_TEST_LONG is set, as `make nightly` does, else a fifth of it.
inline std::uint32_t rounds_of(std::uint32_t all) {
  return std::getenv("SPINWIRE_TEST_LONG") != nullptr ? all : all / 5;
}
