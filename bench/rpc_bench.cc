// Calls of 32 bytes with both ends on one thread, 32 under way, spread over sessions at random.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <memory>

#include "common/many_sessions.h"

namespace rpc_bench {
namespace {

using spinwire::bench::ManySessions;

void BM_calls(benchmark::State& state) {
  constexpr std::uint32_t kWindow = 32;
  const auto sessions = static_cast<std::uint32_t>(state.range(0));
  const auto many = std::make_unique<ManySessions>(spinwire::Config{}, sessions, kWindow);
  std::uint64_t end = 4 * std::uint64_t{sessions};
  while (many->done() < end) many->poll();  // every session has been in use
  for (auto _ : state) {
    for (end += kWindow; many->done() < end;) many->poll();
  }
  state.SetItemsProcessed(state.iterations() * kWindow);
}
BENCHMARK(BM_calls)->Arg(1)->Arg(100)->Arg(10000)->ArgName("sessions");

}  // namespace
}  // namespace rpc_bench
