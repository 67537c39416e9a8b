// The table of metrics: every member of the public statistics has a row, and every row follows the
// rules of names.
#include "observe/metric_tables.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>

#include "observe/page_layout.h"
#include "spinwire/observe.h"

namespace observe_test {
namespace {

using namespace spinwire;  // NOLINT: the names of a test namespace
using namespace spinwire::observe;

struct Anything {
  template <typename T>
  constexpr operator T() const;  // NOLINT(google-explicit-constructor): stands for any member
};
template <typename T, typename... Members>
consteval std::size_t members_of() {
  if constexpr (requires { T{Members{}..., Anything{}}; }) {
    return members_of<T, Members..., Anything>();
  } else {
    return sizeof...(Members);
  }
}
struct Three {
  std::uint64_t a;
  struct {
    int x, y;
  } b;
  bool c;
};
static_assert(members_of<Three>() == 3);

TEST(ObserveTables, NoMemberOfTheStatisticsIsMissing) {
  const MembersShown shown = members_shown();
  // `authentication` and `stats` have tables of their own.
  EXPECT_EQ(shown.engine + 1, members_of<EngineStats>());
  EXPECT_EQ(shown.authentication, members_of<AuthenticationStats>());
  EXPECT_EQ(shown.calls, members_of<RpcStats>());
  EXPECT_EQ(shown.memory, members_of<MemoryStats>());
  EXPECT_EQ(shown.connection, members_of<ConnectionStats>());
  EXPECT_EQ(shown.connection_snapshot + 1, members_of<ConnectionSnapshot>());
  EXPECT_EQ(shown.session, members_of<SessionSnapshot>());
}

/// A record of `count` members of type V, each with a value of its own.
template <typename V, typename T>
void number_members(T& record) {
  std::array<V, sizeof(T) / sizeof(V)> values{};
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<V>(i + 1);
  std::memcpy(static_cast<void*>(&record), values.data(), sizeof values);
}

/// The distinct values among `count` words.
std::size_t distinct(const std::uint64_t* words, std::size_t count) {
  return std::set<std::uint64_t>(words, words + count).size();
}

TEST(ObserveTables, EachRowShowsAnotherMember) {
  RowWords row{};
  RpcStats calls;
  MemoryStats memory;
  static_assert(std::is_trivially_copyable_v<RpcStats> &&
                std::is_trivially_copyable_v<MemoryStats>);
  number_members<std::uint32_t>(calls);
  number_members<std::uint64_t>(memory);
  const MembersShown shown = members_shown();
  const std::size_t engine = fill_engine_row(row, {}, {}, calls);
  EXPECT_EQ(distinct(row.data() + engine - shown.calls, shown.calls), shown.calls);
  const std::size_t pool = fill_pool_row(row, "send", memory);
  EXPECT_EQ(distinct(row.data() + pool - shown.memory, shown.memory), shown.memory);
  EngineStats stats;
  static_assert(std::is_trivially_copyable_v<EngineStats>);
  number_members<std::uint32_t>(stats);
  const std::size_t all = fill_engine_row(row, {}, stats, {});
  const std::size_t own = shown.engine + shown.authentication;
  EXPECT_EQ(distinct(row.data() + all - shown.calls - own, own), own);
  ConnectionSnapshot connection;
  number_members<std::uint32_t>(connection.stats);
  const std::size_t words = fill_connection_row(row, {}, connection);
  EXPECT_EQ(distinct(row.data() + words - shown.connection, shown.connection), shown.connection);
}

TEST(ObserveTables, RowsAreAsLongAsTheirColumns) {
  RowWords row{};
  const auto expect_length = [](Table table, std::size_t words) {
    EXPECT_EQ(table_columns(table).row_bytes, sizeof(RowHeader) + words * 8)
        << table_columns(table).name;
  };
  expect_length(Table::engine, fill_engine_row(row, {}, {}, {}));
  expect_length(Table::pool, fill_pool_row(row, "send", {}));
  expect_length(Table::connection, fill_connection_row(row, {}, {}));
  expect_length(Table::session, fill_session_row(row, {}, {}));
  expect_length(Table::served_session, fill_served_session_row(row, {}, {}));
}

TEST(ObserveTables, LongTextsAreCut) {
  RowWords row{};
  row.fill(~std::uint64_t{0});
  const std::string peer(500, 'p');
  const std::size_t words = fill_connection_row(row, {"1-1", peer, "key"}, {});
  EXPECT_LE(words, kRowWordsMax);
  const std::string_view bytes(reinterpret_cast<const char*>(row.data()), words * 8);
  EXPECT_EQ(bytes.find("key"), 24u + 72u);
  EXPECT_EQ(bytes.substr(24, 72), std::string(72, 'p'));
}

TEST(ObserveTables, NamesFollowTheRules) {
  std::set<std::string> names;
  std::size_t count = 0;
  for (const Metric& metric : metrics()) {
    ++count;
    const std::string name(metric.name);
    EXPECT_TRUE(names.insert(std::string(metric.table) + ' ' + name).second) << name;
    EXPECT_EQ(name.find_first_not_of("abcdefghijklmnopqrstuvwxyz_0123456789"), std::string::npos)
        << name;
    EXPECT_LT(name.size(), 72u) << name;
    EXPECT_FALSE(metric.help.empty()) << name;
    EXPECT_LT(metric.help.size(), 160u) << name;
    EXPECT_EQ(metric.help.find_first_of("\\\n"), std::string_view::npos) << name;
    EXPECT_EQ(name.starts_with("spinwire_"), metric.kind != MetricKind::label) << name;
    EXPECT_EQ(name.ends_with("_total"), metric.kind == MetricKind::counter) << name;
    EXPECT_TRUE(metric.unit.empty() || name.find(metric.unit) != std::string::npos) << name;
  }
  EXPECT_GT(count, 100u);
}

TEST(ObserveTables, TimesBelowZeroAreZero) {
  EXPECT_EQ(number_of(Nanoseconds(-5)), 0u);
  EXPECT_EQ(number_of(Nanoseconds(5)), 5u);
  EXPECT_EQ(number_of(true), 1u);
}

}  // namespace
}  // namespace observe_test
