// The tests that the threat model and the table of features name exist. Examples say how to copy
// them. A page has the figures of the record that it is about.
#include <fnmatch.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "tools/programs.h"

namespace tools_test {
namespace {

/// The texts between backquotes in all columns but the first of the tables.
std::vector<std::string> quoted_in_tables(const std::string& markdown) {
  std::vector<std::string> found;
  std::istringstream text(markdown);
  for (std::string line; std::getline(text, line);) {
    if (line.empty() || line[0] != '|') continue;
    line.erase(0, line.find('|', 1));  // what is guaranteed
    for (std::size_t at = line.find('`'); at != std::string::npos; at = line.find('`', at)) {
      const std::size_t end = line.find('`', at + 1);
      found.push_back(line.substr(at + 1, end - at - 1));
      at = end + 1;
    }
  }
  return found;
}

/// The texts between backquotes in the last column of a row.
std::vector<std::string> quoted_in_last_column(std::string row) {
  while (!row.empty() && (row.back() == '|' || row.back() == ' ')) row.pop_back();
  return quoted_in_tables("|" + row.substr(row.rfind('|')));
}

/// "Suite.Test" of each test that this program or the scripts for Soft-RoCE define.
std::vector<std::string> names_of_tests() {
  std::vector<std::string> names;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *all.GetTestSuite(i);
    for (int k = 0; k < suite.total_test_count(); ++k)
      names.push_back(std::string(suite.name()) + "." + suite.GetTestInfo(k)->name());
  }
  for (const char* script : {"test/softroce/suites.sh", "test/softroce/engine_tests.sh"}) {
    std::istringstream text(read_file(script));
    for (std::string line; std::getline(text, line);)
      if (line.ends_with("() {")) names.push_back("Softroce." + line.substr(0, line.size() - 4));
  }
  return names;
}

/// Whether a name is the pattern, a test of that suite, or fits its "*". Suites with parameters
/// have a prefix, "By/Suite.Test/0".
bool fits(const std::string& pattern, const std::string& name) {
  const std::string whole = pattern.find('.') == std::string::npos ? pattern + ".*" : pattern;
  return fnmatch(whole.c_str(), name.c_str(), 0) == 0 ||
         fnmatch(("*/" + whole).c_str(), name.c_str(), 0) == 0 ||
         fnmatch(("*/" + whole + "/*").c_str(), name.c_str(), 0) == 0;
}

bool exists(const std::string& pattern, const std::vector<std::string>& names) {
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return fits(pattern, name); });
}

/// Whether this is the whole name of a test, or "Suite.*" of a suite with tests. A suite alone, or
/// a part of a name, does not say which test shows the feature.
bool names_tests(const std::string& pattern, const std::vector<std::string>& names) {
  const std::size_t dot = pattern.find('.');
  const std::size_t star = pattern.find_first_of("*?[");
  const bool is_whole =
      dot != std::string::npos &&
      (star == std::string::npos || (star == dot + 1 && star + 1 == pattern.size()));
  return is_whole && exists(pattern, names);
}

TEST(Documents, AFeatureNamesWholeTestsOrAWholeSuite) {
  const std::vector<std::string> names{"Waiting.IsLong", "By/Scenario1.Runs/0"};
  for (const char* good : {"Waiting.IsLong", "Waiting.*", "Scenario1.Runs", "Scenario1.*"})
    EXPECT_TRUE(names_tests(good, names)) << good;
  for (const char* bad : {"Waiting", "Waiting.Is", "Waiting.Is*", "Wait*.*", "Wait*", "Scenario1",
                          "Other.*", "Waiting.?sLong", "*"})
    EXPECT_FALSE(names_tests(bad, names)) << bad;
}

TEST(Documents, EachFeatureNamesATestThatExists) {
  const std::string document = read_file("include/features.md");
  const std::size_t end = document.find("## Refused");
  ASSERT_NE(end, std::string::npos) << "run this in the source tree";
  const std::vector<std::string> names = names_of_tests();
  std::istringstream text(document.substr(0, end));
  int features = 0;
  for (std::string row; std::getline(text, row);) {
    if (row.empty() || row[0] != '|' || row.starts_with("| feature") || row.starts_with("|--"))
      continue;
    const std::vector<std::string> tests = quoted_in_last_column(row);
    EXPECT_FALSE(tests.empty()) << row;
    for (const std::string& pattern : tests) EXPECT_TRUE(names_tests(pattern, names)) << pattern;
    ++features;
  }
  EXPECT_GT(features, 50);
}

/// "a" and "b" of "the fuzzers `a` and `b`" in any column of a table but the first.
std::vector<std::string> fuzzers_in_tables(const std::string& markdown) {
  std::vector<std::string> found;
  std::istringstream text(markdown);
  const std::regex list("the fuzzers? (`[a-z_]+`((, | and )`[a-z_]+`)*)");
  const std::regex name("`([a-z_]+)`");
  const std::sregex_iterator none;
  for (std::string line; std::getline(text, line);) {
    if (line.empty() || line[0] != '|') continue;
    line.erase(0, line.find('|', 1));
    for (std::sregex_iterator each(line.begin(), line.end(), list); each != none; ++each) {
      const std::string those = (*each)[1];
      for (std::sregex_iterator one(those.begin(), those.end(), name); one != none; ++one)
        found.push_back((*one)[1]);
    }
  }
  return found;
}

TEST(Documents, FuzzersAreFoundInTables) {
  EXPECT_EQ(
      fuzzers_in_tables("| of the fuzzer `no` | `A.B`, the fuzzer `a`; the fuzzers `b`, `c_d` "
                        "and `e`; `key` |\nthe fuzzer `no`\n"),
      (std::vector<std::string>{"a", "b", "c_d", "e"}));
}

TEST(Documents, TheThreatModelNamesTestsThatExist) {
  std::string document = read_file("src/control/README.md");
  const std::size_t begin = document.find("## Threat model");
  ASSERT_NE(begin, std::string::npos) << "run this in the source tree";
  document.erase(0, begin);
  const std::vector<std::string> names = names_of_tests();
  int patterns = 0;
  for (std::string pattern : quoted_in_tables(document)) {
    const bool is_name =
        std::isupper(static_cast<unsigned char>(pattern[0])) != 0 || pattern.starts_with("*/");
    if (!is_name) continue;  // a key, a function
    if (const auto dots = pattern.find("…"); dots != std::string::npos)
      pattern.replace(dots, std::string("…").size(), "*");
    EXPECT_TRUE(exists(pattern, names)) << pattern;
    ++patterns;
  }
  EXPECT_GE(patterns, 204) << "rows have lost names; raise the number where rows gain some";
  const std::vector<std::string> fuzzers = fuzzers_in_tables(document);
  for (const std::string& each : fuzzers)
    EXPECT_TRUE(std::filesystem::exists("test/fuzz/" + each + "_fuzz.cc")) << each;
  EXPECT_GE(fuzzers.size(), 13u);
}

TEST(Documents, WhatAnAttachedReaderCostsIsWhatWasRecorded) {
  const std::string record = read_file("bench/attached.txt");
  const std::string page = read_file("include/observing.md");
  std::smatch ratio;
  ASSERT_TRUE(std::regex_search(
      record, ratio, std::regex("ratio ([0-9.]+), with 95% confidence ([0-9.]+) to ([0-9.]+)")))
      << "run this in the source tree";
  EXPECT_NE(page.find("ran at " + ratio[1].str() + " of the rate"), std::string::npos) << ratio[1];
  // Lines of the page may end between the words.
  EXPECT_TRUE(std::regex_search(
      page, std::regex("between\\s" + ratio[2].str() + "\\sand\\s" + ratio[3].str() + "[,.]")))
      << ratio[0];
  EXPECT_NE(record.find("screens): +0\n"), std::string::npos)
      << "the page says that a reader adds no instruction";
}

/// The comments before the first include of the source whose head has the command to build it.
std::string head_of_example(const std::filesystem::path& folder) {
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    const std::string text = read_file(file.path());
    const std::string head = text.substr(0, text.find("\n#include"));
    if (head.find("//   g++ ") != std::string::npos) return head;
  }
  return "";
}

/// cp -r copies relative links, which lead nowhere in another folder.
TEST(Documents, AnExampleWithLinksSaysHowToCopyIt) {
  namespace fs = std::filesystem;
  int linked = 0;
  for (const auto& folder : fs::directory_iterator("tools/examples")) {
    if (!folder.is_directory()) continue;
    const std::string head = head_of_example(folder.path());
    EXPECT_NE(head, "") << folder.path() << " has no command in a head";
    const bool has_links = std::any_of(fs::directory_iterator(folder), fs::directory_iterator(),
                                       [](const auto& file) { return file.is_symlink(); });
    if (!has_links) continue;
    EXPECT_NE(head.find("`cp -rL`"), std::string::npos) << folder.path();
    ++linked;
  }
  EXPECT_GE(linked, 8) << "run this in the source tree";
}

}  // namespace
}  // namespace tools_test
