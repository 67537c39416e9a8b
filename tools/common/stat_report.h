// What spinwire-stat shows of an engine: a screen of text, JSON, or Prometheus' text format.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "common/stat_tables.h"
#include "spinwire/observe.h"

namespace spinwire::tools {

struct ScreenOptions {
  std::string_view peer;  ///< only rows whose peer contains it
  std::size_t lines = 0;  ///< at most; 0: all
  std::size_t width = 0;  ///< columns of the terminal; 0: any
  RowOrder order{};
  bool is_live = false;                ///< with what the keys have chosen
  std::optional<std::string> typed{};  ///< a filter that is being typed
  /// Latencies since the engine was opened; else, live, those of the last interval.
  bool all_latencies = false;
};
/// Causes of trouble first, then counters with rates, pools, connections and sessions. Rates are
/// those since `earlier`, which may be null. "?" marks rows that are not consistent.
std::string screen_text(const EngineReading& reading, const EngineReading* earlier,
                        const ScreenOptions& options);
/// A line for each engine.
std::string list_text(std::span<const EngineReading> readings);

/// {"engines":[...]}, with all tables and the findings.
std::string json_text(std::span<const EngineReading> readings);
/// Version 0.0.4 of the format. Of dead engines it only has spinwire_up; rows that are not
/// consistent are left out. An engine whose samples would take too much memory is left out, with a
/// message on stderr.
std::string prometheus_text(std::span<const EngineReading> readings);
/// All metrics of this release.
std::string metrics_text();
std::string metrics_json();

}  // namespace spinwire::tools
