// spinwire-perf: latency, message rate and bandwidth between two processes, or within one.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
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
#include "common/perf_calls.h"
#include "common/perf_client.h"
#include "common/perf_options.h"
#include "common/perf_rpc.h"
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
  rpc   remote calls: from calling until the reply is there, read in its callback with window 1,
        else as for rate. --batch calls go out together as soon as as many may; they are spread over
        --sessions; with --symmetric the server calls as well, and what we serve meanwhile is
        counted, too. Bandwidth is that of requests and replies. A session has up to 64 calls under
        way. What is longer than a datagram goes over the session's connection: requests are read
        by the server, replies written into memory that the call has named.

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
  bool sized = false;  ///< a size of replies was given
  double wait = 10;
};

const std::map<std::string, PerfTest> kTests{
    {"lat", PerfTest::lat}, {"rate", PerfTest::rate}, {"bw", PerfTest::bw}, {"rpc", PerfTest::rpc}};
const std::map<std::string, PerfOp> kOps{{"send", PerfOp::send},
                                         {"write", PerfOp::write},
                                         {"read", PerfOp::read},
                                         {"pong", PerfOp::pong}};

/// Calls with more than this, bytes, are as many as operations of bw unless a number is given.
constexpr std::uint64_t kLarge = std::uint64_t{64} << 10;

/// What is not given depends on the test.
void fill_in(Arguments& a) {
  PerfOptions& o = a.perf;
  o.test = kTests.at(a.test);
  const bool bw = o.test == PerfTest::bw;
  const bool rpc = o.test == PerfTest::rpc;
  const bool large = bw || (rpc && std::max(o.size, o.reply_size) > kLarge);
  o.op = rpc ? PerfOp::call : kOps.at(!a.op.empty() ? a.op : bw ? "write" : "send");
  if (o.size == 0) o.size = !bw ? 32 : o.op == PerfOp::send ? 4096 : 1 << 20;
  if (!a.sized) o.reply_size = o.size;
  if (o.window == 0) o.window = o.test == PerfTest::lat ? 1 : large ? 8 : rpc ? 32 : 64;
  if (o.count == 0) o.count = o.test == PerfTest::lat ? 100'000 : large ? 4'000 : 2'000'000;
}

/// What of all this is no measurement; empty if nothing is.
std::string misuse(const Arguments& a, const CLI::App& app) {
  const PerfOptions& o = a.perf;
  if (o.one_thread && !o.host.empty())
    return "--one-thread measures within this process: give no host";
  if (o.op == PerfOp::pong && (o.test != PerfTest::lat || o.window != 1))
    return "--op pong is a test of latency with window 1";
  if (o.test == PerfTest::rpc) {
    if (!a.op.empty()) return "--op is for lat, rate and bw; rpc makes remote calls";
    if (o.batch > o.window)
      return fmt::format("--batch {} is more than --window {}", o.batch, o.window);
    const std::uint64_t most = std::uint64_t{o.sessions} * CallShape::kSessionWindow;
    if (o.window <= most) return {};
    return fmt::format(
        "--window {} is more than the {} calls that --sessions {} can have under way", o.window,
        most, o.sessions);
  }
  for (const char* name : {"--reply-size", "--batch", "--sessions", "--symmetric"}) {
    if (app.get_option(name)->count() != 0) return fmt::format("{} is for rpc", name);
  }
  return {};
}

/// True: go on.
bool read_arguments(int argc, char** argv, Arguments& a, int& code) {
  PerfOptions& o = a.perf;
  CLI::App app("Measures latency, message rate and bandwidth of Spinwire connections.",
               "spinwire-perf");
  app.footer(std::string(kFooter));
  app.add_option("test", a.test, "lat, rate, bw or rpc; lat if not given")
      ->check(CLI::IsMember(kTests));
  app.add_option("host", o.host, "the server to measure against; serve if not given");
  app.add_option("-o,--op", a.op, "send, write, read or pong; bw writes, others send")
      ->check(CLI::IsMember(kOps));
  app.add_option("-s,--size", o.size, "bytes per operation, 4KiB and so on accepted (32; bw 1MiB)")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(std::uint64_t{1}, PerfRequest::kLongest));
  app.add_option("-w,--window", o.window,
                 "operations in flight (lat 1, rate 64, bw 8, rpc 32, above 64KiB 8)")
      ->check(CLI::Range(1u, PerfRequest::kWidest));
  app.add_option("-n,--count", o.count,
                 "operations (lat 100000, rate and rpc 2000000, bw and large rpc 4000)")
      ->check(CLI::Range(kOne, kMostCount));
  CLI::Option* warmup = app.add_option("--warmup", o.warmup, "operations before those (count/20)");
  CLI::Option* reply_size =
      app.add_option("--reply-size", o.reply_size, "rpc: bytes of a reply (as --size)")
          ->transform(CLI::AsSizeValue(false))
          ->check(CLI::Range(std::uint64_t{1}, PerfRequest::kLongest));
  app.add_option("--batch", o.batch, "rpc: calls that go out together")
      ->default_val(1)
      ->check(CLI::Range(1u, PerfRequest::kWidest));
  app.add_option("--sessions", o.sessions, "rpc: sessions that calls are spread over")
      ->default_val(1)
      ->check(CLI::Range(1u, CallShape::kMostSessions));
  app.add_flag("--symmetric", o.symmetric, "rpc: both ends call");
  app.add_option("-c,--conf", a.conf, "configuration file");
  app.add_option("-d,--device", a.device, "device to open, instead of the configuration's");
  app.add_option("-p,--port", o.port, "TCP port; a server takes a free one for 0")
      ->default_val(kDefaultPort)
      ->check(CLI::Range(0, 65535));
  app.add_option("--bind", o.bind, "address to serve on, also for calls of --symmetric")
      ->default_val(std::string(kDefaultBind));
  app.add_option("--wait", a.wait, "seconds to wait for the server to be up")
      ->default_val(10)
      ->check(CLI::Range(0.0, 86400.0));
  app.add_option("--cpu", o.cpu, "run on this CPU")->check(CLI::Range(0, kMostCpu));
  app.add_flag("--once", o.once, "serve one client, then end");
  app.add_flag("--one-thread", o.one_thread, "both ends in one thread of this process");
  app.add_flag("--json", o.json, "print one JSON object and nothing else on stdout");
  if (!parse_arguments(app, argc, argv, code)) return false;
  a.sized = reply_size->count() != 0;
  fill_in(a);
  if (const std::string wrong = misuse(a, app); !wrong.empty()) {
    fail(wrong);
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
  if (o.op == PerfOp::call) {
    config.rpc.sessions = std::max(config.rpc.sessions, o.sessions);
    config.rpc.sessions_per_source = config.rpc.sessions;  // one client has them all
    make_room_for_calls(config, o.size, o.reply_size, o.window);
    return;
  }
  // Pools are cut into chunks; one more for blocks' headroom and one for the dialogue's messages.
  constexpr std::uint64_t kChunk = 2u << 20;
  const std::uint64_t wanted = (o.window * perf_stride(o.size) / kChunk + 3) * kChunk;
  config.memory.send_bytes = std::max(config.memory.send_bytes, wanted);
  if (o.one_thread) config.memory.lease_bytes = std::max(config.memory.lease_bytes, wanted);
}

// ---- results ----------------------------------------------------------------------------------

struct Report {
  const PerfOptions& options;
  const Histogram& durations;
  double seconds;
  const Clock& clock;
  std::string_view device;
  std::uint64_t served;  ///< calls of the other end's

  [[nodiscard]] double ns(std::uint64_t ticks) const {
    return static_cast<double>(ticks) / clock.ticks_per_ns();
  }
  [[nodiscard]] double percentile(double percent) const {
    return ns(durations.percentile(percent));
  }
  [[nodiscard]] double rate_mops() const {
    return static_cast<double>(options.count) / seconds / 1e6;
  }
  [[nodiscard]] bool rpc() const { return options.test == PerfTest::rpc; }
  /// Of one operation.
  [[nodiscard]] std::uint64_t bytes() const {
    return options.size + (rpc() ? options.reply_size : 0);
  }
  [[nodiscard]] double served_mops() const { return static_cast<double>(served) / seconds / 1e6; }
  [[nodiscard]] double gbit_per_s() const {
    return rate_mops() * static_cast<double>(bytes()) * 8 / 1e3;
  }

  void print_json() const {
    JsonLine json;
    json.add("test", to_string(options.test))
        .add("op", to_string(options.op))
        .add("size_bytes", options.size)
        .add("window", options.window)
        .add("count", options.count)
        .add("seconds", seconds)
        .add("rate_mops", rate_mops())
        .add("gbit_per_s", gbit_per_s())
        .add("min_ns", ns(durations.min()))
        .add("p50_ns", percentile(50))
        .add("p90_ns", percentile(90))
        .add("p99_ns", percentile(99))
        .add("p999_ns", percentile(99.9))
        .add("max_ns", ns(durations.max()))
        .add("device", device);
    if (rpc()) {
      json.add("reply_size_bytes", options.reply_size)
          .add("batch", options.batch)
          .add("sessions", options.sessions)
          .add("served_mops", served_mops());
    }
    fmt::print("{}\n", json.str());
  }

  void print_text() const {
    const std::string more =
        rpc() ? fmt::format(", replies of {}, {} session{}, batches of {}", options.reply_size,
                            options.sessions, options.sessions == 1 ? "" : "s", options.batch)
              : "";
    fmt::print("{} {}, {} bytes{}, window {}, {} operations in {:.3f} s on {}{}\n",
               to_string(options.test), to_string(options.op), options.size, more, options.window,
               options.count, seconds, device, options.one_thread ? ", one thread" : "");
    fmt::print("  {:.3f} million/s, {:.3f} Gbit/s{}\n", rate_mops(), gbit_per_s(),
               options.symmetric ? fmt::format("; {:.3f} million/s served", served_mops()) : "");
    fmt::print(
        "  {}: min {:.0f}  p50 {:.0f}  p90 {:.0f}  p99 {:.0f}  p99.9 {:.0f}  max {:.0f} ns\n",
        options.test == PerfTest::lat || rpc() ? "round trip" : "completion", ns(durations.min()),
        percentile(50), percentile(90), percentile(99), percentile(99.9), ns(durations.max()));
  }
};

std::uint64_t served_by(const PerfClient&) { return 0; }
std::uint64_t served_by(const RpcPerfClient& client) { return client.served(); }

template <typename Client>
int finish(const PerfOptions& options, const Client& client) {
  if (stop_requested()) return fail("interrupted");
  if (!client.fault().empty()) return fail(client.fault());
  const Engine& engine = client.engine();
  const Report report{options,        client.durations(),   client.seconds(),
                      engine.clock(), engine.device_name(), served_by(client)};
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
  if (!server.serves_calls()) fail("no remote calls: " + server.serves_calls().error().message());
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

template <typename Client>
int measure(Engine engine, const PerfOptions& options) {
  auto address = resolve(options.host, options.port);
  if (!address) return fail(address.error());
  const auto client = std::make_unique<Client>(std::move(engine), options, *address);
  while (!client->over() && !stop_requested()) {
    const int events = client->turn();
    if (events < 0) return misused(events);
  }
  return finish(options, *client);
}

template <typename Client>
int measure_in_one_thread(Engine engine, const PerfOptions& options) {
  auto peer = Engine::open(options.config);
  if (!peer) return fail(peer.error());
  PerfServer server(std::move(*peer));
  if (auto listening = server.listen("127.0.0.1:0"); !listening) return fail(listening.error());
  const auto client = std::make_unique<Client>(std::move(engine), options, server.address());
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
  const bool rpc = options.test == PerfTest::rpc;
  if (options.one_thread) {
    return rpc ? measure_in_one_thread<RpcPerfClient>(std::move(*engine), options)
               : measure_in_one_thread<PerfClient>(std::move(*engine), options);
  }
  if (options.host.empty()) return serve(std::move(*engine), options);
  return rpc ? measure<RpcPerfClient>(std::move(*engine), options)
             : measure<PerfClient>(std::move(*engine), options);
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
