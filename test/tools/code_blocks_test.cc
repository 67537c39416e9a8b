// Every code block of every page: C++ compiles unchanged, whole programs of the guide run and print
// what the guide shows, shell parses, settings load, and what spinwire-doctor plans is what the
// page shows.
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "spinwire/config.h"
#include "tools/markdown.h"
#include "tools/programs.h"

namespace code_blocks_test {
namespace {

using namespace tools_test;  // the names of a test namespace

/// Declares the names that an example in the middle of a text uses.
constexpr const char* kBeforeAll = R"(
#include <spinwire/spinwire.h>
#include <poll.h>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <deque>
using namespace spinwire;
using namespace std::chrono_literals;
int fail(const Error& error);
Endpoint exchange_endpoints(const Endpoint& ours);
)";
/// In a block, so that the example can declare the names again.
constexpr const char* kParameters = R"((
    [[maybe_unused]] Result<Engine>& engine, [[maybe_unused]] Result<Engine>& server,
    [[maybe_unused]] Result<Engine>& client, [[maybe_unused]] Connection connection,
    [[maybe_unused]] Session session, [[maybe_unused]] Buffer& buffer,
    [[maybe_unused]] std::deque<Buffer>& waiting, [[maybe_unused]] std::deque<PendingCall>& pending,
    [[maybe_unused]] std::uint64_t seed, [[maybe_unused]] bool answered) {
{
)";

bool is_program(const CodeBlock& block) {
  return block.text.find("int main(") != std::string::npos;
}

/// Errors name the page and its line.
std::string line_directive(const CodeBlock& block) {
  return "#line " + std::to_string(block.line) + " \"" + block.page + "\"\n";
}

/// The examples as one file, each in a function of its own.
std::string as_source(const std::vector<CodeBlock>& examples) {
  std::string source = kBeforeAll;
  for (std::size_t i = 0; i < examples.size(); ++i) {
    source += "namespace { int example_" + std::to_string(i) + kParameters;
    source += line_directive(examples[i]) + examples[i].text + "}\nreturn 0;\n}\n}\n";
  }
  return source;
}

/// Compiles a file, without output. Answers the exit code; `errors` gets what the compiler says.
int compile(const std::string& source, std::string* errors) {
  const Folder folder;
  std::ofstream(folder / "example.cc") << source;
  Program compiler({"/usr/bin/env", "g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra",
                    "-Werror", "-Wno-unused-variable", "-Wno-unused-but-set-variable",
                    "-Wno-unused-function", "-Iinclude", folder / "example.cc"});
  const int code = compiler.wait();
  *errors = compiler.err();
  return code;
}

/// The C++ blocks of a page that are programs, or that are not.
std::vector<CodeBlock> cpp_blocks(const std::string& page, bool programs) {
  std::vector<CodeBlock> found = read_page(page).blocks;
  std::erase_if(found, [programs](const CodeBlock& block) {
    return block.language != "cpp" || is_program(block) != programs;
  });
  return found;
}

TEST_F(SlowTools, EachExampleOfEachPageCompiles) {
  std::vector<CodeBlock> fragments;  // together, so that the headers are read once
  std::string errors;
  std::size_t programs = 0;
  for (const std::string& page : all_pages()) {
    for (CodeBlock& block : cpp_blocks(page, false)) fragments.push_back(std::move(block));
    for (const CodeBlock& block : cpp_blocks(page, true)) {
      EXPECT_EQ(compile(line_directive(block) + block.text, &errors), 0) << errors;
      ++programs;
    }
  }
  EXPECT_GE(fragments.size(), 25u) << "run this in the source tree";
  EXPECT_EQ(compile(as_source(fragments), &errors), 0) << errors;
  EXPECT_GE(programs, 2u);
}

TEST_F(SlowTools, ABrokenExampleDoesNotCompile) {
  const CodeBlock good{"good.md", 1, "cpp", "if (engine->poll() < 0) return 1;\n"};
  const CodeBlock broken{"broken.md", 7, "cpp", "if (engine->pool() < 0) return 1;\n"};
  const CodeBlock ignored{"ignored.md", 9, "cpp", "connection.send(buffer);\n"};
  std::string errors;
  EXPECT_NE(compile(as_source({good, broken, ignored}), &errors), 0);
  EXPECT_EQ(errors.find("good.md"), std::string::npos) << errors;
  EXPECT_NE(errors.find("broken.md:7"), std::string::npos) << errors;
  EXPECT_NE(errors.find("ignored.md:9"), std::string::npos) << "a Status: " << errors;
}

TEST_F(SlowTools, ReadmeProgramRuns) {
  const std::vector<CodeBlock> programs = cpp_blocks("README.md", true);
  ASSERT_EQ(programs.size(), 1u) << "run this in the source tree";
  const Folder folder;
  std::ofstream(folder / "hello.cc") << programs[0].text;
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

/// The first shell block of a page that begins with these words.
std::string shell_block(const std::string& page, const std::string& beginning) {
  for (const CodeBlock& block : read_page(page).blocks)
    if (block.language == "sh" && block.text.starts_with(beginning)) return block.text;
  return "";
}

/// What the sessions of a page show behind each prompt with this command: one text for each time.
std::vector<std::string> shown_for(const std::string& page, const std::string& command) {
  std::vector<std::string> texts;
  for (const CodeBlock& block : read_page(page).blocks) {
    bool is_shown = false;
    std::istringstream text(block.language == "console" ? block.text : "");
    for (std::string line; std::getline(text, line);) {
      if (line.starts_with("$ ")) {
        is_shown = line == "$ " + command;
        if (is_shown) texts.emplace_back();
      } else if (is_shown) {
        texts.back() += line + '\n';
      }
    }
  }
  return texts;
}

/// The lines of a text in alphabetical order, with the address of the guide in place of `address`.
std::multiset<std::string> lines_of(const std::string& output, const std::string& address) {
  std::multiset<std::string> lines;
  std::istringstream text(output);
  for (std::string line; std::getline(text, line);) {
    const std::size_t at = address.empty() ? std::string::npos : line.find(address);
    if (at != std::string::npos) line.replace(at, address.size(), "127.0.0.1:7000");
    lines.insert(line);
  }
  return lines;
}

TEST_F(SlowTools, TheGuidesFirstProgramRunsAsTheGuideSays) {
  const std::vector<CodeBlock> programs = cpp_blocks("include/README.md", true);
  ASSERT_EQ(programs.size(), 1u) << "run this in the source tree";
  const std::string command = shell_block("include/README.md", "g++ ");
  ASSERT_NE(command, "");
  const Folder folder;
  std::ofstream(folder / "first.cc") << programs[0].text;
  std::filesystem::create_directory(folder / "build");
  const auto link = [&folder](const std::filesystem::path& to, const std::string& name) {
    std::filesystem::create_symlink(std::filesystem::absolute(to), folder / name);
  };
  link("include", "include");
  link(bin() + "/../lib", "build/lib");
  Program compiler({"/bin/sh", "-c", "cd '" + (folder / "") + "' && " + command});
  ASSERT_EQ(compiler.wait(), 0) << compiler.err();

  const std::string guide = "include/README.md";
  const std::vector<std::string> served = shown_for(guide, "./first serve");
  const std::vector<std::string> asked = shown_for(guide, "./first ask");
  ASSERT_EQ(served.size(), 1u);
  ASSERT_EQ(asked.size(), 2u) << "with a server, and without one";
  std::string address;
  {
    Program server({folder / "first", "serve", "127.0.0.1:0"});
    address = server.wait_for("listening on ");
    ASSERT_NE(address, "") << server.err();
    EXPECT_EQ(lines_of(server.out(), address), lines_of(served[0], ""));
    Program client({folder / "first", "ask", address});
    EXPECT_EQ(client.wait(), 0) << client.err();
    EXPECT_EQ(lines_of(client.out(), address), lines_of(asked[0], ""));
  }
  Program alone({folder / "first", "ask", address});  // the server is gone
  EXPECT_EQ(alone.wait(), 1);
  EXPECT_EQ(lines_of(alone.err(), address), lines_of(asked[1], ""));
}

TEST(Documents, EachBlockNamesItsLanguage) {
  const std::set<std::string> known{"cpp", "sh", "toml", "console", "text"};
  for (const std::string& path : all_pages()) {
    const Page page = read_page(path);
    EXPECT_TRUE(page.is_complete) << path << " has a fence too few";
    for (const CodeBlock& block : page.blocks)
      EXPECT_TRUE(known.contains(block.language)) << path << ':' << block.line << ": the language";
  }
}

TEST(Documents, EachShellBlockParses) {
  int blocks = 0;
  for (const std::string& page : all_pages()) {
    for (const CodeBlock& block : read_page(page).blocks) {
      if (block.language != "sh") continue;
      Program shell({"/bin/bash", "-n", "-c", block.text});
      EXPECT_EQ(shell.wait(), 0) << page << ':' << block.line << ": " << shell.err();
      ++blocks;
    }
  }
  EXPECT_GT(blocks, 3);
}

TEST(Documents, EachBlockOfSettingsLoads) {
  for (const std::string& page : all_pages()) {
    for (const CodeBlock& block : read_page(page).blocks) {
      if (block.language != "toml") continue;
      const auto config = spinwire::Config::parse(block.text, page);
      EXPECT_TRUE(config) << config.error().message();
    }
  }
}

/// Runs the planner for each such command of a page, and looks for the lines that the page shows.
int check_plans(const CodeBlock& block) {
  int shown = 0;
  std::string plan;
  std::istringstream text(block.text);
  for (std::string line; std::getline(text, line);) {
    if (line.starts_with("$ spinwire-doctor plan ") && line.find('>') == std::string::npos) {
      Words arguments;
      std::istringstream words(line.substr(std::string("$ spinwire-doctor ").size()));
      for (std::string word; words >> word;) arguments.push_back(word);
      const Outcome outcome = run("spinwire-doctor", arguments);
      EXPECT_EQ(outcome.code, 0) << line << '\n' << outcome.err;
      plan = outcome.out;
    } else if (line.starts_with("$ ")) {
      plan.clear();
    } else if (!plan.empty()) {
      EXPECT_NE(plan.find(line + '\n'), std::string::npos) << block.page << ": " << line << plan;
      ++shown;
    }
  }
  return shown;
}

TEST_F(Tools, DoctorPlansWhatTheGuideShows) {
  int shown = 0;
  for (const std::string& page : pages_for_users())
    for (const CodeBlock& block : read_page(page).blocks) shown += check_plans(block);
  EXPECT_GE(shown, 3) << "run this in the source tree";
}

}  // namespace
}  // namespace code_blocks_test
