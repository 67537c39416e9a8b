// Counts 8-byte WRITEs, from the call to the completion callback: count-write OPERATIONS.
#include "common/setup.h"

using namespace spinwire;

int main(int argc, char** argv) {
  const std::uint64_t operations = bench::operations_asked(argc, argv);
  bench::step_time();
  bench::Pair pair(bench::hot_path_config());
  Buffer local = pair.near.allocate(8);
  Buffer remote = pair.far.allocate(8, Pool::lease);
  const RemoteRegion target = bench::must(pair.far.expose(remote.slice(), Access::remote_write));
  const BufferSlice from = local.slice();
  Connection& connection = pair.connections.front();
  std::uint64_t done = 0;
  const auto work = [&] {
    bench::advance_time();
    const std::uint64_t before = done;
    const Status status = connection.write(from, target, [&done](const Completion& c) {
      if (c.status != Status::ok) bench::give_up(to_string(c.status));
      ++done;
    });
    if (status != Status::ok) bench::give_up(to_string(status));
    while (done == before) pair.near.poll();
  };
  for (int i = 0; i < 64; ++i) work();
  bench::measured(operations, work);
}
