// The examples in README.md and include/README.md compile unchanged, and the first one also runs.
// The tests that the threat model and the table of features name exist.
#include <fnmatch.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tools/programs.h"

namespace tools_test {
namespace {

/// Declares the names that an example in the middle of a text uses. In a block, so that it can
/// declare them again.
constexpr const char* kBefore = R"(
#include <spinwire/spinwire.h>
#include <poll.h>
#include <cerrno>
#include <cstdio>
#include <deque>
using namespace spinwire;
using namespace std::chrono_literals;
int fail(const Error& error);
int example(Result<Engine>& engine, Result<Engine>& server, Result<Engine>& client,
            Connection connection, Buffer& buffer, std::deque<Buffer>& waiting,
            std::deque<PendingCall>& pending, std::uint64_t seed, bool answered);
int example([[maybe_unused]] Result<Engine>& engine, [[maybe_unused]] Result<Engine>& server,
            [[maybe_unused]] Result<Engine>& client, [[maybe_unused]] Connection connection,
            [[maybe_unused]] Buffer& buffer, [[maybe_unused]] std::deque<Buffer>& waiting,
            [[maybe_unused]] std::deque<PendingCall>& pending,
            [[maybe_unused]] std::uint64_t seed, [[maybe_unused]] bool answered) {
{
)";
constexpr const char* kAfter = "\n}\nreturn 0;\n}\n";

std::vector<std::string> examples_of(const std::string& document) {
  const std::string text = read_file(document);
  const std::string open = "```cpp\n";
  std::vector<std::string> found;
  for (std::size_t at = text.find(open); at != std::string::npos; at = text.find(open, at)) {
    at += open.size();
    found.push_back(text.substr(at, text.find("```\n", at) - at));
  }
  return found;
}

bool is_program(const std::string& example) {
  return example.find("int main()") != std::string::npos;
}

TEST_F(SlowTools, ReadmeProgramCompilesAndRuns) {
  const std::vector<std::string> examples = examples_of("README.md");
  ASSERT_FALSE(examples.empty()) << "run this in the source tree";
  ASSERT_TRUE(is_program(examples[0]));
  const Folder folder;
  std::ofstream(folder / "hello.cc") << examples[0];
  const std::string command = "g++ -std=c++20 -Wall -Wextra -Werror -Iinclude '" +
                              (folder / "hello.cc") + "' -o '" + (folder / "hello") + "' '" +
                              bin() +
                              "/../lib/libspinwire.a' -libverbs -lrdmacm -lhugetlbfs -lsodium "
                              "-lxxhash -lfmt -lpthread && '" +
                              (folder / "hello") + "'";
  Program shell({"/bin/sh", "-c", command});
  EXPECT_EQ(shell.wait(), 0) << shell.err();
  EXPECT_EQ(shell.out(), "hello\n");
}

TEST_F(SlowTools, ReadmeExamplesCompileAsTheyStand) {
  for (const char* document : {"README.md", "include/README.md"}) {
    const std::vector<std::string> examples = examples_of(document);
    EXPECT_GE(examples.size(), 4u) << document;
    for (const std::string& example : examples) {
      const Folder folder;
      std::ofstream file(folder / "example.cc");
      is_program(example) ? file << example : file << kBefore << example << kAfter;
      file.close();
      Program compiler({"/usr/bin/env", "g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra",
                        "-Werror", "-Wno-unused-variable", "-Wno-unused-but-set-variable",
                        "-Iinclude", folder / "example.cc"});
      EXPECT_EQ(compiler.wait(), 0) << document << ":\n" << example << compiler.err();
    }
  }
}

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
    for (const std::string& pattern : tests) EXPECT_TRUE(exists(pattern, names)) << pattern;
    ++features;
  }
  EXPECT_GT(features, 50);
}

TEST(Documents, TheThreatModelNamesTestsThatExist) {
  const std::string document = read_file("src/control/README.md");
  const std::size_t begin = document.find("## Threat model");
  ASSERT_NE(begin, std::string::npos) << "run this in the source tree";
  const std::vector<std::string> names = names_of_tests();
  int patterns = 0;
  for (std::string pattern : quoted_in_tables(document.substr(begin))) {
    if (std::isupper(static_cast<unsigned char>(pattern[0])) == 0) continue;  // a key, a function
    if (const auto dots = pattern.find("…"); dots != std::string::npos)
      pattern.replace(dots, std::string("…").size(), "*");
    EXPECT_TRUE(exists(pattern, names)) << pattern;
    ++patterns;
  }
  EXPECT_GT(patterns, 30);
}

}  // namespace
}  // namespace tools_test
