// Files that no engine has made: a reader refuses or bounds whatever they say.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <random>

#include "observe/engine_folder.h"
#include "observe/page_layout.h"

namespace observe_test {
namespace {

using observe::ColumnDescriptor;
using observe::FileHeader;
using observe::TableDescriptor;

/// The bytes of a file with a row in each table.
class Page {
 public:
  Page() {
    const EngineFolder folder;
    auto file = PageFile::create(options_in(folder));
    EXPECT_TRUE(file) << file.error().message();
    observe::RowWords row;
    row.fill(0x4141414141414141);
    for (std::size_t i = 0; i < observe::kTables; ++i) {
      const auto table = static_cast<Table>(i);
      const std::size_t bytes = observe::table_columns(table).row_bytes;
      file->write(table, 0, row, (bytes - sizeof(observe::RowHeader)) / 8);
    }
    bytes_ = bytes_of(file->path());
  }
  template <typename T>
  [[nodiscard]] T get(std::size_t at) const {
    T value;
    std::memcpy(&value, bytes_.data() + at, sizeof value);
    return value;
  }
  /// The page with other bytes at a place.
  template <typename T>
  [[nodiscard]] std::vector<std::byte> with(std::size_t at, const T& value) const {
    auto changed = bytes_;
    std::memcpy(changed.data() + at, &value, sizeof value);
    return changed;
  }
  [[nodiscard]] std::size_t table() const { return get<FileHeader>(0).tables_offset; }
  [[nodiscard]] std::size_t column() const { return get<TableDescriptor>(table()).columns_offset; }
  [[nodiscard]] const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

Status status_of(std::span<const std::byte> bytes) {
  const auto reading = decode_engine(bytes);
  return reading ? Status::ok : reading.error().status;
}

class ObserveHostilePage : public WithEngineFolder {};

TEST_F(ObserveHostilePage, NumbersOutOfBoundsAreRefused) {
  const Page page;
  ASSERT_EQ(status_of(page.bytes()), Status::ok);
  constexpr std::uint32_t kMany = ~0u;
  constexpr std::uint64_t kFar = ~std::uint64_t{0};
  const auto refused = [&](std::size_t at, auto value) {
    EXPECT_EQ(status_of(page.with(at, value)), Status::invalid_argument) << at;
  };
  refused(offsetof(FileHeader, magic), std::uint64_t{1});
  for (const std::size_t field :
       {offsetof(FileHeader, table_count), offsetof(FileHeader, table_bytes),
        offsetof(FileHeader, tables_offset)})
    refused(field, kMany);
  refused(offsetof(FileHeader, table_bytes), 8u);
  refused(offsetof(FileHeader, column_bytes), 8u);
  refused(offsetof(FileHeader, column_bytes), kMany);
  const std::size_t table = page.table();
  refused(table + offsetof(TableDescriptor, name), std::uint64_t{0});
  refused(table + offsetof(TableDescriptor, column_count), kMany);
  refused(table + offsetof(TableDescriptor, column_count), 0u);
  refused(table + offsetof(TableDescriptor, columns_offset), kFar);
  refused(table + offsetof(TableDescriptor, rows_offset), kFar);
  refused(table + offsetof(TableDescriptor, rows_offset), kFar - 8);
  refused(table + offsetof(TableDescriptor, row_bytes), 8u);
  refused(table + offsetof(TableDescriptor, row_bytes), kMany);
  refused(table + offsetof(TableDescriptor, row_count), kMany);
  const std::size_t column = page.column();
  refused(column + offsetof(ColumnDescriptor, name), std::uint64_t{0});
  refused(column + offsetof(ColumnDescriptor, kind), kMany);
  refused(column + offsetof(ColumnDescriptor, per_unit), 0u);
  refused(column + offsetof(ColumnDescriptor, offset), kMany);
  refused(column + offsetof(ColumnDescriptor, offset), 0u);
  refused(column + offsetof(ColumnDescriptor, bytes), kMany);
  refused(column + offsetof(ColumnDescriptor, bytes), 0u);
  EXPECT_EQ(status_of(page.with(offsetof(FileHeader, layout_version), 99u)), Status::unsupported);
}

// Each text lies within its row, but all of them would take many times the file's length.
TEST_F(ObserveHostilePage, ColumnsThatOverlapAreRefused) {
  const Page page;
  auto table = page.get<TableDescriptor>(page.table());
  auto column = page.get<ColumnDescriptor>(page.column() + sizeof(ColumnDescriptor));
  column.offset = sizeof(observe::RowHeader);
  column.bytes = 256;
  column.kind = static_cast<std::uint32_t>(MetricKind::label);
  ASSERT_GT(table.row_bytes, sizeof(observe::RowHeader) + column.bytes);
  auto changed = page.bytes();
  for (std::uint32_t i = 0; i < table.column_count; ++i) {
    std::snprintf(column.name.data(), column.name.size(), "label_%u", i);
    std::memcpy(changed.data() + page.column() + i * sizeof column, &column, sizeof column);
  }
  EXPECT_EQ(status_of(changed), Status::invalid_argument);
}

TEST_F(ObserveHostilePage, NamesThatPrometheusReservesAreRefused) {
  const Page page;
  const std::array<char, 9> name{"__name__"};
  EXPECT_EQ(status_of(page.with(page.column() + offsetof(ColumnDescriptor, name), name)),
            Status::invalid_argument);
  EXPECT_EQ(status_of(page.with(page.table() + offsetof(TableDescriptor, name), name)),
            Status::invalid_argument);
}

TEST_F(ObserveHostilePage, EveryLengthIsRead) {
  const Page page;
  for (std::size_t length = 0; length < page.bytes().size(); length += 37)
    EXPECT_EQ(status_of(std::span(page.bytes()).first(length)), Status::invalid_argument) << length;
  EXPECT_EQ(decode_engine(page.bytes(), std::span(page.bytes()).first(64)).error().status,
            Status::invalid_argument);
}

TEST_F(ObserveHostilePage, OverlappingTablesTakeBoundedMemory) {
  const Page page;
  // All tables claim as many rows as fit, each from the same place, and all rows are in use.
  auto changed = page.bytes();
  changed.resize(std::size_t{32} << 20, std::byte{0x41});
  for (std::size_t i = 0; i < observe::kTables; ++i) {
    const std::size_t at = page.table() + i * sizeof(TableDescriptor);
    auto table = page.get<TableDescriptor>(at);
    table.row_count =
        static_cast<std::uint32_t>((changed.size() - table.rows_offset) / table.row_bytes);
    std::memcpy(changed.data() + at, &table, sizeof table);
  }
  EXPECT_EQ(status_of(changed), Status::invalid_argument);
}

TEST_F(ObserveHostilePage, TextsAreBoundedAndPrintable) {
  const Page page;
  auto changed = page.bytes();
  const std::size_t device = offsetof(FileHeader, device);
  for (std::size_t i = 0; i < sizeof(FileHeader::device); ++i)
    changed[device + i] = static_cast<std::byte>(i * 37 + 1);
  const auto reading = decode_engine(changed);
  ASSERT_TRUE(reading);
  EXPECT_EQ(reading->device.size(), sizeof(FileHeader::device));
  for (const char c : reading->device) EXPECT_TRUE(c >= 0x20 && c < 0x7f);
}

TEST_F(ObserveHostilePage, FieldsAndTablesOfLaterReleasesAreSkipped) {
  const Page page;
  // A table of another kind, whatever else it says.
  auto table = page.get<TableDescriptor>(page.table());
  table.kind = 77;
  table.rows_offset = ~std::uint64_t{0};
  const auto reading = decode_engine(page.with(page.table(), table));
  ASSERT_TRUE(reading) << reading.error().message();
  EXPECT_EQ(reading->tables.size(), observe::kTables - 1);
  EXPECT_EQ(reading->find("engine"), nullptr);
}

TEST_F(ObserveHostilePage, LatenciesOfUnknownWorkAreNumbered) {
  const EngineFolder folder;
  PageFileOptions options = options_in(folder);
  options.latencies = 1;
  auto file = PageFile::create(options);
  ASSERT_TRUE(file) << file.error().message();
  observe::LatencyRecord record;
  record.samples = ~std::uint64_t{0};
  record.max_ns = record.sum_ns = ~std::uint64_t{0};
  record.work = 256;  // no byte holds it
  record.stage = ~0u;
  record.buckets.fill(~std::uint64_t{0});
  file->write(0, record);
  const auto reading = decode_engine(bytes_of(file->path()));
  ASSERT_TRUE(reading) << reading.error().message();
  ASSERT_EQ(reading->latencies.size(), 1u);
  const LatencyHistogram& latency = reading->latencies[0];
  EXPECT_EQ(latency.work, "work-256");
  EXPECT_EQ(latency.stage, "stage-4294967295");
  EXPECT_GE(latency.longest.count(), 0);
  EXPECT_EQ(latency.samples, latency.buckets.size() << 48);
  EXPECT_LE(latency.quantile(1), latency.longest);
}

TEST_F(ObserveHostilePage, RandomChangesNeverBreakTheReader) {
  const Page page;
  std::mt19937 random(1);
  const std::size_t described = page.get<TableDescriptor>(page.table()).rows_offset;
  int read = 0;
  for (int i = 0; i < 3000; ++i) {
    auto changed = page.bytes();
    for (int n = 0; n < 4; ++n) {
      const std::size_t limit = n < 2 ? 600 : described;
      changed[random() % limit] = static_cast<std::byte>(random());
    }
    const auto reading = decode_engine(changed);
    if (!reading) continue;
    ++read;
    for (const MetricTable& table : reading->tables) {
      for (const MetricRow& row : table.rows) ASSERT_EQ(row.values.size(), table.columns.size());
    }
  }
  EXPECT_GT(read, 0);
}

}  // namespace
}  // namespace observe_test
