// Counts 32-byte round trips, client and server on one thread, of engines that have never slept, or
// that have: count-message-echo WINDOW [slept] OPERATIONS.
#include <cstdlib>
#include <string_view>

#include "common/echo_pair.h"

using namespace spinwire;

int main(int argc, char** argv) {
  const std::uint64_t operations = bench::operations_asked(argc, argv);
  bench::step_time();
  const bool has_slept = argc == 4 && std::string_view(argv[2]) == "slept";
  const auto window = argc == 3 || has_slept ? std::strtoul(argv[1], nullptr, 10) : 0;
  if (window == 0 || window > bench::kMostWindow || operations % window != 0)
    bench::give_up("arguments: WINDOW (1 to 64) [slept] OPERATIONS (a multiple of it)");
  bench::EchoPair pair(bench::hot_path_config());
  const auto drive_both = [&pair] {
    bench::drive(pair.client.engine());
    bench::drive(pair.server.engine());
  };
  if (has_slept) {
    bench::sleep_once(pair.client.engine(), drive_both);
    bench::sleep_once(pair.server.engine(), drive_both);
  }
  pair.warm_up(static_cast<std::uint32_t>(window));
  std::uint64_t end = pair.client.done();
  const auto work = [&] {
    bench::advance_time();
    for (end += window; pair.client.done() < end;) pair.poll();
  };
  bench::measured(operations / window, work);
}
