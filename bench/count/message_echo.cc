// Counts 32-byte round trips, client and server on one thread: count-message-echo WINDOW
// OPERATIONS.
#include <cstdlib>

#include "common/echo_pair.h"

using namespace spinwire;

int main(int argc, char** argv) {
  const std::uint64_t operations = bench::operations_asked(argc, argv);
  bench::step_time();
  const auto window = argc == 3 ? std::strtoul(argv[1], nullptr, 10) : 0;
  if (window == 0 || window > bench::kMostWindow || operations % window != 0)
    bench::give_up("arguments: WINDOW (1 to 64) OPERATIONS (a multiple of it)");
  bench::EchoPair pair(bench::hot_path_config());
  pair.warm_up(static_cast<std::uint32_t>(window));
  std::uint64_t end = pair.client.done();
  const auto work = [&] {
    bench::advance_time();
    for (end += window; pair.client.done() < end;) pair.poll();
  };
  bench::measured(operations / window, work);
}
