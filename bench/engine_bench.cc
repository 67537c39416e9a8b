// The costs of each turn of an application's loop: idle polls, buffers, callbacks.
#include <benchmark/benchmark.h>

#include <cstdint>

#include "common/setup.h"

namespace engine_bench {
namespace {

using namespace spinwire;

void BM_idle_poll(benchmark::State& state) {
  Config config = bench::hot_path_config();
  config.queues.send_depth = 16;  // the completion queue must fit all connections
  config.queues.completion_depth = 65536;
  bench::Pair pair(config, static_cast<std::uint32_t>(state.range(0)));
  for (auto _ : state) {
    if (pair.near.poll() != 0) state.SkipWithError("an idle poll found work");
  }
}
BENCHMARK(BM_idle_poll)->Arg(1)->Arg(100)->Arg(1000)->ArgName("connections");

void BM_allocate(benchmark::State& state) {
  static Engine engine = bench::must(Engine::open(bench::hot_path_config()));
  const auto size = static_cast<std::size_t>(state.range(0));
  for (auto _ : state) {
    Buffer buffer = engine.allocate(size);
    if (!buffer) state.SkipWithError("the send pool is empty");
    benchmark::DoNotOptimize(buffer.data());
  }
}
BENCHMARK(BM_allocate)->Arg(64)->Arg(4 << 10)->Arg(64 << 10)->Arg(1 << 20)->Arg(8 << 20);

void BM_callback(benchmark::State& state) {
  std::uint64_t bytes = 0;
  CompletionCallback callback = [&bytes](const Completion& c) { bytes += c.bytes; };
  benchmark::DoNotOptimize(callback);
  const Completion completion{Status::ok, 32};
  for (auto _ : state) {
    callback(completion);
    benchmark::ClobberMemory();
  }
  benchmark::DoNotOptimize(bytes);
}
BENCHMARK(BM_callback);

}  // namespace
}  // namespace engine_bench
