// spinwire-stat --prometheus of files that are small and claim a huge answer.
#include <fcntl.h>
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>

#include "observe/engine_folder.h"
#include "observe/engine_paths.h"
#include "observe/page_layout.h"
#include "tools/programs.h"
#include "tools/stat_client.h"

namespace stat_test {
namespace {

using observe_test::EngineFolder;
using namespace spinwire::observe;  // NOLINT: the layout of files

struct Claim {
  std::uint32_t rows;
  std::uint32_t labels;
  std::uint32_t label_bytes;
  std::uint32_t counters;
  bool is_torn = false;  ///< as if all rows were being written
};

template <typename T>
void append(std::string& file, const T& part) {
  file.append(reinterpret_cast<const char*>(&part), sizeof part);
}

template <std::size_t N>
void set_name(std::array<char, N>& to, const std::string& name) {
  std::copy(name.begin(), name.end(), to.begin());
}

/// A file with one table of such rows.
std::string file_of(const Claim& claim) {
  TableDescriptor table;
  set_name(table.name, "table");
  table.column_count = claim.labels + claim.counters;
  table.columns_offset = sizeof(FileHeader) + sizeof table;
  table.rows_offset = table.columns_offset + table.column_count * sizeof(ColumnDescriptor);
  table.row_bytes = static_cast<std::uint32_t>(sizeof(RowHeader)) +
                    claim.labels * claim.label_bytes + claim.counters * 8;
  table.row_count = claim.rows;
  FileHeader header;
  header.file_bytes = table.rows_offset + std::uint64_t{table.row_bytes} * table.row_count;
  header.table_count = 1;
  header.table_bytes = sizeof table;
  header.column_bytes = sizeof(ColumnDescriptor);
  header.tables_offset = sizeof header;
  std::string file;
  append(file, header);
  append(file, table);
  std::uint32_t at = sizeof(RowHeader);
  for (std::uint32_t i = 0; i < table.column_count; ++i) {
    const bool is_label = i < claim.labels;
    ColumnDescriptor column;
    set_name(column.name, fmt::format("{}_{}", is_label ? "label" : "counter", i));
    column.kind = static_cast<std::uint32_t>(is_label ? spinwire::MetricKind::label
                                                      : spinwire::MetricKind::counter);
    column.offset = at;
    column.bytes = is_label ? claim.label_bytes : 8;
    at += column.bytes;
    append(file, column);
  }
  for (std::uint32_t i = 0; i < claim.rows; ++i) {
    append(file, RowHeader{claim.is_torn ? 3u : 2u, 1});
    file.append(claim.labels * claim.label_bytes, 'x');
    file.append(claim.counters * std::size_t{8}, '\1');
  }
  return file;
}

/// A file of such a table, of an engine that counts as alive.
class HostileFile {
 public:
  HostileFile(const EngineFolder& folder, std::uint32_t pid, const Claim& claim)
      : path_(folder.path() + '/' + file_name(::geteuid(), pid, 0)) {
    std::ofstream(path_, std::ios::binary) << file_of(claim);
    locked_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    EXPECT_EQ(::flock(locked_, LOCK_EX), 0);
  }
  HostileFile(const HostileFile&) = delete;
  HostileFile& operator=(const HostileFile&) = delete;
  ~HostileFile() { ::close(locked_); }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
  int locked_ = -1;
};

tools_test::Outcome read_all(const EngineFolder& folder) {
  tools_test::Outcome o =
      tools_test::run("spinwire-stat", {"--prometheus", "--directory", folder.path()});
  EXPECT_EQ(o.code, 0) << o.err.substr(0, 500);
  return o;
}

class ToolsStatHostile : public observe_test::WithEngineFolder {};

TEST_F(ToolsStatHostile, EnginesWithTooLargeAnAnswerAreLeftOut) {
  // Rows with far too many labels; rows whose samples would take about a gigabyte.
  for (const Claim& claim : {Claim{2, 100, 248, 100}, Claim{1200, 31, 256, 120}}) {
    const EngineFolder folder;
    const auto good = observe_test::PageFile::create(observe_test::options_in(folder));
    ASSERT_TRUE(good) << good.error().message();
    const HostileFile hostile(folder, 1, claim);
    const auto o = read_all(folder);
    EXPECT_TRUE(has(o.err, hostile.path() + ": left out")) << o.err.substr(0, 500);
    EXPECT_TRUE(has(o.out, "spinwire_up{pid=\"1\"")) << "also of the one that is left out";
    EXPECT_FALSE(has(o.out, "counter_"));
    EXPECT_TRUE(has(o.out, fmt::format("spinwire_up{{pid=\"{}\"", ::getpid())));
  }
}

// The names of a row's metrics do not count once for each of its samples.
TEST_F(ToolsStatHostile, EnginesWithManyMetricsAreShown) {
  const EngineFolder folder;
  const HostileFile file(folder, 1, {1300, 3, 24, 200});
  const auto o = read_all(folder);
  EXPECT_EQ(o.err, "");
  EXPECT_TRUE(has(o.out, "counter_202{pid=\"1\""));
}

// Their rows are being written, so they have no samples, but count as if they had.
TEST_F(ToolsStatHostile, LargeEnginesKeepNoOthersOut) {
  const EngineFolder folder;
  const Claim large{500, 31, 256, 100, true};
  const HostileFile first(folder, 1, large), second(folder, 2, large),
      small(folder, 3, {2, 3, 16, 2});
  const auto o = read_all(folder);
  EXPECT_EQ(o.err, "");
  EXPECT_TRUE(has(o.out, "counter_3{pid=\"3\""));
}

// Such a file is read and shown if its answer is small.
TEST_F(ToolsStatHostile, OthersAreShown) {
  const EngineFolder folder;
  const HostileFile file(folder, 1, {2, 3, 16, 2});
  const auto o = read_all(folder);
  EXPECT_TRUE(has(o.out, "counter_3{pid=\"1\",engine=\"0\"")) << o.out << o.err;
}

}  // namespace
}  // namespace stat_test
