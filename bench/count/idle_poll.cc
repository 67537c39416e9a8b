// Counts a poll that finds no work, of an engine that has never slept, or that has:
// count-idle-poll CONNECTIONS [slept] OPERATIONS.
#include <fmt/core.h>

#include <chrono>
#include <cstdlib>
#include <string_view>

#include "common/setup.h"

using namespace spinwire;

int main(int argc, char** argv) {
  const std::uint64_t operations = bench::operations_asked(argc, argv);
  const bool has_slept = argc == 4 && std::string_view(argv[2]) == "slept";
  if (argc != 3 && !has_slept) bench::give_up("arguments: CONNECTIONS [slept] OPERATIONS");
  Config config = bench::hot_path_config();
  config.queues.send_depth = 16;  // the completion queue must fit all connections
  config.queues.completion_depth = 65536;
  // Seconds may pass on a busy machine; a poll with a timer that is due is not idle.
  config.connections.keepalive_interval = config.connections.peer_timeout =
      config.connections.credit_idle_timeout = std::chrono::hours(1);
  // So may the polls: a process that lacks a processor would record that they were long.
  config.observability.longest_poll = config.observability.longest_callback =
      config.observability.longest_pause = std::chrono::hours(1);
  bench::Pair pair(config, static_cast<std::uint32_t>(std::strtoul(argv[1], nullptr, 10)));
  const auto drive_both = [&pair] {
    bench::drive(pair.near);
    bench::drive(pair.far);
  };
  if (has_slept) {
    bench::sleep_once(pair.near, drive_both);
    pair.send_back();
  }
  // Several polls per turn, so that the loop's own instructions hardly count.
  constexpr std::uint64_t kPolls = 16;
  const auto work = [&pair] {
    int events = 0;
#pragma GCC unroll 16
    for (std::uint64_t i = 0; i < kPolls; ++i) events |= pair.near.poll();
    if (events != 0) bench::give_up(fmt::format("an idle poll answered {}", events));
  };
  bench::measured(operations / kPolls, work);
}
