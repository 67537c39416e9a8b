// Messages of 32 bytes over many connections, each on one at random, with both ends on one thread;
// and the memory that an idle connection takes.
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <utility>

#include "common/random.h"
#include "common/setup.h"

namespace connections_bench {
namespace {

using namespace spinwire;

/// Pages of this process in memory, in bytes.
std::int64_t resident_bytes() {
  long size = 0, resident = 0;
  std::FILE* const file = std::fopen("/proc/self/statm", "re");
  if (file == nullptr || std::fscanf(file, "%ld %ld", &size, &resident) != 2)
    bench::give_up("/proc/self/statm cannot be read");
  (void)std::fclose(file);
  return resident * ::sysconf(_SC_PAGESIZE);
}

/// The memory of one end of an idle connection.
double bytes_of_an_end(std::uint32_t count) {
  const auto resident_with = [&](std::uint32_t connections) {
    const bench::Pair pair(bench::many_connections_config(count), connections);
    return resident_bytes();
  };
  const std::int64_t least = resident_with(1);
  return static_cast<double>(resident_with(count) - least) / (2.0 * (count - 1));
}

class ManyConnections {
 public:
  /// `prefetched`: the application knows the next connections, and prefetches them.
  ManyConnections(std::uint32_t count, bool prefetched)
      : pair_(bench::many_connections_config(count), count), prefetched_(prefetched) {
    for (Connection& each : next_) each = random_connection();
  }

  /// Sends `window` messages, each on a connection at random, and waits until they have arrived.
  void exchange(std::uint32_t window) {
    static constexpr std::array<std::byte, 32> kBytes{};
    const std::uint64_t end = pair_.arrived + window;
    for (std::uint32_t i = 0; i < window; ++i) {
      Connection connection = pick();
      while (connection.send_copy(std::span(kBytes)) != Status::ok) {
        poll();
        connection = pick();
      }
    }
    while (pair_.arrived < end) poll();
  }

 private:
  void poll() {
    (void)pair_.near.poll();
    (void)pair_.far.poll();
  }
  Connection& random_connection() {
    return pair_.connections[random_.below(pair_.connections.size())];
  }
  /// A connection at random, which was chosen a few calls before.
  Connection pick() {
    if (!prefetched_) return random_connection();
    Connection& place = next_[turn_++ % next_.size()];
    const Connection picked = std::exchange(place, random_connection());
    place.prefetch();
    return picked;
  }

  bench::Pair pair_;
  bench::Random random_;
  bool prefetched_;
  std::array<Connection, 4> next_;
  std::size_t turn_ = 0;
};

void BM_messages(benchmark::State& state) {
  const auto connections = static_cast<std::uint32_t>(state.range(0));
  const auto window = static_cast<std::uint32_t>(state.range(1));
  const auto many = std::make_unique<ManyConnections>(connections, state.range(2) != 0);
  for (std::uint32_t i = 0; i < 4 * connections; i += window) many->exchange(window);
  for (auto _ : state) many->exchange(window);
  state.SetItemsProcessed(state.iterations() * window);
}
BENCHMARK(BM_messages)
    ->ArgsProduct({{1, 100, 1000, 10000}, {1, 32}, {0, 1}})
    ->ArgNames({"connections", "window", "prefetched"});

void BM_idle_connections(benchmark::State& state) {
  const auto connections = static_cast<std::uint32_t>(state.range(0));
  double bytes = 0;
  for (auto _ : state) bytes = bytes_of_an_end(connections);
  state.counters["bytes/end"] = bytes;
}
BENCHMARK(BM_idle_connections)->Arg(1000)->Arg(10000)->ArgName("connections")->Iterations(1);

}  // namespace
}  // namespace connections_bench
