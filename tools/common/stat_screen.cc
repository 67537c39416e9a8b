// The text forms of spinwire-stat.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <iterator>
#include <sstream>
#include <utility>
#include <vector>

#include "common/stat_findings.h"
#include "common/stat_hdr.h"
#include "common/stat_report.h"
#include "common/stat_tables.h"

namespace spinwire::tools {
namespace {

/// Lines of a screen. Half a number misleads, so whole cells are left out, and ">" says so.
class Screen {
 public:
  explicit Screen(const ScreenOptions& options) : options_(options) {}
  /// A row of a table, without the cells that exceed the width.
  template <typename... Args>
  void line(fmt::format_string<Args...> format, Args&&... args) {
    std::string text = fmt::format(format, std::forward<Args>(args)...);
    if (options_.width != 0 && text.size() > options_.width) {
      text.erase(text.find_last_of(' ', options_.width - 1) + 1);
      text.resize(options_.width - 1, ' ');
      text += '>';
    }
    append(std::move(text));
  }
  /// Items between two spaces, in as many lines as they need.
  template <typename... Args>
  void items(fmt::format_string<Args...> format, Args&&... args) {
    std::string text = fmt::format(format, std::forward<Args>(args)...);
    while (options_.width != 0 && text.size() > options_.width) {
      const std::size_t end = text.rfind("  ", options_.width);
      if (end == std::string::npos || end < kIndent.size()) break;
      append(text.substr(0, end));
      text.replace(0, end + 2, kIndent);
    }
    line("{}", text);
  }
  [[nodiscard]] std::string take() { return std::move(text_); }

 private:
  static constexpr std::string_view kIndent = "    ";

  void append(std::string text) {
    if (options_.lines != 0 && count_ == options_.lines) return;
    while (text.ends_with(' ')) text.pop_back();
    text_ += text;
    text_ += '\n';
    ++count_;
  }

  ScreenOptions options_;
  std::string text_;
  std::size_t count_ = 0;
};

std::string_view state_of(const EngineReading& reading) {
  if (!reading.file.is_alive) return "dead";
  return to_seconds(reading.since_written) > 1 ? "not polled" : "running";
}

/// Until now, or until a dead process wrote for the last time.
std::string uptime_text(const EngineReading& reading) {
  const double written = to_seconds(reading.written_at) - to_seconds(reading.opened_at);
  const double since = reading.file.is_alive ? to_seconds(reading.since_written) : 0;
  return time_text(std::max(written, 0.0) + since);
}

void show_engine(Screen& screen, const EngineReading& reading, const Earlier& earlier) {
  screen.items("spinwire-stat  {}  pid {}  engine {}  {}  device {}  up {}  release {}",
               reading.program, reading.file.pid, reading.file.engine, state_of(reading),
               reading.device, uptime_text(reading), reading.release);
  const MetricTable* const table = reading.find("engine");
  if (table == nullptr || table->rows.empty()) return;
  const Subject engine{table, table->rows.data()};
  const auto value = [&](std::string_view column) { return short_number(engine.number(column)); };
  const auto per_second = [&](std::string_view column) {
    return short_number(earlier.rate(engine, column, reading));
  };
  screen.items(
      "per second{}: polls {}  sent {}  received {}  calls {}  replies {}  served {}  "
      "retransmitted {}",
      mark_of(*engine.row), per_second("spinwire_polls_total"),
      per_second("spinwire_messages_sent_total"), per_second("spinwire_messages_received_total"),
      per_second("spinwire_rpc_calls_total"), per_second("spinwire_rpc_replies_total"),
      per_second("spinwire_rpc_served_total"),
      per_second("spinwire_rpc_retransmitted_requests_total"));
  screen.items(
      "now{}: connections {}  operations {}  receives {}  sessions {}  served {}  lost {}  refused "
      "{}",
      mark_of(*engine.row), value("spinwire_connections"), value("spinwire_operations"),
      value("spinwire_receives"), value("spinwire_rpc_sessions"),
      value("spinwire_rpc_served_sessions"), value("spinwire_peers_lost_total"),
      value("spinwire_handshakes_refused_total"));
}

/// The longest stalls since the engine was opened.
void show_stalls(Screen& screen, const EngineReading& reading) {
  const MetricTable* const table = reading.find("engine");
  if (table == nullptr || table->rows.empty()) return;
  const Subject engine{table, table->rows.data()};
  const auto longest = [&](const char* what) {
    const std::string column = fmt::format("spinwire_longest_{}", what);
    const std::string_view ran = engine.text(column + "_ran");
    return fmt::format("{} {}{}", what, time_text(engine.number(column + "_seconds")),
                       ran.empty() ? "" : fmt::format(" ({})", ran));
  };
  screen.items("longest{}: {}  {}  {}", mark_of(*engine.row), longest("poll"), longest("callback"),
               longest("pause"));
}

/// Handlers may take less than a microsecond.
std::string latency_text(double seconds) {
  return seconds < 1e-6 ? fmt::format("{:.0f} ns", seconds * 1e9) : time_text(seconds);
}

/// Those of the last interval, or since the engine was opened: at first, once, and if that is
/// chosen.
void show_latencies(Screen& screen, const EngineReading& reading, const EngineReading* before,
                    const ScreenOptions& options) {
  if (reading.latencies.empty()) return;
  const EngineReading* const earlier = options.is_live && !options.all_latencies ? before : nullptr;
  screen.line("{:<34} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
              earlier != nullptr ? "LATENCY, LAST INTERVAL" : "LATENCY, SINCE OPENING", "SAMPLES",
              "MEAN", "P50", "P99", "P99.9", "MAX");
  for (const LatencyHistogram& all : reading.latencies) {
    const LatencyHistogram l = since(all, earlier);
    if (l.samples == 0) {
      screen.line("{:<34} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}", latency_name(l), 0, "-", "-", "-",
                  "-", "-");
      continue;
    }
    const auto at = [&](double share) { return latency_text(to_seconds(l.quantile(share))); };
    const double mean = l.samples != 0 ? l.sum_seconds / static_cast<double>(l.samples) : 0;
    screen.line("{:<34} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
                latency_name(l) + (l.is_consistent ? "" : "?"),
                short_number(static_cast<double>(l.samples)), latency_text(mean), at(0.5), at(0.99),
                at(0.999), earlier != nullptr ? at(1) : latency_text(to_seconds(l.longest)));
  }
}

void show_pools(Screen& screen, const EngineReading& reading) {
  const MetricTable* const pools = reading.find("pool");
  if (pools == nullptr) return;
  std::string text = "pools, unused:";
  for (const MetricRow& row : pools->rows) {
    const Subject pool{pools, &row};
    constexpr double kMega = 1 << 20;
    text += fmt::format("  {}{} {:.0f} of {:.0f} MiB", pool.text("pool"), mark_of(row),
                        pool.number("spinwire_pool_free_bytes") / kMega,
                        pool.number("spinwire_pool_bytes") / kMega);
    if (const double used = pool.number("spinwire_pool_blocks_used"); used != 0)
      text += fmt::format(", {} blocks in use", short_number(used));
    if (const double refused = pool.number("spinwire_pool_refusals_total"); refused != 0)
      text += fmt::format(", {} refused", short_number(refused));
  }
  screen.items("{}", text);
}

/// A text in lines of this width at most, which begin with `indent`. Only a word may be longer.
std::vector<std::string> wrap(std::string_view text, std::size_t width, std::string_view indent) {
  std::vector<std::string> lines;
  std::string line(indent);
  std::istringstream words{std::string(text)};
  for (std::string word; words >> word;) {
    const bool is_empty = line.size() == indent.size();
    if (!is_empty && line.size() + 1 + word.size() > width) {
      lines.push_back(std::exchange(line, std::string(indent)));
      line += word;
    } else {
      line += (is_empty ? "" : " ") + word;
    }
  }
  if (line.size() != indent.size()) lines.push_back(std::move(line));
  return lines;
}

/// The lines of a finding: the first one names the cause.
std::vector<std::string> finding_lines(const Finding& finding, std::size_t width) {
  std::vector<std::string> lines;
  const auto append = [&](std::string_view text) {
    for (std::string& line : wrap(text, width, "    ")) lines.push_back(std::move(line));
  };
  append(finding.line());
  lines[0].replace(0, 4, "! ");
  append(finding.found);
  append(finding.advice);
  return lines;
}

void show_findings(Screen& screen, const EngineReading& reading, const Earlier& earlier,
                   const ScreenOptions& options) {
  const std::vector<Finding> found = findings(reading, earlier, options.peer);
  if (found.empty()) return screen.line("nothing is blocked");
  // For a terminal of 80 columns and 24 lines. The tables below have all rows.
  constexpr std::size_t kColumns = 80, kMostLines = 16;
  const std::size_t width = options.width != 0 ? std::min(options.width, kColumns) : kColumns;
  std::size_t shown = 0, lines = 0;
  for (const Finding& finding : found) {
    const std::vector<std::string> text = finding_lines(finding, width);
    if (shown != 0 && lines + text.size() > kMostLines) break;
    for (const std::string& line : text) screen.line("{}", line);
    lines += text.size();
    ++shown;
  }
  if (shown < found.size()) screen.line("! and {} more", found.size() - shown);
}

/// What the keys of the live view have chosen.
void show_choice(Screen& screen, const ScreenOptions& options) {
  if (!options.is_live) return;
  screen.items("rows: {}  {}  keys: < > column  r reverse  / filter  l latencies  q quit",
               options.order.text(),
               options.typed          ? fmt::format("filter by peer: {}_", *options.typed)
               : options.peer.empty() ? std::string("all peers")
                                      : fmt::format("peers with \"{}\"", options.peer));
}

}  // namespace

std::string screen_text(const EngineReading& reading, const EngineReading* before,
                        const ScreenOptions& options) {
  // A newer engine may have the file's name.
  if (before != nullptr && before->opened_at != reading.opened_at) before = nullptr;
  const Earlier earlier(before);
  Screen screen(options);
  show_engine(screen, reading, earlier);
  // Above what may be longer than the screen.
  show_choice(screen, options);
  show_findings(screen, reading, earlier, options);
  show_pools(screen, reading);
  show_stalls(screen, reading);
  for (const std::string& line : all_table_lines(reading, earlier, options.peer, options.order))
    screen.line("{}", line);
  show_latencies(screen, reading, before, options);
  return screen.take();
}

std::string list_text(std::span<const EngineReading> readings) {
  Screen screen({});
  screen.line("{:>8} {:>6} {:<10} {:<16} {:<12} {:>8} {:>11} {:>8} {:>8}  {}", "PID", "ENGINE",
              "STATE", "PROGRAM", "DEVICE", "UP", "CONNECTIONS", "SESSIONS", "SERVED",
              "FIRST CAUSE");
  for (const EngineReading& reading : readings) {
    const MetricTable* const table = reading.find("engine");
    const auto value = [&](std::string_view column) {
      return table != nullptr && !table->rows.empty()
                 ? short_number(table->number(table->rows[0], column)) +
                       std::string(mark_of(table->rows[0]))
                 : std::string("?");
    };
    const std::vector<Finding> found = findings(reading, Earlier(nullptr), {});
    // The column before says that an engine is dead.
    const std::size_t first = found.size() > 1 && !reading.file.is_alive ? 1 : 0;
    const std::string cause = found.empty() ? "-" : found[first].line();
    screen.line("{:>8} {:>6} {:<10} {:<16} {:<12} {:>8} {:>11} {:>8} {:>8}  {}", reading.file.pid,
                reading.file.engine, state_of(reading), reading.program, reading.device,
                uptime_text(reading), value("spinwire_connections"), value("spinwire_rpc_sessions"),
                value("spinwire_rpc_served_sessions"), cause);
  }
  return screen.take();
}

std::string metrics_text() {
  std::string text;
  for (const Metric& metric : metrics()) {
    text +=
        fmt::format("{:<14} {:<52} {:<7} {:<7} {}\n", metric.table, metric.name,
                    to_string(metric.kind), metric.unit.empty() ? "-" : metric.unit, metric.help);
  }
  return text;
}

}  // namespace spinwire::tools
