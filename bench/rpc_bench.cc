// Calls of 32 bytes with both ends on one thread. A given number is in flight, spread over sessions
// at random.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <memory>

#include "common/many_sessions.h"

namespace rpc_bench {
namespace {

using spinwire::bench::ManySessions;

void BM_calls(benchmark::State& state) {
  const auto sessions = static_cast<std::uint32_t>(state.range(0));
  const auto calls = static_cast<std::uint32_t>(state.range(1));
  const auto many = std::make_unique<ManySessions>(spinwire::Config{}, sessions, calls);
  std::uint64_t end = 4 * std::uint64_t{sessions};
  while (many->done() < end) many->poll();  // uses every session once
  for (auto _ : state) {
    for (end += calls; many->done() < end;) many->poll();
  }
  state.SetItemsProcessed(state.iterations() * calls);
}
// With more calls in flight than receives, most calls wait.
BENCHMARK(BM_calls)
    ->Args({1, 32})
    ->Args({100, 32})
    ->Args({10000, 32})
    ->Args({10000, 700})
    ->Args({10000, 4000})
    ->ArgNames({"sessions", "calls"});

}  // namespace
}  // namespace rpc_bench
