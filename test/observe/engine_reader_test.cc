// Reading a file while its engine writes: rows that change between two copies.
#include "observe/engine_reader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <vector>

#include "observe/engine_folder.h"
#include "observe/page_layout.h"

namespace observe_test {
namespace {

/// A file that changes when a reader has copied from it so often.
class ObserveReader : public WithEngineFolder {
 protected:
  void SetUp() override {
    WithEngineFolder::SetUp();
    if (IsSkipped()) return;
    folder_.emplace();
    auto made = PageFile::create(options_in(*folder_));
    ASSERT_TRUE(made) << made.error().message();
    file_ = std::move(*made);
  }
  void write(std::uint32_t place, std::uint64_t value) {
    observe::RowWords row;
    row.fill(value);
    const std::size_t bytes = observe::table_columns(Table::connection).row_bytes;
    file_.write(Table::connection, place, row, (bytes - sizeof(observe::RowHeader)) / 8);
  }
  void clear(std::uint32_t place) { file_.clear(Table::connection, place); }
  /// The values of the connections that a reader sees.
  std::vector<double> read() {
    std::size_t copies = 0;
    const std::size_t size = bytes_of(file_.path()).size();
    const auto reading = observe::read_rows(
        size, [&](std::span<std::byte> bytes, std::uint64_t offset) -> Result<std::size_t> {
          const auto now = bytes_of(file_.path());
          std::copy_n(now.begin() + static_cast<std::ptrdiff_t>(offset), bytes.size(),
                      bytes.begin());
          copied_ += bytes.size();
          if (const auto change = after_.find(++copies); change != after_.end()) change->second();
          return bytes.size();
        });
    EXPECT_TRUE(reading) << reading.error().message();
    std::vector<double> values;
    for (const MetricRow& row : reading->find("connection")->rows) {
      EXPECT_EQ(row.is_consistent, is_consistent_);
      values.push_back(reading->find("connection")->number(row, "spinwire_connection_outstanding"));
    }
    return values;
  }

  std::optional<EngineFolder> folder_;
  PageFile file_;
  std::map<std::size_t, std::function<void()>> after_;  ///< by the number of copies
  std::size_t copied_ = 0;
  bool is_consistent_ = true;
};

using Values = std::vector<double>;

TEST_F(ObserveReader, ARowIsReplacedByALaterOneOfItsPlace) {
  for (std::uint32_t i = 0; i < 3; ++i) write(i, i + 1);
  after_[1] = [&] { write(1, 20); };
  // As many rows as before, at other places.
  after_[2] = [&] {
    clear(0);
    write(3, 40);
  };
  EXPECT_EQ(read(), (Values{1, 20, 3}));
}

TEST_F(ObserveReader, ARowIsReplacedThoughOthersCome) {
  write(2, 3);
  after_[1] = [&] {
    write(2, 30);
    write(0, 10);
  };
  EXPECT_EQ(read(), Values{30});
}

TEST_F(ObserveReader, ARowWhoseSubjectHasGoneIsLeftOut) {
  for (std::uint32_t i = 0; i < 3; ++i) write(i, i + 1);
  after_[1] = [&] { clear(1); };
  EXPECT_EQ(read(), (Values{1, 3}));
}

TEST_F(ObserveReader, ARowThatGoesOnChangingIsReadUntilItRests) {
  write(0, 1);
  // Copies: the file twice, and then the row and its header in turn.
  for (const std::size_t copies : {1u, 3u, 5u, 7u})
    after_[copies] = [this, copies] { write(0, copies); };
  EXPECT_EQ(read(), Values{7});
}

TEST_F(ObserveReader, ARowThatNeverRestsIsMarked) {
  write(0, 1);
  for (std::size_t i = 0; i < 10'000; ++i) after_[i] = [this, i] { write(0, i + 2); };
  is_consistent_ = false;
  EXPECT_EQ(read().size(), 1u);
}

TEST_F(ObserveReader, OnlyRowsThatChangedAreCopiedAgain) {
  for (std::uint32_t i = 0; i < 4; ++i) write(i, i + 1);
  after_[1] = [&] { write(1, 20); };
  EXPECT_EQ(read(), (Values{1, 20, 3, 4}));
  EXPECT_EQ(copied_, 2 * bytes_of(file_.path()).size() +
                         observe::table_columns(Table::connection).row_bytes +
                         sizeof(observe::RowHeader));
}

/// A file of so many tables, all of the same place: one row that is being written and as long as
/// nearly the whole file.
std::vector<std::byte> with_one_long_row(std::uint32_t tables, std::size_t size) {
  std::vector<std::byte> file(size);
  std::size_t at = 0;
  const auto append = [&](const auto& part) {
    std::memcpy(file.data() + at, &part, sizeof part);
    at += sizeof part;
  };
  constexpr std::array<char, 6> kName = {"table"};
  observe::ColumnDescriptor column;
  std::copy(kName.begin(), kName.end(), column.name.begin());
  column.offset = sizeof(observe::RowHeader);
  column.bytes = 8;
  observe::FileHeader header;
  header.file_bytes = size;
  header.table_count = tables;
  header.table_bytes = sizeof(observe::TableDescriptor);
  header.column_bytes = sizeof column;
  header.tables_offset = sizeof header;
  append(header);
  observe::TableDescriptor table;
  std::copy(kName.begin(), kName.end(), table.name.begin());
  table.column_count = 1;
  table.columns_offset = sizeof header + tables * sizeof table;
  table.rows_offset = table.columns_offset + sizeof column;
  table.row_bytes = static_cast<std::uint32_t>((size - table.rows_offset) & ~std::size_t{7});
  table.row_count = 1;
  for (std::uint32_t i = 0; i < tables; ++i) append(table);
  append(column);
  append(observe::RowHeader{1, 1});
  return file;
}

TEST_F(ObserveReader, LongRowsOfManyTablesAreCopiedWithinABound) {
  constexpr std::size_t kSize = std::size_t{1} << 20;
  constexpr std::uint32_t kTables = 64;
  const auto file = with_one_long_row(kTables, kSize);
  std::size_t copied = 0;
  const auto reading = observe::read_rows(
      kSize, [&](std::span<std::byte> bytes, std::uint64_t offset) -> Result<std::size_t> {
        copied += bytes.size();
        std::memcpy(bytes.data(), file.data() + offset, bytes.size());
        return bytes.size();
      });
  ASSERT_TRUE(reading) << reading.error().message();
  ASSERT_EQ(reading->tables.size(), kTables);
  EXPECT_FALSE(reading->tables.back().rows.at(0).is_consistent);
  EXPECT_GT(copied, 2 * kSize) << "the row is read again";
  EXPECT_LE(copied, 2 * kSize + (std::size_t{64} << 20));
}

}  // namespace
}  // namespace observe_test
