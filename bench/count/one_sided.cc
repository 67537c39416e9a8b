// Counts 8-byte READs or fetch-and-adds, from the call to the completion callback, WINDOW at a
// time: count-one-sided read|atomic WINDOW OPERATIONS.
#include <cstdlib>
#include <string_view>

#include "common/setup.h"

using namespace spinwire;

int main(int argc, char** argv) {
  const std::uint64_t operations = bench::operations_asked(argc, argv);
  bench::step_time();
  const std::string_view kind(argc == 4 ? argv[1] : "");
  const unsigned long window = argc == 4 ? std::strtoul(argv[2], nullptr, 10) : 0;
  const bool is_read = kind == "read";
  if ((!is_read && kind != "atomic") || window == 0 || window > 64 || operations % window != 0)
    bench::give_up("arguments: read or atomic, WINDOW (1 to 64), OPERATIONS (a multiple)");
  bench::Pair pair(bench::hot_path_config());
  Buffer local = pair.near.allocate(8);
  Buffer remote = pair.far.allocate(8, Pool::lease);
  const RemoteRegion target = bench::must(pair.far.expose(remote.slice(), Access::remote_all));
  const BufferSlice into = local.slice();
  Connection& connection = pair.connections.front();
  std::uint64_t done = 0;
  const auto start = [&](Post post) {
    const auto end = [&done](const Completion& c) {
      if (c.status != Status::ok) bench::give_up(to_string(c.status));
      ++done;
    };
    const Status status = is_read ? connection.read(into, target, end, post)
                                  : connection.fetch_add(target, 1, end, post);
    if (status != Status::ok) bench::give_up(to_string(status));
  };
  const auto work = [&] {
    bench::advance_time();
    const std::uint64_t after = done + window;
    for (unsigned long i = 1; i < window; ++i) start(Post::defer);
    start(Post::automatic);
    while (done != after) pair.near.poll();
  };
  for (int i = 0; i < 64; ++i) work();
  bench::measured(operations / window, work);
}
