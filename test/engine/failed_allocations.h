// How many allocations of this thread have failed because zero_cost_test::fail_every says so.
#pragma once

#include <cstdint>

namespace zero_cost_test {

inline thread_local std::uint64_t failed_allocations = 0;

}  // namespace zero_cost_test
