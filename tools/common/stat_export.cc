// The machine-readable forms of spinwire-stat.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/cli.h"
#include "common/json.h"
#include "common/stat_findings.h"
#include "common/stat_report.h"

namespace spinwire::tools {
namespace {

/// The value of a counter or gauge in its unit.
std::string number_text(const MetricColumn& column, const MetricValue& value) {
  if (column.per_unit == 1) return fmt::format("{}", value.number);
  return fmt::format("{}", static_cast<double>(value.number) / column.per_unit);
}

bool is_number(const MetricColumn& column) {
  return column.kind == MetricKind::counter || column.kind == MetricKind::gauge;
}

Json json_value(const MetricColumn& column, const MetricValue& value) {
  if (!is_number(column)) return value.text;
  if (column.per_unit == 1) return value.number;
  return static_cast<double>(value.number) / column.per_unit;
}

// A damaged file may have a name twice: emplace() keeps the first one.
Json json_row(const MetricTable& table, const MetricRow& row) {
  Json members = Json::object();
  for (std::size_t i = 0; i < table.columns.size(); ++i)
    members.emplace(table.columns[i].name, json_value(table.columns[i], row.values[i]));
  if (!row.is_consistent) members["consistent"] = false;
  return members;
}

Json json_latency(const LatencyHistogram& l) {
  const auto at = [&](double share) { return to_seconds(l.quantile(share)); };
  return {{"work", l.work},
          {"stage", l.stage},
          {"method", l.method ? Json(*l.method) : Json()},
          {"samples", l.samples},
          {"sum", l.sum_seconds},
          {"p50", at(0.5)},
          {"p99", at(0.99)},
          {"p999", at(0.999)},
          {"max", to_seconds(l.longest)},
          {"consistent", l.is_consistent}};
}

Json json_engine(const EngineReading& reading) {
  Json tables = Json::object();
  for (const MetricTable& table : reading.tables) {
    Json rows = Json::array();
    for (const MetricRow& row : table.rows) rows.push_back(json_row(table, row));
    tables.emplace(table.name, std::move(rows));
  }
  Json latencies = Json::array();
  for (const LatencyHistogram& latency : reading.latencies)
    latencies.push_back(json_latency(latency));
  Json causes = Json::array();
  for (const Finding& found : findings(reading, Earlier(nullptr), {}))
    causes.push_back(found.text());
  return {{"pid", reading.file.pid},
          {"engine", reading.file.engine},
          {"alive", reading.file.is_alive},
          {"program", reading.program},
          {"device", reading.device},
          {"release", reading.release},
          {"file", reading.file.path},
          {"opened_at", to_seconds(reading.opened_at)},
          {"written_at", to_seconds(reading.written_at)},
          {"since_written", to_seconds(reading.since_written)},
          {"findings", std::move(causes)},
          {"latencies", std::move(latencies)},
          {"tables", std::move(tables)}};
}

/// A label's value in Prometheus' text format.
std::string escaped(std::string_view text, bool quotes) {
  std::string out;
  for (const char c : text) {
    if (c == '\\' || (quotes && c == '"')) out += '\\';
    out += c;
  }
  return out;
}

/// Bytes of all texts of a row, its labels and states. No engine of this project has as many.
constexpr std::uint64_t kRowTextsMax = 8192;
/// Bytes of an engine's samples. Each repeats its row's labels, so a small file could claim far
/// more.
constexpr std::uint64_t kSamplesMax = std::uint64_t{512} << 20;

/// The bytes of an engine's samples, about; above kSamplesMax for a row with too many texts.
std::uint64_t estimate_samples(const EngineReading& reading) {
  constexpr std::uint64_t kOthers = 160;  // of a sample: labels of the engine, and the value
  constexpr std::uint64_t kMarks = 4;     // of a label: a comma, an equals sign and quotes
  std::uint64_t bytes = 0;
  for (const MetricTable& table : reading.tables) {
    std::uint64_t labels = 0;   // bytes that each sample has for the names of labels
    std::uint64_t names = 0;    // bytes of the names of all samples of a row
    std::uint64_t samples = 0;  // of a row
    for (const MetricColumn& column : table.columns) {
      const bool is_label = column.kind == MetricKind::label;
      (is_label ? labels : names) += column.name.size() + (is_label ? kMarks : 0);
      samples += is_label ? 0 : 1;
    }
    for (const MetricRow& row : table.rows) {
      std::uint64_t texts = 0;
      for (const MetricValue& value : row.values) texts += value.text.size();
      if (texts > kRowTextsMax) return kSamplesMax + 1;
      bytes += samples * (labels + texts + kOthers) + names;
      if (bytes > kSamplesMax) return bytes;
    }
  }
  return bytes;
}

/// The samples of all engines, with those of a metric together, as the format demands.
class Prometheus {
 public:
  void add_engine(const EngineReading& reading) {
    engine_ = fmt::format("pid=\"{}\",engine=\"{}\",program=\"{}\"", reading.file.pid,
                          reading.file.engine, escaped(reading.program, true));
    const std::string up(kUpMetric.name);
    family(up, to_string(kUpMetric.kind), kUpMetric.help)
        .append(sample(up, {}, reading.file.is_alive ? "1" : "0"));
    if (!reading.file.is_alive) return;
    if (estimate_samples(reading) > kSamplesMax) {
      (void)fail(
          fmt::format("{}: left out, except {}: its labels and samples are too many; lower "
                      "observability.rows, or remove the file if no engine made it",
                      reading.file.path, kUpMetric.name));
      return;
    }
    for (const MetricTable& table : reading.tables) {
      for (const MetricRow& row : table.rows) add_row(table, row);
    }
    for (const LatencyHistogram& latency : reading.latencies) add_latency(latency);
  }
  [[nodiscard]] std::string text() const {
    std::string all;
    for (const Family& each : families_) all += each.head + each.samples;
    return all;
  }

 private:
  struct Family {
    std::string head;
    std::string samples;
  };

  std::string& family(const std::string& name, std::string_view type, std::string_view help) {
    const auto [found, is_new] = places_.try_emplace(name, families_.size());
    if (!is_new) return families_[found->second].samples;
    families_.push_back(
        {fmt::format("# HELP {0} {1}\n# TYPE {0} {2}\n", name, escaped(help, false), type), {}});
    return families_.back().samples;
  }
  [[nodiscard]] std::string sample(const std::string& name, std::string_view labels,
                                   std::string_view value) const {
    return fmt::format("{}{{{}{}}} {}\n", name, engine_, labels, value);
  }
  static std::string labels_of(const MetricTable& table, const MetricRow& row) {
    std::string labels;
    std::set<std::string_view> names = {"pid", "engine", "program", "state"};
    for (std::size_t i = 0; i < table.columns.size(); ++i) {
      const MetricColumn& column = table.columns[i];
      if (column.kind != MetricKind::label || !names.insert(column.name).second) continue;
      labels += fmt::format(",{}=\"{}\"", column.name, escaped(row.values[i].text, true));
    }
    return labels;
  }
  void add_row(const MetricTable& table, const MetricRow& row) {
    // Its values may be those of two subjects, and the format cannot say so.
    if (!row.is_consistent) return;
    const std::string labels = labels_of(table, row);
    for (std::size_t i = 0; i < table.columns.size(); ++i) {
      const MetricColumn& column = table.columns[i];
      if (column.kind == MetricKind::label) continue;
      if (is_number(column)) {
        family(column.name, to_string(column.kind), column.help)
            .append(sample(column.name, labels, number_text(column, row.values[i])));
      } else {
        // The state is a label of a sample that is 1.
        family(column.name, "gauge", column.help + " (label state)")
            .append(sample(
                column.name,
                fmt::format("{},state=\"{}\"", labels, escaped(row.values[i].text, true)), "1"));
      }
    }
  }

  void add_latency(const LatencyHistogram& l) {
    if (!l.is_consistent) return;
    const std::string name(kLatencyMetric.name);
    const std::string labels = fmt::format(",work=\"{}\",stage=\"{}\",method=\"{}\"", l.work,
                                           l.stage, l.method ? fmt::format("{}", *l.method) : "");
    std::string& samples = family(name, to_string(kLatencyMetric.kind), kLatencyMetric.help);
    for (const char* const share : {"0.5", "0.99", "0.999", "1"}) {
      samples += sample(name, fmt::format("{},quantile=\"{}\"", labels, share),
                        fmt::format("{}", to_seconds(l.quantile(std::strtod(share, nullptr)))));
    }
    samples += sample(name + "_sum", labels, fmt::format("{}", l.sum_seconds));
    samples += sample(name + "_count", labels, fmt::format("{}", l.samples));
  }

  std::string engine_;  ///< labels of the engine that is being added
  std::vector<Family> families_;
  std::unordered_map<std::string, std::size_t> places_;  ///< of families_, by name
};

}  // namespace

std::string json_text(std::span<const EngineReading> readings) {
  Json engines = Json::array();
  for (const EngineReading& reading : readings) engines.push_back(json_engine(reading));
  return json_line({{"engines", std::move(engines)}});
}

std::string prometheus_text(std::span<const EngineReading> readings) {
  Prometheus all;
  for (const EngineReading& reading : readings) all.add_engine(reading);
  return all.text();
}

std::string metrics_json() {
  Json list = Json::array();
  for (const Metric& metric : metrics()) {
    list.push_back({{"table", metric.table},
                    {"name", metric.name},
                    {"kind", to_string(metric.kind)},
                    {"unit", metric.unit},
                    {"help", metric.help}});
  }
  return json_line({{"metrics", std::move(list)}});
}

}  // namespace spinwire::tools
