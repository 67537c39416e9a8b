// A folder in memory for the files of engines, and what they say.
#pragma once

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "engine/harness.h"
#include "observe/page_file.h"
#include "spinwire/observe.h"

namespace observe_test {

using namespace spinwire;  // NOLINT: the names of a test namespace
using observe::PageFile;
using observe::PageFileOptions;
using observe::Table;

/// Tests that need a folder in memory. They are skipped where there is none that can be written.
class WithEngineFolder : public testing::Test {
 protected:
  void SetUp() override {
    if (::access("/dev/shm", W_OK | X_OK) != 0) GTEST_SKIP() << "/dev/shm cannot be written";
  }
};

/// Is made in tests of a WithEngineFolder.
class EngineFolder {
 public:
  EngineFolder() {
    std::string pattern = "/dev/shm/spinwire-test-XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp in /dev/shm");
    path_ = pattern;
  }
  EngineFolder(const EngineFolder&) = delete;
  EngineFolder& operator=(const EngineFolder&) = delete;
  ~EngineFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::size_t files() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(path_),
                                                  std::filesystem::directory_iterator()));
  }
  [[nodiscard]] std::vector<EngineFile> engines() const {
    auto listed = list_engines(path_);
    EXPECT_TRUE(listed) << listed.error().message();
    return listed ? *listed : std::vector<EngineFile>{};
  }
  /// The only file.
  [[nodiscard]] Result<EngineReading> read() const {
    const auto all = engines();
    EXPECT_EQ(all.size(), 1u);
    return all.empty() ? Result<EngineReading>(tl::unexpected(Error{})) : read_engine(all[0]);
  }

 private:
  std::string path_;
};

inline PageFileOptions options_in(const EngineFolder& folder, std::uint32_t rows = 4) {
  PageFileOptions options;
  options.directory = folder.path();
  options.device = "a device";
  options.rows = {1, 4, rows, rows, rows};
  return options;
}

/// The bytes of a file.
inline std::vector<std::byte> bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto* const begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

/// A value of a row that must exist.
inline double number(const EngineReading& reading, std::string_view table, std::size_t row,
                     std::string_view column) {
  const MetricTable* const found = reading.find(table);
  if (found == nullptr || row >= found->rows.size() ||
      found->find(column) == found->columns.size()) {
    ADD_FAILURE() << "no " << table << ' ' << row << ' ' << column;
    return -1;
  }
  return found->number(found->rows[row], column);
}
inline std::string text(const EngineReading& reading, std::string_view table, std::size_t row,
                        std::string_view column) {
  const MetricTable* const found = reading.find(table);
  if (found == nullptr || row >= found->rows.size() ||
      found->find(column) == found->columns.size()) {
    ADD_FAILURE() << "no " << table << ' ' << row << ' ' << column;
    return {};
  }
  return std::string(found->text(found->rows[row], column));
}

/// Settings of an engine whose file lies in the folder.
inline spinwire::Config shown_in(const EngineFolder& folder,
                                 spinwire::Config c = engine_test::small_config()) {
  c.observability.directory = folder.path();
  return c;
}

}  // namespace observe_test
