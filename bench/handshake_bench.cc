// The processor time that it takes to set up a connection or a session over TCP, of both ends
// together, the kernel's included; with a key and without one. Both ends are on one thread.
#include <benchmark/benchmark.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <string>
#include <string_view>
#include <vector>

#include "common/setup.h"
#include "spinwire/rpc.h"

namespace handshake_bench {
namespace {

using namespace spinwire;

/// The most that a set-up with a key may take of each end, on average of the two.
constexpr double kLimitMicroseconds = 200;

double processor_microseconds() {
  std::timespec time{};
  if (::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time) != 0)
    bench::give_up("the processor time cannot be read");
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
}

/// A key file, until the engines have read it.
class KeyFile {
 public:
  KeyFile() {
    const int fd = ::mkstemp(path_.data());
    const std::string text = "bench " + std::string(64, 'a') + '\n';
    if (fd < 0 || ::write(fd, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
      bench::give_up("a key file cannot be written");
    ::close(fd);
  }
  KeyFile(const KeyFile&) = delete;
  KeyFile& operator=(const KeyFile&) = delete;
  ~KeyFile() { ::unlink(path_.c_str()); }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_ = "/tmp/spinwire-bench-key-XXXXXX";
};

Config config_with(std::string_view key_file) {
  Config config = bench::hot_path_config();
  config.security.key_file = key_file;
  return config;
}

class Ends {
 public:
  explicit Ends(std::string_view key_file)
      : near_(bench::open_engine(config_with(key_file))),
        far_(bench::open_engine(config_with(key_file))) {
    if (!far_.serve(bench::kEcho, [](Request& r) { (void)r.reply(r.bytes()); }))
      bench::give_up("the method cannot be served");
    ListenOptions options;
    options.handlers.on_ready = [this](Connection) { ++ready_; };
    listener_ = bench::must(far_.listen("127.0.0.1:0", options));
  }

  /// Sets one up, and answers the microseconds until both ends are ready.
  double connection() {
    ready_ = 0;
    const double begin = processor_microseconds();
    Connection made = bench::must(near_.connect(listener_.address(), {}));
    run("a connection is being made", [&] { return made.ready() && ready_ != 0; });
    const double end = processor_microseconds();
    (void)made.close();
    run("a connection ends",
        [&] { return near_.stats().connections + far_.stats().connections == 0; });
    return end - begin;
  }
  double session() {
    const double begin = processor_microseconds();
    Session made = bench::must(near_.open_session(listener_.address(), {}));
    run("a session is being opened", [&] { return made.ready(); });
    const double end = processor_microseconds();
    (void)made.close();
    run("a session ends",
        [&] { return near_.rpc_stats().sessions + far_.rpc_stats().served_sessions == 0; });
    return end - begin;
  }

 private:
  template <typename Done>
  void run(std::string_view what, Done&& done) {
    bench::run_until(
        what,
        [this] {
          bench::drive(near_);
          bench::drive(far_);
        },
        done);
  }

  Engine near_;
  Engine far_;
  Listener listener_;
  int ready_ = 0;  ///< accepted connections
};

/// Reports the median, and checks the least, which a busy machine changes least.
void measure(benchmark::State& state, double (Ends::*set_up)()) {
  const bool keyed = state.range(0) != 0;
  const KeyFile file;
  Ends ends(keyed ? std::string_view(file.path()) : std::string_view());
  for (int i = 0; i < 20; ++i) (void)(ends.*set_up)();
  std::vector<double> times;
  for (auto _ : state) {
    times.push_back((ends.*set_up)());
    state.SetIterationTime(times.back() / 1e6);
  }
  std::sort(times.begin(), times.end());
  state.counters["median_us"] = times[times.size() / 2];
  state.counters["least_us"] = times[0];
  if (keyed && times[0] / 2 > kLimitMicroseconds)
    state.SkipWithError("a set-up with a key takes more than 200 us of an end's processor time");
}

void BM_connection_set_up(benchmark::State& state) { measure(state, &Ends::connection); }
void BM_session_set_up(benchmark::State& state) { measure(state, &Ends::session); }
BENCHMARK(BM_connection_set_up)->Arg(0)->Arg(1)->ArgName("key")->UseManualTime()->Iterations(500);
BENCHMARK(BM_session_set_up)->Arg(0)->Arg(1)->ArgName("key")->UseManualTime()->Iterations(500);

}  // namespace
}  // namespace handshake_bench
