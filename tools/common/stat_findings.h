// What holds an engine up, in words: blocked connections and sessions, empty pools, silent peers,
// an application that does not poll. Each finding names the cause.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "spinwire/observe.h"

namespace spinwire::tools {

/// Rows of a table that belong to one connection or session.
struct Subject {
  const MetricTable* table;
  const MetricRow* row;

  [[nodiscard]] double number(std::string_view column) const noexcept {
    return table->number(*row, column);
  }
  [[nodiscard]] std::string_view text(std::string_view column) const noexcept {
    return table->text(*row, column);
  }
};

/// The rows of a table whose peer contains `peer`, the blocked ones first and of those the longest
/// blocked.
std::vector<Subject> subjects_of(const EngineReading& reading, std::string_view table,
                                 std::string_view peer);
/// The row with the same labels in an earlier reading; null: there is none.
const MetricRow* find_same(const MetricTable& table, const MetricRow& row,
                           const EngineReading& earlier) noexcept;
/// How much a counter grew in a second; 0 without an earlier reading.
double rate(const Subject& subject, std::string_view column, const EngineReading& reading,
            const EngineReading* earlier) noexcept;

inline double to_seconds(Nanoseconds time) noexcept {
  return std::chrono::duration<double>(time).count();
}
/// "3.2 s", "15 us"
std::string time_text(double seconds);

/// The most important first. `earlier` may be null.
std::vector<std::string> findings(const EngineReading& reading, const EngineReading* earlier,
                                  std::string_view peer);

}  // namespace spinwire::tools
