// Counts 32-byte round trips by bare verbs on the embedded device, both ends on one thread:
// count-softverbs-echo WINDOW OPERATIONS.
#include <cstdlib>

#include "common/setup.h"
#include "common/verbs_link.h"

using namespace spinwire;

int main(int argc, char** argv) {
  const std::uint64_t operations = bench::operations_asked(argc, argv);
  const auto window = argc == 3 ? std::strtoul(argv[1], nullptr, 10) : 0;
  if (window == 0 || window > 32 || operations % window != 0)
    bench::give_up("arguments: WINDOW (1 to 32) OPERATIONS (a multiple of it)");
  bench::VerbsEnd client;
  bench::VerbsEnd server;
  client.connect(server);
  server.connect(client);
  client.settle();
  server.settle();
  client.send(static_cast<std::uint32_t>(window));
  std::uint64_t done = 0;
  std::uint64_t end = 0;
  const auto work = [&] {
    for (end += window; done < end;) {
      server.step();
      done += client.step();
    }
  };
  for (int i = 0; i < 64; ++i) work();
  bench::measured(operations / window, work);
}
