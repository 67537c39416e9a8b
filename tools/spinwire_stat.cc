// spinwire-stat: what the engines of this user do, and what blocks them.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/cli.h"
#include "common/output_file.h"
#include "common/stat_events.h"
#include "common/stat_hdr.h"
#include "common/stat_live.h"
#include "common/stat_report.h"
#include "common/stat_serve.h"
#include "spinwire/observe.h"

namespace {

using namespace spinwire;  // NOLINT: a program of one file
using tools::fail;

struct Options {
  std::uint32_t pid = 0;  ///< 0: all processes
  std::optional<std::uint32_t> engine;
  std::string directory{kObservabilityDirectory};
  std::string peer;
  double interval = 1;  ///< seconds
  bool interval_given = false;
  std::size_t count = 0;
  bool once = false;
  bool json = false;
  bool prometheus = false;
  std::string output;
  std::string serve;
  bool clean = false;
  bool list = false;
  std::string hdr;
  bool events = false;
  std::string connection;
  std::string session;
  std::string sort;
  bool reverse = false;
};

std::chrono::nanoseconds interval_of(double seconds) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(seconds));
}

bool is_asked_for(const Options& options, const EngineFile& file) {
  return (options.pid == 0 || file.pid == options.pid) &&
         (!options.engine || file.engine == *options.engine);
}

/// The engines that the command line names. Those that close meanwhile, and files that cannot be
/// read, are left out.
Result<std::vector<EngineReading>> read_all(const Options& options) {
  auto files = list_engines(options.directory);
  if (!files) return tl::unexpected(files.error());
  std::vector<EngineReading> readings;
  for (const EngineFile& file : *files) {
    if (!is_asked_for(options, file)) continue;
    auto reading = read_engine(file);
    if (reading) {
      readings.push_back(std::move(*reading));
    } else if (reading.error().status != Status::not_connected) {
      (void)fail(reading.error());
    }
  }
  return readings;
}

int write_file(const std::string& path, const std::string& text) {
  auto file = tools::OutputFile::create(path);
  if (!file) return fail(file.error());
  const auto written =
      file->append(std::as_bytes(std::span(text))).and_then([&] { return file->commit(); });
  return written ? tools::kDone : fail(written.error());
}

int write_out(const Options& options, const std::string& text) {
  if (options.output.empty()) {
    const bool written =
        std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0;
    return written ? tools::kDone : fail("stdout: the output cannot be written");
  }
  return write_file(options.output, text);
}

int clean(const Options& options) {
  const auto removed = remove_dead_engines(0, options.directory);
  if (!removed) return fail(removed.error());
  fmt::print("removed {} files of dead engines\n", *removed);
  return tools::kDone;
}

int serve(const Options& options) {
  tools::catch_stop_signals();
  const auto served = tools::serve_metrics(options.serve, [&]() -> Result<std::string> {
    const auto readings = read_all(options);
    if (!readings) return tl::unexpected(readings.error());
    return tools::prometheus_text(*readings);
  });
  return served ? tools::kDone : fail(served.error());
}

int fail_without_engine(const Options& options) {
  return fail(
      fmt::format("there is no file of such an engine in {}; without a process, "
                  "spinwire-stat lists all",
                  options.directory));
}

/// Says why read_one() read nothing.
int fail_reading(const Options& options, const Error& error) {
  return error.status == Status::not_connected ? fail_without_engine(options) : fail(error);
}

/// The engine that the command line names. A process may have several; the first living one counts.
Result<EngineReading> read_one(const Options& options) {
  auto readings = read_all(options);
  if (!readings) return tl::unexpected(readings.error());
  for (EngineReading& reading : *readings) {
    if (reading.file.is_alive) return std::move(reading);
  }
  if (!readings->empty()) return std::move(readings->front());
  return tl::unexpected(Error(Status::not_connected, {}, {}, {}));
}

/// One screen, with the rates of a fifth of a second unless --interval is given.
int show_once(const Options& options) {
  const auto first = read_one(options);
  if (!first) return fail_reading(options, first.error());
  tools::ScreenOptions screen;
  screen.peer = options.peer;
  screen.order = {options.sort, options.reverse};
  if (!first->file.is_alive) return write_out(options, tools::screen_text(*first, nullptr, screen));
  constexpr double kShort = 0.2;
  std::this_thread::sleep_for(interval_of(options.interval_given ? options.interval : kShort));
  const auto second = read_engine(first->file);
  return write_out(options, second ? tools::screen_text(*second, &*first, screen)
                                   : tools::screen_text(*first, nullptr, screen));
}

/// What the live view shows, and how keys change it.
struct LiveView {
  std::string peer;
  tools::RowOrder order;
  std::optional<std::string> typed{};  ///< a filter that is being typed
  bool all_latencies = false;          ///< since the engine was opened

  tools::KeyMeans on_key(char key) {
    using tools::KeyMeans;
    if (typed) {
      constexpr char kEscape = 27, kDelete = 127;
      if (key == '\n' || key == '\r') peer = *std::exchange(typed, std::nullopt);
      if (key == kEscape) typed.reset();
      if (typed && (key == kDelete || key == '\b') && !typed->empty()) typed->pop_back();
      if (typed && key >= ' ' && key <= '~') *typed += key;
      return KeyMeans::redraw;
    }
    if (key == 'q' || key == 'Q') return KeyMeans::quit;
    if (key == '<' || key == '>') {
      order.move(key == '>');
    } else if (key == 'r') {
      order.is_reversed = !order.is_reversed;
    } else if (key == '/') {
      typed = "";
    } else if (key == 'l') {
      all_latencies = !all_latencies;
    } else {
      return KeyMeans::nothing;
    }
    return KeyMeans::redraw;
  }
};

int show(const Options& options) {
  auto reading = read_one(options);
  if (!reading) return fail_reading(options, reading.error());
  tools::catch_stop_signals();
  LiveView view{options.peer, {options.sort, options.reverse}};
  std::optional<EngineReading> earlier;
  bool is_first = true;
  const auto draw = [&](tools::ScreenSize size, bool reads_again) {
    if (reads_again && !std::exchange(is_first, false)) {
      earlier = std::move(*reading);
      reading = read_engine(earlier->file);
    }
    if (!reading) return std::string();
    const tools::ScreenOptions screen{view.peer,       size.lines, size.width,        view.order,
                                      size.lines != 0, view.typed, view.all_latencies};
    return tools::screen_text(*reading, earlier ? &*earlier : nullptr, screen);
  };
  const auto on_key = [&](char key) { return view.on_key(key); };
  if (tools::show_live(draw, on_key, interval_of(options.interval), options.count))
    return tools::kDone;
  if (reading.error().status != Status::not_connected) return fail(reading.error());
  fmt::print("the engine is closed\n");
  return tools::kDone;
}

/// The flight recorders.
int show_events(const Options& options) {
  const auto readings = read_all(options);
  if (!readings) return fail(readings.error());
  if (options.pid != 0 && readings->empty()) return fail_without_engine(options);
  const tools::EventFilter filter{options.connection, options.session};
  return write_out(options, options.json ? tools::events_json(*readings, filter)
                                         : tools::events_text(*readings, filter));
}

/// The latencies as a log of histograms.
int write_hdr(const Options& options) {
  const auto readings = read_all(options);
  if (!readings) return fail(readings.error());
  if (options.pid != 0 && readings->empty()) return fail_without_engine(options);
  return write_file(options.hdr, tools::hdr_log(*readings));
}

int run(const Options& options) {
  if (options.clean) return clean(options);
  if (options.list)
    return write_out(options, options.json ? tools::metrics_json() : tools::metrics_text());
  if (!options.serve.empty()) return serve(options);
  if (options.events) return show_events(options);
  if (!options.hdr.empty()) return write_hdr(options);
  if (options.json || options.prometheus || options.pid == 0) {
    const auto readings = read_all(options);
    if (!readings) return fail(readings.error());
    if (options.pid != 0 && readings->empty()) return fail_without_engine(options);
    return write_out(options, options.json         ? tools::json_text(*readings)
                              : options.prometheus ? tools::prometheus_text(*readings)
                                                   : tools::list_text(*readings));
  }
  return options.once ? show_once(options) : show(options);
}

}  // namespace

int main(int argc, char** argv) {
  tools::set_program("spinwire-stat");
  Options options;
  CLI::App app(
      "Shows what the engines of your processes do, and what blocks them.\n"
      "  spinwire-stat        lists the engines, with the first cause of trouble of each\n"
      "  spinwire-stat PID    shows an engine; in a terminal until q is pressed\n"
      "The files of engines whose process died stay: the newest four, until --clean.",
      "spinwire-stat");
  app.add_option("pid", options.pid, "The process; without it, all");
  app.add_option("--engine", options.engine, "Number of the engine in its process");
  app.add_option("--directory", options.directory, "Setting observability.directory of the engines")
      ->capture_default_str();
  app.add_option("--peer", options.peer, "Only connections and sessions whose peer contains this");
  auto* const sort =
      app.add_option(
             "--sort", options.sort,
             "Order of connections and sessions: by the column with this heading, as in SENT/s. "
             "Without it, blocked ones first. Keys of the live view: < and >")
          ->transform([](const std::string& name) {
            const auto column = tools::sort_column(name);
            if (column) return *column;
            throw CLI::ValidationError("--sort",
                                       fmt::format("no column '{}'; columns: {}", name,
                                                   fmt::join(tools::sort_columns(), ", ")));
          });
  app.add_flag("--reverse", options.reverse,
               "With --sort, the smallest first. Key of the live view: r")
      ->needs(sort);
  const auto* const interval =
      app.add_option("--interval", options.interval, "Time between two readings")
          ->default_str("1s")
          ->transform(CLI::AsNumberWithUnit(tools::kTimeUnits))
          ->check(CLI::Range(0.01, 3600.0));
  auto* const count = app.add_option("-n,--count", options.count, "Screens to show; 0: no end")
                          ->check(CLI::Range(std::uint64_t{0}, tools::kMostCount));
  auto* const once = app.add_flag("--once", options.once, "Show one screen, as text");
  once->excludes(count);
  auto* const json = app.add_flag("--json", options.json, "Write JSON");
  auto* const prometheus =
      app.add_flag("--prometheus", options.prometheus, "Write Prometheus' text format");
  json->excludes(prometheus);
  app.add_option("--output", options.output, "Write to a file, which appears when it is complete");
  app.add_option("--serve", options.serve,
                 "Serve Prometheus' text format over HTTP on a loopback address, 127.0.0.1:PORT, "
                 "to all users of this host")
      ->excludes(json);
  auto* const events =
      app.add_flag("--events", options.events,
                   "Show the last events of the engines, or of PID; also of dead ones");
  events->excludes(prometheus);
  app.add_option("--connection", options.connection,
                 "Only events of this connection: INDEX-GENERATION, or INDEX")
      ->needs(events);
  app.add_option("--session", options.session, "Only events of this session, opened or served")
      ->needs(events);
  app.add_option("--hdr", options.hdr,
                 "Write the latencies to a file in HdrHistogram's log format, in nanoseconds")
      ->excludes(json)
      ->excludes(prometheus);
  app.add_flag("--clean", options.clean, "Remove the files of dead engines");
  app.add_flag("--list", options.list, "List the metrics: table, name, kind, unit, help");
  int code = 0;
  if (!tools::parse_arguments(app, argc, argv, code)) return code;
  options.interval_given = interval->count() != 0;
  if (options.count == 1) options.once = true;
  return run(options);
}
