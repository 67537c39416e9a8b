// The processor time that it takes to set up a connection over TCP, out of band or through rdma_cm,
// or a session, of both ends together, the kernel's included; with a key and without one. Both ends
// are on one thread. With SPINWIRE_DEVICE_ADDRESS, connections of that device are measured, too:
// the embedded device has no rdma_cm.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <ctime>
#include <string>
#include <string_view>
#include <vector>

#include "common/key_file.h"
#include "common/setup.h"
#include "spinwire/idler.h"
#include "spinwire/rpc.h"

namespace handshake_bench {
namespace {

using namespace spinwire;
using bench::KeyFile;

/// The most that a set-up with a key may take of one end: half of the median of both together.
constexpr double kLimitMicroseconds = 200;

double processor_microseconds() {
  std::timespec time{};
  if (::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time) != 0)
    bench::give_up("the processor time cannot be read");
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
}

Config config_with(std::string_view key_file) {
  Config config = bench::hot_path_config();
  config.security.key_file = key_file;
  return config;
}

/// The device of the environment, for connections that it sets up.
Config device_config(std::string_view key_file) {
  Config config = bench::must(Config::load());
  config.engine.control = ControlMode::automatic;
  config.security.key_file = key_file;
  config.security.open = true;  // without a key
  return config;
}

class Ends {
 public:
  explicit Ends(std::string_view key_file) : Ends(config_with(key_file), "127.0.0.1", Via::tcp) {}
  Ends(const Config& config, const std::string& address, Via via)
      : near_(bench::open_engine(config)),
        far_(bench::open_engine(config)),
        via_(via),
        is_device_(config.engine.control == ControlMode::automatic) {
    if (!far_.serve(bench::kEcho, [](Request& r) { (void)r.reply(r.bytes()); }))
      bench::give_up("the method cannot be served");
    ListenOptions options;
    options.handlers.on_ready = [this](Connection) { ++ready_; };
    options.via = via;
    listener_ = bench::must(far_.listen(address + ":0", options));
  }

  /// Sets one up, and answers the microseconds until both ends are ready.
  double connection() {
    ready_ = 0;
    const double begin = processor_microseconds();
    ConnectOptions options;
    options.via = via_;
    Connection made = bench::must(near_.connect(listener_.address(), options));
    run("a connection is being made", [&] { return made.ready() && ready_ != 0; });
    const double end = processor_microseconds();
    (void)made.close();
    run("a connection ends",
        [&] { return near_.stats().connections + far_.stats().connections == 0; });
    return end - begin;
  }
  /// Each end joins the other's endpoint, whose way from one to the other takes no time here.
  double out_of_band() {
    const double begin = processor_microseconds();
    const std::array<Connection, 2> made{prepare(near_, 0), prepare(far_, 1)};
    run("endpoints are being prepared", [&] { return prepared_[0] && prepared_[1]; });
    for (std::size_t i = 0; i < 2; ++i) {
      Connection c = made[i];
      if (!c.join(endpoints_[1 - i])) bench::give_up("an endpoint is refused");
    }
    run("a connection is being joined", [&] { return made[0].ready() && made[1].ready(); });
    const double end = processor_microseconds();
    prepared_ = {};
    for (Connection c : made) (void)c.close();
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
  Connection prepare(Engine& engine, std::size_t end) {
    PrepareOptions options;
    options.on_endpoint = [this, end](Connection, const Endpoint& e) {
      endpoints_[end] = e;
      prepared_[end] = true;
    };
    return bench::must(engine.prepare(options));
  }
  template <typename Done>
  void run(std::string_view what, Done&& done) {
    bench::run_until(
        what,
        [this] {
          if (is_device_) return sleep_and_poll();
          bench::drive(near_);
          bench::drive(far_);
        },
        done);
  }
  /// While a driver works in threads of its own, polling would count as work.
  void sleep_and_poll() {
    Engine* const engines[] = {&near_, &far_};
    if (idler_.turn(engines) != Status::ok) bench::give_up("a turn failed");
  }

  Engine near_;
  Engine far_;
  Via via_;
  bool is_device_;
  Idler idler_{IdlerOptions{.pauses = 0}};
  Listener listener_;
  int ready_ = 0;  ///< accepted connections
  std::array<Endpoint, 2> endpoints_;
  std::array<bool, 2> prepared_{};
};

/// Reports the median and the least, and returns the median.
double measure(benchmark::State& state, Ends& ends, double (Ends::*set_up)()) {
  for (int i = 0; i < 20; ++i) (void)(ends.*set_up)();
  std::vector<double> times;
  for (auto _ : state) {
    times.push_back((ends.*set_up)());
    state.SetIterationTime(times.back() / 1e6);
  }
  std::sort(times.begin(), times.end());
  state.counters["median_us"] = times[times.size() / 2];
  state.counters["least_us"] = times[0];
  return times[times.size() / 2];
}

/// On the embedded device. Checks the median.
void measure(benchmark::State& state, double (Ends::*set_up)()) {
  const bool keyed = state.range(0) != 0;
  const KeyFile file;
  Ends ends(keyed ? std::string_view(file.path()) : std::string_view());
  const double median = measure(state, ends, set_up);
  if (keyed && median / 2 > kLimitMicroseconds)
    state.SkipWithError("a set-up with a key takes more than 200 us of an end's processor time");
}

/// On the environment's device, whose driver takes a part of the time that we do not bound.
void measure_device(benchmark::State& state, Via via) {
  const KeyFile file;
  const Config config =
      device_config(state.range(0) != 0 ? std::string_view(file.path()) : std::string_view());
  Ends ends(config, config.device.address, via);
  (void)measure(state, ends, &Ends::connection);
}
[[maybe_unused]] const bool has_device = [] {
  if (std::getenv("SPINWIRE_DEVICE_ADDRESS") == nullptr) return false;
  for (const Via via : {Via::tcp, Via::rdma_cm}) {
    const char* const name =
        via == Via::tcp ? "BM_device_set_up_by_tcp" : "BM_device_set_up_by_rdma_cm";
    benchmark::RegisterBenchmark(name, measure_device, via)
        ->Arg(0)
        ->Arg(1)
        ->ArgName("key")
        ->UseManualTime()
        ->Iterations(200);
  }
  return true;
}();

void BM_connection_set_up(benchmark::State& state) { measure(state, &Ends::connection); }
void BM_out_of_band_set_up(benchmark::State& state) { measure(state, &Ends::out_of_band); }
void BM_session_set_up(benchmark::State& state) { measure(state, &Ends::session); }
BENCHMARK(BM_connection_set_up)->Arg(0)->Arg(1)->ArgName("key")->UseManualTime()->Iterations(500);
BENCHMARK(BM_out_of_band_set_up)->Arg(0)->Arg(1)->ArgName("key")->UseManualTime()->Iterations(500);
BENCHMARK(BM_session_set_up)->Arg(0)->Arg(1)->ArgName("key")->UseManualTime()->Iterations(500);

}  // namespace
}  // namespace handshake_bench
