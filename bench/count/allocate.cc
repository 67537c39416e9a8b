// Counts allocating and freeing a buffer of the send pool: count-allocate BYTES OPERATIONS.
#include <cstdlib>

#include "common/setup.h"

using namespace spinwire;

int main(int argc, char** argv) {
  const std::uint64_t operations = bench::operations_asked(argc, argv);
  const std::size_t bytes = argc == 3 ? std::strtoul(argv[1], nullptr, 10) : 0;
  if (bytes == 0) bench::give_up("arguments: BYTES OPERATIONS");
  Engine engine = bench::open_engine(bench::hot_path_config());
  const auto work = [&engine, bytes] {
    if (!engine.allocate(bytes)) bench::give_up("the send pool is empty");
  };
  for (int i = 0; i < 64; ++i) work();
  bench::measured(operations, work);
}
