// One call of spinwire-stat names the cause of trouble in its first screen. The table in
// include/troubleshooting.md says which line shows it.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "observe/engine_folder.h"
#include "tools/programs.h"
#include "tools/situations.h"

namespace situations {
namespace {

/// A row of the table.
struct Row {
  std::string situation;
  std::string command;
  std::string line;
};

/// The text between backquotes; without them, the trimmed text.
std::string plain(const std::string& cell) {
  const std::size_t first = cell.find_first_not_of(" `"), last = cell.find_last_not_of(" `");
  return first == std::string::npos ? "" : cell.substr(first, last + 1 - first);
}

std::vector<Row> read_table() {
  const std::string page = tools_test::read_file("include/troubleshooting.md");
  std::istringstream text(page);
  std::vector<Row> rows;
  for (std::string line; std::getline(text, line);) {
    if (line.find("| `! ") == std::string::npos) continue;
    std::istringstream cells(line.substr(1));
    Row row;
    std::getline(cells, row.situation, '|');
    std::getline(cells, row.command, '|');
    std::getline(cells, row.line, '|');
    rows.push_back({plain(row.situation), plain(row.command), plain(row.line)});
  }
  EXPECT_FALSE(rows.empty()) << "run this in the source tree";
  return rows;
}

/// A line of the table as a pattern: words in capitals stand for what differs.
std::regex pattern_of(const std::string& line) {
  std::string pattern;
  std::istringstream words(line);
  for (std::string word; words >> word;) {
    const std::string end = word.ends_with(',') ? "," : "";
    const std::string name = word.substr(0, word.size() - end.size());
    const std::string meant = name == "TIME" ? "([0-9]+ times, )?[0-9.]+ (us|ms|s|min|h|days)"
                              : name == "N"  ? "[0-9]+"
                              : name == "ID" ? "[0-9]+-[0-9]+"
                              : name == "PEER"
                                  ? "([0-9.]+:[0-9]+|\\[[0-9a-f:]+\\] queue pair 0x[0-9a-f]+)"
                                    "( and [0-9]+ others?)?"
                                  : std::regex_replace(name, std::regex("[.()?*+]"), "\\$&");
    pattern += (pattern.empty() ? "" : " ") + meant + end;
  }
  return std::regex(pattern);
}

/// Whether a terminal of 80 columns and 24 lines shows the line, which may be broken.
bool is_in_first_screen(const std::string& text, const std::regex& expected) {
  std::istringstream in(text);
  std::string found;
  int count = 0;
  for (std::string line; count < 24 && std::getline(in, line); ++count) {
    line.resize(std::min<std::size_t>(line.size(), 80));
    found = line.starts_with("    ") ? found + line.substr(3) : line;
    if (std::regex_match(found, expected)) return true;
  }
  return false;
}

/// Runs a command of the table on a process.
tools_test::Outcome run_command(const std::string& command, pid_t pid, const std::string& folder) {
  std::istringstream in(command);
  std::string program;
  in >> program;
  tools_test::Words words{"--directory", folder};
  for (std::string word; in >> word;) words.push_back(word == "PID" ? std::to_string(pid) : word);
  return tools_test::run(program, words);
}

TEST_P(ToolsStatSituations, AreNamedInTheFirstScreen) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "faults are injected";
  Row row;
  for (const Row& each : read_table()) {
    if (each.situation == GetParam().name) row = each;
  }
  ASSERT_FALSE(row.line.empty()) << "the table has no such situation";
  const std::regex expected = pattern_of(row.line);
  const observe_test::EngineFolder folder;
  const Child child([&](int, int) {
    GetParam().stage(Scene(folder.path()));
    return 1;  // a step has failed
  });
  tools_test::Outcome shown{};
  const auto is_named = [&] {
    shown = run_command(row.command, child.pid(), folder.path());
    return is_in_first_screen(shown.out, expected);
  };
  EXPECT_TRUE(until({}, is_named)) << "not found: " << row.line << '\n' << shown.out << shown.err;
}

TEST(ToolsStatTable, HasASituationForEachRow) {
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  std::string names;
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *all.GetTestSuite(i);
    if (!std::string_view(suite.name()).ends_with("/ToolsStatSituations")) continue;
    for (int k = 0; k < suite.total_test_count(); ++k)
      names += suite.GetTestInfo(k)->name() + std::string("\n");
  }
  const std::vector<Row> rows = read_table();
  for (const Row& row : rows)
    EXPECT_NE(names.find("/" + name_of_test(row.situation) + "\n"), std::string::npos)
        << row.situation << " is not staged";
  EXPECT_GE(rows.size(), 20u);
}

}  // namespace
}  // namespace situations
