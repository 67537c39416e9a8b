// What holds an engine up, in words: blocked connections and sessions, empty pools, silent peers,
// an application that does not poll. Each finding names the cause.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
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
/// "?" for a row whose values were not written together, so that they may be those of two subjects.
inline std::string_view mark_of(const MetricRow& row) noexcept {
  return row.is_consistent ? "" : "?";
}

/// The rows of an earlier reading of an engine, by their labels.
class Earlier {
 public:
  /// Refers to `reading`, which may be null.
  explicit Earlier(const EngineReading* reading);

  [[nodiscard]] bool is_known() const noexcept { return reading_ != nullptr; }
  /// The row with the same labels; null: there is none, or one of both is not consistent.
  [[nodiscard]] const MetricRow* find(const Subject& subject) const;
  /// How much a counter has grown in a second; 0 if it is not known.
  [[nodiscard]] double rate(const Subject& subject, std::string_view column,
                            const EngineReading& reading) const;

 private:
  const EngineReading* reading_;
  std::map<std::string, std::unordered_map<std::string, const MetricRow*>, std::less<>> rows_;
};

inline double to_seconds(Nanoseconds time) noexcept {
  return std::chrono::duration<double>(time).count();
}
/// "3.2 s", "15 us"
std::string time_text(double seconds);

/// How much a cause explains. A cause may be the reason for all those behind it.
enum class Severity : std::uint8_t {
  process,  ///< the process is dead, or does not poll
  silent,   ///< a peer is silent
  ended,    ///< a connection or session has ended by an error
  memory,   ///< a pool is used up
  blocked,  ///< something is blocked now
  recent,   ///< trouble of the last minute
  notice,   ///< nothing is wrong
};

/// What holds an engine up.
struct Finding {
  Severity severity = Severity::blocked;
  std::string cause{};
  std::string when{};      ///< "for 3.2 s", "2 times, 1.3 s ago"; may be empty
  std::string subject{};   ///< the first one; empty: the engine
  std::string found{};     ///< what was found, as the engine wrote it; may be empty
  std::string advice{};    ///< in sentences; may be empty
  std::size_t count = 1;   ///< subjects that `subject` stands for
  std::size_t others = 0;  ///< further subjects with the same cause

  /// "credit used up: connection 0-1 to 10.0.0.7:4000 and 2 others, for 3.2 s"
  [[nodiscard]] std::string line() const;
  /// All of it, in one line.
  [[nodiscard]] std::string text() const;
};

/// Findings in the order in which they are added; one for each cause.
class Findings {
 public:
  void add(Finding finding);
  /// The most severe first.
  [[nodiscard]] std::vector<Finding> take();

 private:
  std::vector<Finding> found_;
  std::set<std::string> subjects_;  ///< with their causes
};

/// The most important first. Subjects with the same cause are one finding.
std::vector<Finding> findings(const EngineReading& reading, const Earlier& earlier,
                              std::string_view peer);

}  // namespace spinwire::tools
