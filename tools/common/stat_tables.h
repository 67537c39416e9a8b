// The tables of connections and sessions on spinwire-stat's screen: their columns, in which order
// their rows come, and which rows are shown.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/stat_findings.h"

namespace spinwire::tools {

/// A count or a rate in at most seven columns.
std::string short_number(double value);

/// In which order rows come: by the column with this heading, in tables that have one. Without one,
/// blocked rows first.
struct RowOrder {
  std::string column{};      ///< a heading of sort_columns(), or empty
  bool is_reversed = false;  ///< numbers begin with the largest, texts with the first; or not

  /// The column behind the present one, or before it; at the end none.
  void move(bool forward);
  /// "SENT/s, the largest first"
  [[nodiscard]] std::string text() const;
};

/// The headings of all tables, each once, in the order of the screen.
std::vector<std::string_view> sort_columns();
/// The heading that this is, in any case of letters.
std::optional<std::string> sort_column(std::string_view name);

/// The lines of a table: headings, then rows whose peer contains `peer`. `name` is the table's name
/// in the engine's file. Empty: it has no such rows.
std::vector<std::string> table_lines(const EngineReading& reading, const Earlier& earlier,
                                     std::string_view name, std::string_view peer,
                                     const RowOrder& order);
/// Of all these tables, one behind the other: connections, sessions, sessions of clients.
std::vector<std::string> all_table_lines(const EngineReading& reading, const Earlier& earlier,
                                         std::string_view peer, const RowOrder& order);

/// What came to a histogram since an earlier reading of the engine; `longest` is then that of all
/// samples. With no earlier histogram, all of it.
LatencyHistogram since(const LatencyHistogram& now, const EngineReading* earlier);

}  // namespace spinwire::tools
