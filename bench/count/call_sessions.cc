// Counts calls of 32 bytes, 32 in flight, spread over sessions at random: count-call-sessions
// SESSIONS OPERATIONS.
#include <cstdlib>
#include <memory>

#include "common/many_sessions.h"

using namespace spinwire;

int main(int argc, char** argv) {
  const std::uint64_t operations = bench::operations_asked(argc, argv);
  bench::step_time();
  const auto sessions =
      static_cast<std::uint32_t>(argc == 3 ? std::strtoul(argv[1], nullptr, 10) : 0);
  if (sessions == 0) bench::give_up("arguments: SESSIONS OPERATIONS");
  constexpr std::uint32_t kWindow = 32;
  const auto many =
      std::make_unique<bench::ManySessions>(bench::hot_path_config(), sessions, kWindow);
  std::uint64_t end = 4 * std::uint64_t{sessions};
  const auto work = [&] {
    bench::advance_time();
    for (end += kWindow; many->done() < end;) many->poll();
  };
  work();  // uses every session once
  bench::measured(operations / kWindow, work);
}
