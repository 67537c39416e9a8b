// Counts messages of 32 bytes, each on a connection at random, both ends on one thread:
// count-message-connections CONNECTIONS OPERATIONS.
#include <array>
#include <cstdlib>
#include <span>

#include "common/random.h"
#include "common/setup.h"

using namespace spinwire;

int main(int argc, char** argv) {
  const std::uint64_t operations = bench::operations_asked(argc, argv);
  bench::step_time();
  const auto count = argc == 3 ? std::strtoul(argv[1], nullptr, 10) : 0;
  if (count == 0 || count > 10000) bench::give_up("arguments: CONNECTIONS (1 to 10000) OPERATIONS");
  bench::Pair pair(bench::many_connections_config(static_cast<std::uint32_t>(count)),
                   static_cast<std::uint32_t>(count));
  bench::Random random;
  const auto work = [&] {
    static constexpr std::array<std::byte, 32> kBytes{};
    Connection& connection = pair.connections[random.below(count)];
    const std::uint64_t end = pair.arrived + 1;
    bench::advance_time();
    while (connection.send_copy(std::span(kBytes)) != Status::ok)
      bench::drive(pair.far), bench::drive(pair.near);
    while (pair.arrived < end) {
      (void)pair.far.poll();
      (void)pair.near.poll();
    }
  };
  for (std::uint64_t i = 0; i < 4 * count; ++i) work();
  bench::measured(operations, work);
}
