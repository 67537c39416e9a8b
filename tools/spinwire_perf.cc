// spinwire-perf: latency, message rate and bandwidth between two processes, or within one.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "common/cli.h"
#include "common/dialer.h"
#include "common/json_line.h"
#include "common/perf_client.h"
#include "common/perf_options.h"
#include "common/perf_server.h"
#include "common/spin.h"
#include "spinwire/spinwire.h"

namespace spinwire::tools {
namespace {

constexpr std::string_view kFooter = R"(
Without a host it serves, with one it measures:
  spinwire-perf                        # one terminal
  spinwire-perf lat 127.0.0.1          # another
  spinwire-perf rate --one-thread      # both ends in one thread

Tests
  lat   time of single operations, window 1 unless given. send: a message there and its echo
        back; the whole round trip is reported, not half of it. write, read: from posting until
        the completion is seen, which is a round trip as well. pong: a write there and the
        server's write back; each end sees the other's by looking at its memory.
  rate  many small operations, in millions a second; the percentiles are of the time from posting
        to completion, read once per turn of the loop.
  bw    large operations, in Gbit/s; percentiles as for rate.

Data is checked: every message, reply and read by the number in its first and last bytes; messages
of the warm-up as a whole, and at the end as a whole what the last writes and reads have left in
each place of the memory they go to. Exit code 1 if anything differs.

Settings: --conf FILE, then SPINWIRE_SECTION_KEY in the environment, then the options here.)";

// ---- options ----------------------------------------------------------------------------------

struct Arguments {
  PerfOptions perf;
  std::string test = "lat";
  std::string op;
  std::string conf;
  std::string device;
  double wait = 10;
};

const std::map<std::string, PerfTest> kTests{
    {"lat", PerfTest::lat}, {"rate", PerfTest::rate}, {"bw", PerfTest::bw}};
const std::map<std::string, PerfOp> kOps{{"send", PerfOp::send},
                                         {"write", PerfOp::write},
                                         {"read", PerfOp::read},
                                         {"pong", PerfOp::pong}};

/// What is not given depends on the test.
void fill_in(Arguments& a) {
  PerfOptions& o = a.perf;
  o.test = kTests.at(a.test);
  const bool bw = o.test == PerfTest::bw;
  o.op = kOps.at(!a.op.empty() ? a.op : bw ? "write" : "send");
  if (o.size == 0) o.size = !bw ? 32 : o.op == PerfOp::send ? 4096 : 1 << 20;
  if (o.window == 0) o.window = o.test == PerfTest::lat ? 1 : bw ? 8 : 64;
  if (o.count == 0) o.count = o.test == PerfTest::lat ? 100'000 : bw ? 4'000 : 2'000'000;
}

/// True: go on.
bool read_arguments(int argc, char** argv, Arguments& a, int& code) {
  PerfOptions& o = a.perf;
  CLI::App app("Measures latency, message rate and bandwidth of Spinwire connections.",
               "spinwire-perf");
  app.footer(std::string(kFooter));
  app.add_option("test", a.test, "lat, rate or bw; lat if not given")->check(CLI::IsMember(kTests));
  app.add_option("host", o.host, "the server to measure against; serve if not given");
  app.add_option("-o,--op", a.op, "send, write, read or pong; bw writes, others send")
      ->check(CLI::IsMember(kOps));
  app.add_option("-s,--size", o.size, "bytes per operation, 4KiB and so on accepted (32; bw 1MiB)")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(std::uint64_t{1}, PerfRequest::kLongest));
  app.add_option("-w,--window", o.window, "operations in flight (lat 1, rate 64, bw 8)")
      ->check(CLI::Range(1u, PerfRequest::kWidest));
  app.add_option("-n,--count", o.count, "operations (lat 100000, rate 2000000, bw 4000)")
      ->check(CLI::PositiveNumber);
  CLI::Option* warmup = app.add_option("--warmup", o.warmup, "operations before those (count/20)");
  app.add_option("-c,--conf", a.conf, "configuration file");
  app.add_option("-d,--device", a.device, "device to open, instead of the configuration's");
  app.add_option("-p,--port", o.port, "TCP port; a server takes a free one for 0")
      ->default_val(kDefaultPort)
      ->check(CLI::Range(0, 65535));
  app.add_option("--bind", o.bind, "address to serve on")->default_val(std::string(kDefaultBind));
  app.add_option("--wait", a.wait, "seconds to wait for the server to be up")
      ->default_val(10)
      ->check(CLI::Range(0.0, 86400.0));
  app.add_option("--cpu", o.cpu, "run on this CPU")->check(CLI::NonNegativeNumber);
  app.add_flag("--once", o.once, "serve one client, then end");
  app.add_flag("--one-thread", o.one_thread, "both ends in one thread of this process");
  app.add_flag("--json", o.json, "print one JSON object and nothing else on stdout");
  if (!parse_arguments(app, argc, argv, code)) return false;
  if (o.one_thread && !o.host.empty()) {
    fail("--one-thread measures within this process: give no host");
    code = kMisused;
    return false;
  }
  fill_in(a);
  if (o.op == PerfOp::pong && (o.test != PerfTest::lat || o.window != 1)) {
    fail("--op pong is a test of latency with window 1");
    code = kMisused;
    return false;
  }
  o.wait = std::chrono::milliseconds(static_cast<std::int64_t>(a.wait * 1000));
  if (warmup->count() == 0) o.warmup = o.count / 20;
  return true;
}

/// Pools with room for what is asked; the configuration's if that is more.
void make_room(Config& config, const PerfOptions& o) {
  if (o.op == PerfOp::send) return;
  // Pools are cut into chunks; one more for blocks' headroom and one for the dialogue's messages.
  constexpr std::uint64_t kChunk = 2u << 20;
  const std::uint64_t wanted = (o.window * perf_stride(o.size) / kChunk + 3) * kChunk;
  config.memory.send_bytes = std::max(config.memory.send_bytes, wanted);
  if (o.one_thread) config.memory.lease_bytes = std::max(config.memory.lease_bytes, wanted);
}

// ---- results ----------------------------------------------------------------------------------

struct Report {
  const PerfOptions& options;
  const PerfClient& client;
  const Clock& clock;
  std::string_view device;

  [[nodiscard]] double ns(std::uint64_t ticks) const {
    return static_cast<double>(ticks) / clock.ticks_per_ns();
  }
  [[nodiscard]] double percentile(double percent) const {
    return ns(client.durations().percentile(percent));
  }
  [[nodiscard]] double rate_mops() const {
    return static_cast<double>(options.count) / client.seconds() / 1e6;
  }
  [[nodiscard]] double gbit_per_s() const {
    return rate_mops() * static_cast<double>(options.size) * 8 / 1e3;
  }

  void print_json() const {
    JsonLine json;
    json.add("test", to_string(options.test))
        .add("op", to_string(options.op))
        .add("size_bytes", options.size)
        .add("window", options.window)
        .add("count", options.count)
        .add("seconds", client.seconds())
        .add("rate_mops", rate_mops())
        .add("gbit_per_s", gbit_per_s())
        .add("min_ns", ns(client.durations().min()))
        .add("p50_ns", percentile(50))
        .add("p90_ns", percentile(90))
        .add("p99_ns", percentile(99))
        .add("p999_ns", percentile(99.9))
        .add("max_ns", ns(client.durations().max()))
        .add("device", device);
    fmt::print("{}\n", json.str());
  }

  void print_text() const {
    fmt::print("{} {}, {} bytes, window {}, {} operations in {:.3f} s on {}{}\n",
               to_string(options.test), to_string(options.op), options.size, options.window,
               options.count, client.seconds(), device, options.one_thread ? ", one thread" : "");
    fmt::print("  {:.3f} million/s, {:.3f} Gbit/s\n", rate_mops(), gbit_per_s());
    fmt::print(
        "  {}: min {:.0f}  p50 {:.0f}  p90 {:.0f}  p99 {:.0f}  p99.9 {:.0f}  max {:.0f} ns\n",
        options.test == PerfTest::lat ? "round trip" : "completion", ns(client.durations().min()),
        percentile(50), percentile(90), percentile(99), percentile(99.9),
        ns(client.durations().max()));
  }
};

int finish(const PerfOptions& options, const PerfClient& client) {
  if (stop_requested()) return fail("interrupted");
  if (!client.fault().empty()) return fail(client.fault());
  const Engine& engine = client.engine();
  const Report report{options, client, engine.clock(), engine.device_name()};
  options.json ? report.print_json() : report.print_text();
  return std::fflush(stdout) == 0 ? kDone : fail("cannot write the results");
}

// ---- the loops --------------------------------------------------------------------------------

int misused(int events) {
  return fail(fmt::format("poll() was misused: {}", to_string(static_cast<Status>(-events))));
}

int serve(Engine engine, const PerfOptions& options) {
  auto address = resolve(options.bind, options.port);
  if (!address) return fail(address.error());
  PerfServer server(std::move(engine));
  if (auto listening = server.listen(*address); !listening) return fail(listening.error());
  fmt::print("listening on {}\n", server.address());
  std::fflush(stdout);

  Idler idler(server.clock(), /*may_sleep=*/true);
  std::uint64_t begun = 0;
  std::uint64_t told = 0;
  while (!stop_requested()) {
    const int events = server.turn();
    if (events < 0) return misused(events);
    if (begun != server.begun()) {
      begun = server.begun();
      fmt::print("measuring for {}\n", server.peer());
      std::fflush(stdout);
    }
    if (server.measuring()) continue;
    if (told != server.served()) {
      told = server.served();
      fmt::print("{}\n", server.last());
      std::fflush(stdout);
      if (options.once) return server.failed() == 0 ? kDone : kFailed;
    }
    idler.turn(events == 0);
  }
  return kDone;
}

int measure(Engine engine, const PerfOptions& options) {
  auto address = resolve(options.host, options.port);
  if (!address) return fail(address.error());
  const auto client = std::make_unique<PerfClient>(std::move(engine), options, *address);
  while (!client->over() && !stop_requested()) {
    const int events = client->turn();
    if (events < 0) return misused(events);
  }
  return finish(options, *client);
}

int measure_in_one_thread(Engine engine, const PerfOptions& options) {
  auto peer = Engine::open(options.config);
  if (!peer) return fail(peer.error());
  PerfServer server(std::move(*peer));
  if (auto listening = server.listen("127.0.0.1:0"); !listening) return fail(listening.error());
  const auto client = std::make_unique<PerfClient>(std::move(engine), options, server.address());
  while (!client->over() && !stop_requested()) {
    int events = client->turn();
    if (events >= 0) events = server.turn();
    if (events < 0) return misused(events);
  }
  return finish(options, *client);
}

int run(Arguments& arguments) {
  PerfOptions& options = arguments.perf;
  auto config = Config::load(arguments.conf);
  if (!config) return fail(config.error());
  if (!arguments.device.empty()) config->device.name = arguments.device;
  if (options.one_thread || !options.host.empty()) make_room(*config, options);
  options.config = *config;
  if (options.cpu >= 0) {
    if (auto pinned = pin_to_cpu(options.cpu); !pinned) return fail(pinned.error());
  }
  auto engine = Engine::open(options.config);
  if (!engine) return fail(engine.error());
  if (options.one_thread) return measure_in_one_thread(std::move(*engine), options);
  return options.host.empty() ? serve(std::move(*engine), options)
                              : measure(std::move(*engine), options);
}

}  // namespace
}  // namespace spinwire::tools

int main(int argc, char** argv) {
  namespace tools = spinwire::tools;
  tools::set_program("spinwire-perf");
  tools::log_to_stderr();
  tools::catch_stop_signals();
  tools::Arguments arguments;
  int code = 0;
  if (!tools::read_arguments(argc, argv, arguments, code)) return code;
  return tools::run(arguments);
}
