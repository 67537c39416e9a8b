// WRITE and READ, one at a time, from the call to the completion callback, beside memcpy between
// the same two buffers.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstring>

#include "common/setup.h"

namespace one_sided_bench {
namespace {

using namespace spinwire;

constexpr std::size_t kLargest = 8 << 20;

Config config() {
  Config c = bench::hot_path_config();
  c.memory.lease_bytes = c.memory.send_bytes = 4 * kLargest;
  return c;
}

/// A local buffer and an exposed one of the peer, both of the largest size.
struct Ends {
  Ends()
      : pair(config()),
        local(pair.near.allocate(kLargest)),
        remote(pair.far.allocate(kLargest, Pool::lease)),
        target(bench::must(pair.far.expose(remote.slice(), Access::remote_read_write))) {
    std::memset(local.data(), 1, kLargest);
    std::memset(remote.data(), 2, kLargest);
  }
  [[nodiscard]] Connection& connection() { return pair.connections.front(); }
  void finish(Status status) {
    if (status != Status::ok) bench::give_up(to_string(status));
    while (!done) pair.near.poll();
    done = false;
  }
  [[nodiscard]] CompletionCallback note() {
    return [this](const Completion& c) {
      if (c.status != Status::ok) bench::give_up(to_string(c.status));
      done = true;
    };
  }

  bench::Pair pair;
  Buffer local;
  Buffer remote;
  RemoteRegion target;
  bool done = false;
};

Ends& the_ends() {
  static Ends ends;
  return ends;
}

void BM_write(benchmark::State& state) {
  Ends& ends = the_ends();
  const auto size = static_cast<std::size_t>(state.range(0));
  const BufferSlice local = ends.local.slice(0, size);
  const RemoteRegion remote = ends.target.slice(0, size);
  for (auto _ : state) ends.finish(ends.connection().write(local, remote, ends.note()));
  state.SetBytesProcessed(state.iterations() * state.range(0));
}

void BM_read(benchmark::State& state) {
  Ends& ends = the_ends();
  const auto size = static_cast<std::size_t>(state.range(0));
  const BufferSlice local = ends.local.slice(0, size);
  const RemoteRegion remote = ends.target.slice(0, size);
  for (auto _ : state) ends.finish(ends.connection().read(local, remote, ends.note()));
  state.SetBytesProcessed(state.iterations() * state.range(0));
}

void BM_memcpy(benchmark::State& state) {
  Ends& ends = the_ends();
  const auto size = static_cast<std::size_t>(state.range(0));
  for (auto _ : state) {
    std::memcpy(ends.remote.data(), ends.local.data(), size);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * state.range(0));
}

void sizes(benchmark::internal::Benchmark* b) {
  b->RangeMultiplier(8)->Range(8, static_cast<std::int64_t>(kLargest))->Arg(1 << 20);
}
BENCHMARK(BM_memcpy)->Apply(sizes);
BENCHMARK(BM_write)->Apply(sizes);
BENCHMARK(BM_read)->Apply(sizes);

}  // namespace
}  // namespace one_sided_bench
