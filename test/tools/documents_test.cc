// The examples in README.md and include/README.md compile as they stand; the first one also runs.
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "tools/programs.h"

namespace tools_test {
namespace {

/// Declares the names that an example in the middle of a text uses. The block lets it declare them
/// again.
constexpr const char* kBefore = R"(
#include <spinwire/spinwire.h>
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
  const std::string command =
      "g++ -std=c++20 -Wall -Wextra -Werror -Iinclude '" + (folder / "hello.cc") + "' -o '" +
      (folder / "hello") + "' '" + bin() +
      "/../lib/libspinwire.a' -libverbs -lrdmacm -lhugetlbfs -lxxhash -lfmt -lpthread && '" +
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

}  // namespace
}  // namespace tools_test
