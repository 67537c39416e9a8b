#include "common/stat_tables.h"

#include <fmt/core.h>
#include <string.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <span>
#include <utility>

namespace spinwire::tools {
namespace {

/// A row, and what it is compared with.
struct Context {
  const Subject& subject;
  const Earlier& earlier;
  const EngineReading& reading;

  [[nodiscard]] double number(std::string_view column) const { return subject.number(column); }
  [[nodiscard]] double rate(std::string_view column) const {
    return earlier.rate(subject, column, reading);
  }
};

/// A column: a text, or a number and how it is written.
struct ShownColumn {
  std::string_view heading;
  int width;  ///< negative: from the left
  std::string (*text)(const Context&) = nullptr;
  double (*number)(const Context&) = nullptr;
  std::string (*write)(double) = short_number;
};
struct ShownTable {
  std::string_view name;
  std::span<const ShownColumn> columns;
};

std::string blocker(const Context& c, std::string_view column) {
  const std::string_view text = c.subject.text(column);
  return text == "nothing" ? "-" : std::string(text);
}
std::string id(const Context& c, std::string_view label) {
  return fmt::format("{}{}", c.subject.text(label), mark_of(*c.subject.row));
}
std::string peer(const Context& c) { return std::string(c.subject.text("peer")); }

// clang-format off
constexpr ShownColumn kConnections[] = {
    {"CONNECTION", -12, [](const Context& c) { return id(c, "connection"); }},
    {"PEER", -24, peer},
    {"STATE", -10, [](const Context& c) { return std::string(c.subject.text("spinwire_connection_state")); }},
    {"BLOCKED BY", -10, [](const Context& c) { return blocker(c, "spinwire_connection_blocked_by"); }},
    {"FOR", 8, nullptr, [](const Context& c) { return c.number("spinwire_connection_blocked_seconds"); }, time_text},
    {"HEARD", 8, nullptr, [](const Context& c) { return c.number("spinwire_connection_last_heard_seconds"); }, time_text},
    {"OUT", 6, nullptr, [](const Context& c) { return c.number("spinwire_connection_outstanding"); }},
    {"CREDIT", 6, nullptr, [](const Context& c) { return c.number("spinwire_connection_send_credits"); }},
    {"SENT/s", 8, nullptr, [](const Context& c) { return c.rate("spinwire_connection_messages_sent_total"); }},
    {"RECV/s", 8, nullptr, [](const Context& c) { return c.rate("spinwire_connection_messages_received_total"); }},
    {"BYTES/s", 8, nullptr, [](const Context& c) {
       return c.rate("spinwire_connection_sent_bytes_total") + c.rate("spinwire_connection_received_bytes_total") +
              c.rate("spinwire_connection_written_bytes_total") + c.rate("spinwire_connection_read_bytes_total");
     }},
};
constexpr ShownColumn kSessions[] = {
    {"SESSION", -12, [](const Context& c) { return id(c, "session"); }},
    {"SERVER", -24, peer},
    {"STATE", -8, [](const Context& c) { return std::string(c.subject.text("spinwire_session_state")); }},
    {"BLOCKED BY", -13, [](const Context& c) { return blocker(c, "spinwire_session_blocked_by"); }},
    {"FOR", 8, nullptr, [](const Context& c) { return c.number("spinwire_session_blocked_seconds"); }, time_text},
    {"HEARD", 8, nullptr, [](const Context& c) { return c.number("spinwire_session_last_heard_seconds"); }, time_text},
    {"CALLS", 7, nullptr, [](const Context& c) {
       return c.number("spinwire_session_in_flight") + c.number("spinwire_session_long_calls");
     }},
    {"WAITING", 7, nullptr, [](const Context& c) { return c.number("spinwire_session_backlog"); }},
    {"SRTT", 8, nullptr, [](const Context& c) { return c.number("spinwire_session_srtt_seconds"); }, time_text},
    {"CWND", 5, nullptr, [](const Context& c) { return c.number("spinwire_session_congestion_window"); }},
    {"CALLS/s", 8, nullptr, [](const Context& c) { return c.rate("spinwire_session_calls_total"); }},
    {"RETX/s", 8, nullptr, [](const Context& c) { return c.rate("spinwire_session_retransmissions_total"); }},
};
constexpr ShownColumn kServed[] = {
    {"SERVED", -12, [](const Context& c) { return id(c, "session"); }},
    {"CLIENT", -24, peer},
    {"CALLS", 7, nullptr, [](const Context& c) { return c.number("spinwire_served_session_calls"); }},
    {"WINDOW", 7, nullptr, [](const Context& c) { return c.number("spinwire_served_session_window"); }},
    {"HEARD", 8, nullptr, [](const Context& c) { return c.number("spinwire_served_session_last_heard_seconds"); }, time_text},
    {"KEY", -3, [](const Context& c) { return std::string(c.subject.text("key")); }},
};
// clang-format on
constexpr std::array kTables = {ShownTable{"connection", kConnections},
                                ShownTable{"session", kSessions},
                                ShownTable{"served_session", kServed}};

std::string cell(const ShownColumn& column, std::string_view text) {
  return column.width < 0 ? fmt::format("{:<{}}", text, -column.width)
                          : fmt::format("{:>{}}", text, column.width);
}

const ShownColumn* find(const ShownTable& table, std::string_view heading) {
  const auto found = std::find_if(table.columns.begin(), table.columns.end(),
                                  [&](const ShownColumn& each) { return each.heading == heading; });
  return found != table.columns.end() ? &*found : nullptr;
}

void sort(std::vector<Subject>& rows, const ShownColumn& column, bool is_reversed,
          const Earlier& earlier, const EngineReading& reading) {
  // A key is made once for each row: a rate searches the earlier reading.
  struct Keyed {
    Subject row;
    double number;
    std::string text;
  };
  std::vector<Keyed> keyed;
  keyed.reserve(rows.size());
  for (const Subject& row : rows) {
    const Context context{row, earlier, reading};
    keyed.push_back({row, column.number != nullptr ? column.number(context) : 0,
                     column.text != nullptr ? column.text(context) : std::string()});
  }
  std::stable_sort(keyed.begin(), keyed.end(), [&](const Keyed& first, const Keyed& second) {
    // Numbers within texts sort by their value: "2-1" comes before "10-1".
    const Keyed& a = is_reversed ? second : first;
    const Keyed& b = is_reversed ? first : second;
    return column.number != nullptr ? a.number > b.number
                                    : ::strverscmp(a.text.c_str(), b.text.c_str()) < 0;
  });
  std::transform(keyed.begin(), keyed.end(), rows.begin(),
                 [](const Keyed& each) { return each.row; });
}

}  // namespace

std::string short_number(double value) {
  constexpr std::array<const char*, 5> kUnits = {"", "k", "M", "G", "T"};
  std::size_t unit = 0;
  while (value >= 10000 && unit + 1 < kUnits.size()) {
    value /= 1000;
    ++unit;
  }
  return value >= 100 || value == static_cast<double>(static_cast<long long>(value))
             ? fmt::format("{:.0f}{}", value, kUnits[unit])
             : fmt::format("{:.1f}{}", value, kUnits[unit]);
}

std::vector<std::string_view> sort_columns() {
  std::vector<std::string_view> all;
  for (const ShownTable& table : kTables) {
    for (const ShownColumn& column : table.columns) {
      if (std::find(all.begin(), all.end(), column.heading) == all.end())
        all.push_back(column.heading);
    }
  }
  return all;
}

std::optional<std::string> sort_column(std::string_view name) {
  const auto is_same = [](char a, char b) {
    return std::tolower(static_cast<unsigned char>(a)) ==
           std::tolower(static_cast<unsigned char>(b));
  };
  for (const std::string_view each : sort_columns()) {
    if (std::equal(each.begin(), each.end(), name.begin(), name.end(), is_same))
      return std::string(each);
  }
  return std::nullopt;
}

void RowOrder::move(bool forward) {
  // Empty is one more place of the circle.
  std::vector<std::string_view> all = sort_columns();
  all.insert(all.begin(), "");
  const auto at = static_cast<std::size_t>(std::find(all.begin(), all.end(), column) - all.begin());
  column = all[(at + (forward ? 1 : all.size() - 1)) % all.size()];
}

std::string RowOrder::text() const {
  for (const ShownTable& table : kTables) {
    if (const ShownColumn* const found = find(table, column); found != nullptr) {
      const char* const first = found->number != nullptr ? "the largest" : "a";
      const char* const last = found->number != nullptr ? "the smallest" : "z";
      return fmt::format("{}, {} first", column, is_reversed ? last : first);
    }
  }
  return "what blocks, the longest first";
}

std::vector<std::string> table_lines(const EngineReading& reading, const Earlier& earlier,
                                     std::string_view name, std::string_view peer,
                                     const RowOrder& order) {
  std::vector<std::string> lines;
  for (const ShownTable& table : kTables) {
    if (table.name != name) continue;
    std::vector<Subject> rows = subjects_of(reading, name, peer);
    if (rows.empty()) continue;
    if (const ShownColumn* const by = find(table, order.column); by != nullptr)
      sort(rows, *by, order.is_reversed, earlier, reading);
    std::string head;
    for (const ShownColumn& column : table.columns)
      head += (head.empty() ? "" : " ") + cell(column, column.heading);
    lines.push_back(std::move(head));
    for (const Subject& row : rows) {
      const Context context{row, earlier, reading};
      std::string line;
      for (const ShownColumn& column : table.columns)
        line += (line.empty() ? "" : " ") +
                cell(column, column.text != nullptr ? column.text(context)
                                                    : column.write(column.number(context)));
      lines.push_back(std::move(line));
    }
  }
  return lines;
}

std::vector<std::string> all_table_lines(const EngineReading& reading, const Earlier& earlier,
                                         std::string_view peer, const RowOrder& order) {
  std::vector<std::string> all;
  for (const ShownTable& table : kTables) {
    for (std::string& line : table_lines(reading, earlier, table.name, peer, order))
      all.push_back(std::move(line));
  }
  return all;
}

LatencyHistogram since(const LatencyHistogram& now, const EngineReading* earlier) {
  if (earlier == nullptr) return now;
  for (const LatencyHistogram& before : earlier->latencies) {
    if (before.work != now.work || before.stage != now.stage || before.method != now.method)
      continue;
    if (before.samples > now.samples || before.buckets.size() != now.buckets.size()) return now;
    LatencyHistogram grown = now;
    grown.samples -= before.samples;
    grown.sum_seconds = std::max(now.sum_seconds - before.sum_seconds, 0.0);
    for (std::size_t i = 0; i < grown.buckets.size(); ++i)
      grown.buckets[i] -= std::min(before.buckets[i], grown.buckets[i]);
    grown.is_consistent = now.is_consistent && before.is_consistent;
    return grown;
  }
  return now;
}

}  // namespace spinwire::tools
