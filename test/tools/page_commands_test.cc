// The commands that pages show exist, with the options that they have there: programs, scripts of
// the tree, targets and variables of make.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tools/markdown.h"
#include "tools/programs.h"

namespace page_commands_test {
namespace {

using namespace tools_test;  // the names of a test namespace

/// Others' programs, commands of the shell, and the program of the guide.
const std::set<std::string> kForeign{
    "bpftrace", "cmake",           "cp",       "cpupower", "echo",    "export", "first",  "g++",
    "grep",     "ibv_rc_pingpong", "ldconfig", "perf",     "readelf", "scp",    "sysctl", "tee"};

/// The words of each simple command of a shell text. Quotes are taken off, and redirections,
/// comments, assignments before a command and "sudo" are left out.
std::vector<Words> commands_in(const std::string& text) {
  std::vector<Words> commands(1);
  std::string word;
  bool is_word = false;
  bool is_target = false;  // of a redirection
  const auto end_word = [&] {
    if (is_word && !is_target) commands.back().push_back(word);
    if (is_word) is_target = false;
    word.clear();
    is_word = false;
  };
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\\' && i + 1 < text.size()) {
      if (text[++i] != '\n') word += text[i];
    } else if (c == '\'' || c == '"') {
      for (is_word = true; ++i < text.size() && text[i] != c;) {
        if (c == '"' && text[i] == '\\') ++i;
        word += text[i];
      }
    } else if (c == '#' && !is_word) {
      i = std::min(text.find('\n', i), text.size()) - 1;
    } else if (c == '>' || c == '<') {
      end_word();
      is_target = true;
    } else if (c == ' ') {
      end_word();
    } else if (std::string("\n;&|").find(c) != std::string::npos) {
      end_word();
      commands.emplace_back();
    } else {
      word += c;
      is_word = true;
    }
  }
  end_word();
  const std::regex assignment("[A-Za-z_]+=.*");
  for (Words& command : commands)
    while (!command.empty() && (command[0] == "sudo" || std::regex_match(command[0], assignment)))
      command.erase(command.begin());
  std::erase_if(commands, [](const Words& command) { return command.empty(); });
  return commands;
}

/// What a block has typed in: all of a shell block, the lines behind a prompt of a session.
std::string typed_in(const CodeBlock& block) {
  if (block.language == "sh") return block.text;
  std::string typed;
  std::istringstream text(block.text);
  for (std::string line; block.language == "console" && std::getline(text, line);)
    if (line.starts_with("$ ")) typed += line.substr(2) + '\n';
  return typed;
}

class Commands {
 public:
  Commands() {
    std::istringstream text(makefile_);
    const std::regex target("(?:## )?([a-z-]+):.*");
    std::smatch found;
    for (std::string line; std::getline(text, line);)
      if (std::regex_match(line, found, target)) targets_.insert(found[1]);
  }

  /// What is wrong with a command; empty: nothing.
  std::string fault_of(const Words& command, bool is_session) {
    const std::string name = std::filesystem::path(command[0]).filename();
    if (name.find('@') != std::string::npos) return "";  // the template's own
    if (name == "make") return fault_of_make(command);
    if (std::filesystem::exists(bin() + '/' + name) && (is_session || kForeign.count(name) == 0))
      return fault_of_program(name, command);
    if (std::filesystem::is_regular_file(command[0])) return fault_of_script(command);
    return kForeign.count(name) != 0 ? "" : "there is no such command";
  }

 private:
  std::string fault_of_make(const Words& command) const {
    for (std::size_t i = 1; i < command.size(); ++i) {
      const std::string& word = command[i];
      const std::size_t equals = word.find('=');
      if (equals != std::string::npos) {
        const std::regex use("\\$[({]" + word.substr(0, equals) + "[)}]|\\b" +
                             word.substr(0, equals) + " [?:]?=");
        if (!std::regex_search(makefile_, use)) return "Makefile has no " + word;
      } else if (word[0] != '-' && targets_.count(word) == 0 && !word.starts_with("build/")) {
        return "Makefile has no target " + word;
      }
    }
    return "";
  }

  std::string fault_of_program(const std::string& name, const Words& command) {
    Words asked;  // the subcommand
    if (command.size() > 1 && command[1][0] != '-' && options(name, {}).count(command[1]) != 0)
      asked = {command[1]};
    for (std::size_t i = 1; i < command.size(); ++i) {
      std::string word = command[i].substr(0, command[i].find('='));
      if (word[0] != '-') {
        if (name == "softverbs-preload") break;  // the other program's
        continue;
      }
      if (options(name, {}).count(word) + options(name, asked).count(word) == 0)
        return "there is no option " + word;
    }
    return "";
  }

  static std::string fault_of_script(const Words& command) {
    const std::string text = read_file(command[0]);
    for (std::size_t i = 1; i < command.size() && command[i] != "--"; ++i) {
      const std::string word = command[i].substr(0, command[i].find('='));
      if (word[0] == '-' && text.find(word) == std::string::npos)
        return "there is no option " + word;
    }
    return "";
  }

  /// The options and subcommands in the help of a program, or of its subcommand.
  const std::set<std::string>& options(const std::string& name, const Words& subcommand) {
    auto [at, is_new] = options_.try_emplace({name, subcommand});
    if (!is_new) return at->second;
    Words arguments = subcommand;
    arguments.emplace_back("--help");
    std::istringstream help(run(name, arguments).out);
    const std::regex entry("  ((?:-[^ ]+)|(?:[a-z][a-z-]*))( .*)?");
    std::smatch found;
    for (std::string line; std::getline(help, line);) {
      if (!std::regex_match(line, found, entry)) continue;
      std::istringstream names(found[1]);
      for (std::string one; std::getline(names, one, ',');) at->second.insert(one);
    }
    at->second.insert("--help");
    return at->second;
  }

  std::string makefile_ = read_file("Makefile");
  std::set<std::string> targets_;
  std::map<std::pair<std::string, Words>, std::set<std::string>> options_;
};

TEST_F(Tools, EachCommandOfEachPageExists) {
  Commands commands;
  int checked = 0;
  for (const std::string& page : all_pages()) {
    for (const CodeBlock& block : read_page(page).blocks) {
      for (const Words& command : commands_in(typed_in(block))) {
        EXPECT_EQ(commands.fault_of(command, block.language == "console"), "")
            << page << ':' << block.line << ": " << command[0];
        ++checked;
      }
    }
  }
  EXPECT_GT(checked, 60) << "run this in the source tree";
}

/// In a text, `spinwire-stat PID --once` is a command, too.
TEST_F(Tools, EachCommandInTheTextOfAPageExists) {
  Commands commands;
  int checked = 0;
  for (const std::string& page : all_pages()) {
    for (const ProseLine& line : read_page(page).prose) {
      for (const std::string& code : code_in(line.text)) {
        const bool is_ours = code.starts_with("spinwire-") || code.starts_with("make ") ||
                             code.starts_with("tools/") || code.starts_with("softverbs-preload");
        if (!is_ours || code.find(' ') == std::string::npos) continue;
        for (const Words& command : commands_in(code)) {
          EXPECT_EQ(commands.fault_of(command, false), "")
              << page << ':' << line.line << ": " << code;
          ++checked;
        }
      }
    }
  }
  EXPECT_GT(checked, 60) << "run this in the source tree";
}

TEST_F(Tools, AWrongCommandIsFound) {
  Commands commands;
  const auto fault = [&commands](const std::string& line) {
    std::string found;
    for (const Words& command : commands_in(line)) found += commands.fault_of(command, true);
    return found;
  };
  EXPECT_EQ(fault("sudo sysctl -w vm.nr_hugepages=30 # until the next boot"), "");
  EXPECT_EQ(fault("spinwire-doctor plan --connections 100 >engine.toml && make report"), "");
  EXPECT_EQ(fault("spinwire-doctor plan --conections 100"), "there is no option --conections");
  EXPECT_EQ(fault("spinwire-perf lat --interval=1s"), "there is no option --interval");
  EXPECT_EQ(fault("spinwire-pref"), "there is no such command");
  EXPECT_EQ(fault("make reports"), "Makefile has no target reports");
  EXPECT_EQ(fault("make bench BENCH_ARG=1"), "Makefile has no BENCH_ARG=1");
  EXPECT_EQ(fault("tools/install-deps.sh --benches"), "there is no option --benches");
}

}  // namespace
}  // namespace page_commands_test
