// Round trips of 32 bytes with both ends on one thread: the library, and the embedded device alone.
#include <benchmark/benchmark.h>

#include <cstdint>

#include "common/echo_pair.h"
#include "common/verbs_link.h"

namespace echo_bench {
namespace {

using spinwire::bench::EchoPair;
using spinwire::bench::VerbsEnd;

void BM_echo(benchmark::State& state) {
  const auto window = static_cast<std::uint32_t>(state.range(0));
  static EchoPair pair(spinwire::bench::hot_path_config());
  pair.warm_up(window);
  // One iteration is one window. Round trips beyond it count for the next iteration.
  std::uint64_t end = pair.client.done();
  for (auto _ : state) {
    for (end += window; pair.client.done() < end;) pair.poll();
  }
  pair.settle();
  state.SetItemsProcessed(state.iterations() * window);
}
BENCHMARK(BM_echo)->Arg(1)->Arg(32)->ArgName("window");

void BM_softverbs_echo(benchmark::State& state) {
  const auto window = static_cast<std::uint32_t>(state.range(0));
  VerbsEnd client;
  VerbsEnd server;
  client.connect(server);
  server.connect(client);
  client.settle();
  server.settle();
  client.send(window);
  std::uint64_t done = 0;
  std::uint64_t end = 0;
  for (auto _ : state) {
    for (end += window; done < end;) {
      server.step();
      done += client.step();
    }
  }
  state.SetItemsProcessed(state.iterations() * window);
}
BENCHMARK(BM_softverbs_echo)->Arg(1)->Arg(32)->ArgName("window");

}  // namespace
}  // namespace echo_bench
