// spinwire-perf: latency, message rate and bandwidth between two processes, or within one.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "common/cli.h"
#include "common/dialer.h"
#include "common/output_file.h"
#include "common/perf_calls.h"
#include "common/perf_client.h"
#include "common/perf_options.h"
#include "common/perf_progress.h"
#include "common/perf_report.h"
#include "common/perf_room.h"
#include "common/perf_rpc.h"
#include "common/perf_server.h"
#include "common/spin.h"
#include "common/stat_hdr.h"
#include "spinwire/spinwire.h"

namespace spinwire::tools {
namespace {

constexpr std::string_view kFooter = R"(
Without a host spinwire-perf serves, with a host it measures:
  spinwire-perf                        # in one terminal
  spinwire-perf lat 127.0.0.1          # in another
  spinwire-perf rate --one-thread      # both ends in one thread
  spinwire-perf bw --op send -a --one-thread

Tests
  lat   Time of single operations; window 1 by default. send: a message and its echo, measured as
        the whole round trip, not half of it. write, read: from posting to completion, also a
        round trip. pong: a write and the server's write back; each end polls its memory.
        atomic: a fetch-and-add on 8 bytes of the server, from posting to completion.
  rate  Many small operations, in millions per second. Percentiles are of the time from posting
        to completion; the clock is read once per turn of the loop.
  bw    Large operations, in Gbit/s. Percentiles as for rate.
  rpc   Remote calls. The time runs from the call to its reply; with window 1 the callback reads
        the clock, otherwise as for rate. --batch calls are sent together, spread over --sessions.
        With --symmetric the server calls as well, and the calls served meanwhile are counted.
        Bandwidth counts requests and replies. A session has up to 64 calls in flight. A request
        or reply longer than a datagram uses the session's connection: the server READs requests
        and writes replies into memory that the call names.

Data is checked. Every message, reply and read must have its number in the first and last bytes.
Warm-up messages are checked as a whole; so is, at the end, all memory that writes and reads used. An
atomic must find how many were there before it.
The exit code is 1 if anything differs.

With -a, each power of two from 1 to 8 MiB is a measurement of its own, with fewer operations unless
--count is given, and a line of a table. Windows that are not given follow the size.

--histogram draws up to 16 bars for each power of two, and one above the 99th percentile. In a terminal
a measurement of more than a second shows on stderr how far it is.

A server serves many clients at once, and each of them gets its share of it. Clients beyond --clients
wait for their turn, for --wait at most. With --clients 1 no other client is measured at the same time.

Settings: --conf FILE, then SPINWIRE_SECTION_KEY in the environment, then the options here. Pools and
queues are sized for --size and --window, except those that the file or the environment sets. A server
sizes its own if it is given -a, --size or --window: for one client, or for --clients if given.)";

// ---- options ----------------------------------------------------------------------------------

struct Arguments {
  PerfOptions perf;
  std::string test = "lat";
  std::string op;
  std::string post;
  bool no_prefetch = false;
  std::string conf;
  std::string device;
  bool has_reply_size = false;  ///< given
  bool has_warmup = false;      ///< given
  bool has_clients = false;     ///< given
  double wait = 10;             ///< seconds
};

const std::map<std::string, PerfTest> kTests{
    {"lat", PerfTest::lat}, {"rate", PerfTest::rate}, {"bw", PerfTest::bw}, {"rpc", PerfTest::rpc}};
const std::map<std::string, Post> kPosts{{"defer", Post::defer}, {"now", Post::now}};
const std::map<std::string, PerfOp> kOps{{"send", PerfOp::send},
                                         {"write", PerfOp::write},
                                         {"read", PerfOp::read},
                                         {"pong", PerfOp::pong},
                                         {"atomic", PerfOp::atomic}};

/// Calls above this size in bytes take their default window and count from bw.
constexpr std::uint64_t kLarge = std::uint64_t{64} << 10;

/// -a: sizes up to this, and for each at most so many operations and about so many bytes.
constexpr std::uint64_t kLargestSize = std::uint64_t{8} << 20;
constexpr std::uint64_t kSweepBytes = std::uint64_t{256} << 20;
constexpr std::uint64_t kSweepLeast = 32;
/// What a server has room for if it is told a size and no window.
constexpr std::uint32_t kServedWindow = 8;

std::uint64_t default_count(const PerfOptions& o, bool is_large) {
  const bool is_latency = o.test == PerfTest::lat;
  if (!o.all_sizes) return is_latency ? 100'000 : is_large ? 4'000 : 2'000'000;
  const std::uint64_t most = is_latency ? 10'000 : 100'000;
  return std::clamp(kSweepBytes / std::max(o.size, o.reply_size), kSweepLeast, most);
}

/// The options of one measurement. Those that were not given depend on the test and the size.
PerfOptions options_for(const Arguments& a, std::uint64_t size) {
  PerfOptions o = a.perf;
  o.test = kTests.at(a.test);
  const bool bw = o.test == PerfTest::bw;
  const bool rpc = o.test == PerfTest::rpc;
  o.op = rpc ? PerfOp::call : kOps.at(!a.op.empty() ? a.op : bw ? "write" : "send");
  o.size = size != 0                ? size
           : o.op == PerfOp::atomic ? kAtomicBytes
           : !bw                    ? 32
           : o.op == PerfOp::send   ? 4096
                                    : 1 << 20;
  if (!a.has_reply_size) o.reply_size = o.size;
  const bool is_long = std::max(o.size, rpc ? o.reply_size : 0) > kLarge;
  const bool is_large = (bw && !o.all_sizes) || ((bw || rpc) && is_long);
  if (o.window == 0) {
    o.window = o.test == PerfTest::lat ? 1 : is_large ? 8 : rpc ? 32 : 64;
    if (o.all_sizes) o.window = std::max(o.window, o.batch);
  }
  if (o.count == 0) o.count = default_count(o, is_large);
  if (!a.has_warmup) o.warmup = o.count / 20;
  o.prefetch = !a.no_prefetch;
  if (!a.post.empty()) o.post = kPosts.at(a.post);
  o.wait = std::chrono::milliseconds(static_cast<std::int64_t>(a.wait * 1000));
  return o;
}

/// Why the options do not fit together; empty if they do.
std::string misuse(const Arguments& a, const PerfOptions& o, const CLI::App& app) {
  if (o.all_sizes && a.perf.size != 0) return "--size and --all exclude each other";
  if (o.all_sizes && o.histogram) return "--histogram draws one size; it does not go with --all";
  if (!o.hdr.empty() && o.host.empty() && !o.one_thread)
    return "--hdr writes what a client measures; give a host or --one-thread";
  if (o.one_thread && !o.host.empty())
    return "--one-thread measures within this process; do not give a host";
  if (o.op == PerfOp::pong && (o.test != PerfTest::lat || o.window != 1))
    return "--op pong is a test of latency with window 1";
  if (o.op == PerfOp::atomic && (o.test == PerfTest::bw || o.all_sizes || o.size != kAtomicBytes))
    return "--op atomic has 8 bytes, and is a test of latency or rate";
  if (o.test == PerfTest::rpc) {
    if (!a.op.empty()) return "--op is for lat, rate and bw; rpc makes remote calls";
    if (o.batch > o.window)
      return fmt::format("--batch {} is more than --window {}", o.batch, o.window);
    const std::uint64_t most = std::uint64_t{o.sessions} * CallShape::kSessionWindow;
    if (o.window <= most) return {};
    return fmt::format("--window {} exceeds the {} calls that --sessions {} can have in flight",
                       o.window, most, o.sessions);
  }
  for (const char* name :
       {"--reply-size", "--batch", "--sessions", "--symmetric", "--no-prefetch"}) {
    if (app.get_option(name)->count() != 0) return fmt::format("{} is for rpc", name);
  }
  return {};
}

/// Returns true if the program should go on.
bool read_arguments(int argc, char** argv, Arguments& a, int& code) {
  PerfOptions& o = a.perf;
  CLI::App app("Measures latency, message rate and bandwidth of Spinwire connections.",
               "spinwire-perf");
  app.footer(std::string(kFooter));
  app.add_option("test", a.test, "lat, rate, bw or rpc (lat)")->check(CLI::IsMember(kTests));
  app.add_option("host", o.host, "the server to measure; without one, serve");
  app.add_option("-o,--op", a.op, "send, write, read, pong or atomic (bw: write, others: send)")
      ->check(CLI::IsMember(kOps));
  app.add_option("-s,--size", o.size, "bytes per operation, e.g. 4KiB (32; bw 1MiB, bw send 4KiB)")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(std::uint64_t{1}, PerfRequest::kLongest));
  app.add_flag("-a,--all", o.all_sizes, "all sizes from 1 to 8MiB, a line each; not with --size");
  app.add_option("-w,--window", o.window,
                 "operations in flight (lat 1, rate 64, bw 8, rpc 32, above 64KiB 8)")
      ->check(CLI::Range(1u, PerfRequest::kWidest));
  app.add_option("-n,--count", o.count,
                 "operations (lat 100000, rate and rpc 2000000, bw and large rpc 4000)")
      ->check(CLI::Range(kOne, kMostCount));
  CLI::Option* warmup =
      app.add_option("--warmup", o.warmup, "operations before the measurement (count/20)");
  CLI::Option* reply_size =
      app.add_option("--reply-size", o.reply_size, "rpc: bytes of a reply (as --size)")
          ->transform(CLI::AsSizeValue(false))
          ->check(CLI::Range(std::uint64_t{1}, PerfRequest::kLongest));
  app.add_option("--batch", o.batch, "rpc: calls that are sent together")
      ->default_val(1)
      ->check(CLI::Range(1u, PerfRequest::kWidest));
  app.add_option("--sessions", o.sessions, "rpc: sessions that share the calls")
      ->default_val(1)
      ->check(CLI::Range(1u, CallShape::kMostSessions));
  app.add_flag("--symmetric", o.symmetric, "rpc: both ends call");
  app.add_flag("--no-prefetch", a.no_prefetch,
               "rpc: do not prefetch the next session's records, with more sessions than --window");
  app.add_option(
         "--post", a.post,
         "post operations together (defer), or each alone (now) (window 1: now, else defer)")
      ->check(CLI::IsMember(kPosts));
  app.add_option("-c,--conf", a.conf, "configuration file");
  app.add_option("-d,--device", a.device, "device to open; overrides the configuration");
  app.add_option("-p,--port", o.port, "TCP port; 0: a server chooses a free one")
      ->default_val(kDefaultPort)
      ->check(CLI::Range(0, 65535));
  app.add_option(
         "--bind", o.bind,
         "address to serve on; for --symmetric the one that the server sees the client come from")
      ->default_val(std::string(kDefaultBind));
  app.add_option("--wait", a.wait, "how long to wait for the server to come up")
      ->default_str("10s")
      ->transform(CLI::AsNumberWithUnit(tools::kTimeUnits))
      ->check(CLI::Range(0.0, 86400.0));
  app.add_option("--cpu", o.cpu, "run on this CPU")->check(CLI::Range(0, kMostCpu));
  app.add_option("--clients", o.clients, "serve so many clients at once; others wait")
      ->default_val(PerfOptions::kMostClients)
      ->check(CLI::Range(1u, PerfOptions::kMostClients));
  app.add_flag("--once", o.once, "serve one client, then end; each size of -a is a client");
  app.add_flag("--one-thread", o.one_thread, "both ends in one thread of this process");
  app.add_flag("--json", o.json, "print one JSON object, with -a one a line, and nothing else");
  app.add_flag("--histogram", o.histogram,
               "draw how the times are distributed, as wide as the terminal");
  app.add_option("--hdr", o.hdr,
                 "write the times to a file in HdrHistogram's log format, in nanoseconds");
  if (!parse_arguments(app, argc, argv, code)) return false;
  a.has_reply_size = reply_size->count() != 0;
  a.has_warmup = warmup->count() != 0;
  a.has_clients = app.get_option("--clients")->count() != 0;
  if (const std::string wrong = misuse(a, options_for(a, o.size), app); !wrong.empty()) {
    fail(wrong);
    code = kMisused;
    return false;
  }
  return true;
}

// ---- results ----------------------------------------------------------------------------------

std::uint64_t served_by(const PerfClient&) { return 0; }
std::uint64_t served_by(const RpcPerfClient& client) { return client.served(); }

/// What measurements leave besides their report.
struct Results {
  PerfProgress progress;
  std::string hdr_lines;
};

template <typename Client>
int finish(const PerfOptions& options, const Client& client, Results& results) {
  results.progress.end();
  if (stop_requested()) return fail("interrupted");
  if (!client.fault().empty()) return fail(client.fault());
  const Engine& engine = client.engine();
  const PerfReport report(options, client.durations(), client.seconds(), engine.clock(),
                          engine.device_name(), served_by(client));
  report.print();
  if (!options.hdr.empty()) results.hdr_lines += report.hdr_line(client.began());
  return std::fflush(stdout) == 0 ? kDone : fail("cannot write the results");
}

int write_hdr(const std::string& path, const std::string& lines) {
  const std::string log = hdr_head("Durations of spinwire-perf's operations") + lines;
  auto file = OutputFile::create(path);
  if (!file) return fail(file.error());
  const auto written =
      file->append(std::as_bytes(std::span(log))).and_then([&] { return file->commit(); });
  return written ? kDone : fail(written.error());
}

// ---- the loops --------------------------------------------------------------------------------

int misused(int events) {
  return fail(fmt::format("poll() was misused: {}", to_string(static_cast<Status>(-events))));
}

int serve(Engine engine, const PerfOptions& options) {
  auto address = resolve(options.bind, options.port);
  if (!address) return fail(address.error());
  PerfServer server(std::move(engine), options.clients);
  if (auto listening = server.listen(*address); !listening) return fail(listening.error());
  if (!server.serves_calls()) fail("no remote calls: " + server.serves_calls().error().message());
  fmt::print("listening on {}\n", server.address());
  std::fflush(stdout);

  Idler idler;  // only while no client measures
  while (!stop_requested()) {
    const int events = server.turn();
    if (events < 0) return misused(events);
    while (server.has_news()) {
      fmt::print("{}\n", server.next_news());
      std::fflush(stdout);
    }
    if (server.measuring()) continue;
    if (options.once && server.served() != 0) return server.failed() == 0 ? kDone : kFailed;
    (void)idler.idle(server.engine(), events);
  }
  return kDone;
}

/// Runs the client, and `other` in turns with it, until the measurement is over.
template <typename Client, typename Other>
int run_client(const PerfOptions& options, Client& client, Results& results, Other&& other) {
  results.progress.begin(
      fmt::format("{} {}, {} bytes", to_string(options.test), to_string(options.op), options.size),
      options.warmup + options.count);
  for (std::uint32_t turns = 0; !client.over() && !stop_requested(); ++turns) {
    int events = client.turn();
    if (events >= 0) events = other();
    if (events < 0) return misused(events);
    if ((turns & 0x3ff) == 0) [[unlikely]]
      results.progress.report(client.finished());
  }
  return finish(options, client, results);
}

template <typename Client>
int measure(Engine engine, const PerfOptions& options, Results& results) {
  if (!options.one_thread) {
    auto address = resolve(options.host, options.port);
    if (!address) return fail(address.error());
    const auto client = std::make_unique<Client>(std::move(engine), options, *address);
    return run_client(options, *client, results, [] { return 0; });
  }
  auto peer = Engine::open(options.config);
  if (!peer) return fail(peer.error());
  PerfServer server(std::move(*peer), /*most_clients=*/1);
  if (auto listening = server.listen("127.0.0.1:0"); !listening) return fail(listening.error());
  const auto client = std::make_unique<Client>(std::move(engine), options, server.address());
  return run_client(options, *client, results, [&server] { return server.turn(); });
}

int measure_once(const PerfOptions& options, Results& results) {
  auto engine = Engine::open(options.config);
  if (!engine) return fail(engine.error());
  return options.test == PerfTest::rpc
             ? measure<RpcPerfClient>(std::move(*engine), options, results)
             : measure<PerfClient>(std::move(*engine), options, results);
}

int measure_all(const Arguments& arguments, const Config& config, const GivenSettings& given,
                Results& results) {
  for (std::uint64_t size = 1; size <= kLargestSize; size *= 2) {
    PerfOptions options = options_for(arguments, size);
    options.config = config;
    make_room(options.config, options, given);
    if (size == 1 && !options.json) PerfReport::print_head(options);
    if (const int code = measure_once(options, results); code != kDone) return code;
    log_errors_to_stderr();  // the first engine's warnings hold for all
  }
  return kDone;
}

int run_server(const Arguments& arguments, const Config& config, const GivenSettings& given) {
  const bool all_sizes = arguments.perf.all_sizes;
  PerfOptions options = options_for(arguments, all_sizes ? kLargestSize : arguments.perf.size);
  options.config = config;
  if (all_sizes || arguments.perf.size != 0 || arguments.perf.window != 0) {
    if (arguments.perf.window == 0) options.window = kServedWindow;
    if (arguments.has_clients)
      options.window = std::min(options.window * options.clients, PerfRequest::kWidest);
    make_room_for_all(options.config, options, given);
  }
  auto engine = Engine::open(options.config);
  return engine ? serve(std::move(*engine), options) : fail(engine.error());
}

int measure_sizes(const Arguments& arguments, const Config& config, const GivenSettings& given,
                  Results& results) {
  if (arguments.perf.all_sizes) return measure_all(arguments, config, given, results);
  PerfOptions options = options_for(arguments, arguments.perf.size);
  options.config = config;
  make_room(options.config, options, given);
  return measure_once(options, results);
}

int run(const Arguments& arguments) {
  auto config = Config::load(arguments.conf);
  if (!config) return fail(config.error());
  if (!arguments.device.empty()) config->device.name = arguments.device;
  const GivenSettings given(arguments.conf);
  Results results;
  if (arguments.perf.cpu >= 0) {
    if (auto pinned = pin_to_cpu(arguments.perf.cpu); !pinned) return fail(pinned.error());
  }
  if (arguments.perf.host.empty() && !arguments.perf.one_thread)
    return run_server(arguments, *config, given);
  const int code = measure_sizes(arguments, *config, given, results);
  if (code != kDone || arguments.perf.hdr.empty()) return code;
  return write_hdr(arguments.perf.hdr, results.hdr_lines);
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
