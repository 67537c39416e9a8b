// Counts a snapshot in an engine with so many connections and as many sessions, which must not
// depend on how many: count-snapshot (connection|session|pool|engine) COUNT OPERATIONS.
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "common/setup.h"

using namespace spinwire;

namespace {

Config config_for(std::uint32_t count) {
  Config config = bench::many_connections_config(count);
  config.rpc.sessions = count;
  return config;
}

/// Sessions from the near engine of a pair to the far one.
class Sessions {
 public:
  Sessions(bench::Pair& pair, std::uint32_t count) {
    const auto echo = [](Request& request) { (void)request.reply(request.bytes()); };
    if (auto served = pair.far.serve(bench::kEcho, echo); !served)
      bench::give_up(served.error().message());
    listener_ = bench::must(pair.far.listen("127.0.0.1:0", {}));
    SessionOptions options;
    options.on_ready = [this](Session) { ++ready_; };
    const auto step = [&pair] {
      bench::drive(pair.near);
      bench::drive(pair.far);
    };
    while (sessions_.size() < count) {
      sessions_.push_back(bench::must(pair.near.open_session(listener_.address(), options)));
      bench::run_until("a session is being opened", step,
                       [&] { return ready_ == sessions_.size(); });
    }
  }
  [[nodiscard]] Session& last() noexcept { return sessions_.back(); }

 private:
  Listener listener_;
  std::vector<Session> sessions_;
  std::size_t ready_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t operations = bench::operations_asked(argc, argv);
  bench::step_time();
  const std::string_view what = argc == 4 ? argv[1] : "";
  const auto count = static_cast<std::uint32_t>(argc == 4 ? std::strtoul(argv[2], nullptr, 10) : 0);
  if (count == 0 || count > 4000)
    bench::give_up("arguments: (connection|session|pool|engine) COUNT (1 to 4000) OPERATIONS");
  bench::Pair pair(config_for(count), count);
  Sessions sessions(pair, count);
  for (std::uint32_t i = 0; i < 2 * count; ++i) bench::drive(pair.near);  // all are counted
  std::uint64_t sum = 0;
  if (what == "connection") {
    const auto work = [&] { sum += pair.connections.back().snapshot().stats.send_credits; };
    bench::measured(operations, work);
  } else if (what == "session") {
    const auto work = [&] { sum += sessions.last().snapshot().window; };
    bench::measured(operations, work);
  } else if (what == "pool") {
    const auto work = [&] { sum += pair.near.memory_stats(Pool::send).pool_bytes; };
    bench::measured(operations, work);
  } else if (what == "engine") {
    const auto work = [&] { sum += pair.near.snapshot().stats.connections; };
    bench::measured(operations, work);
    if (sum != 2 * operations * count)  // half of them were not counted
      bench::give_up("a snapshot lacks connections");
  } else {
    bench::give_up("no such snapshot");
  }
  if (sum == 0) bench::give_up("the snapshots are empty");
}
