// What the pages name exists: types, functions and settings of the guide, its links, and the
// figures of README.md.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tools/markdown.h"
#include "tools/programs.h"

namespace guide_names_test {
namespace {

using namespace tools_test;  // the names of a test namespace

/// The code of all public headers, without comments.
std::string headers() {
  std::string code;
  for (const auto& entry : std::filesystem::directory_iterator("include/spinwire")) {
    std::istringstream text(read_file(entry.path()));
    for (std::string line; std::getline(text, line);)
      code += line.substr(0, line.find("//")) + '\n';
  }
  return code;
}

/// What stands between the braces of each definition of a type; empty if there is none.
std::string body_of(const std::string& type, const std::string& code) {
  const std::regex head("\\s*(class|struct|enum class)( \\[\\[nodiscard\\]\\])?( SPINWIRE_API)? ");
  std::string bodies;
  for (std::size_t at = code.find(type); at != std::string::npos; at = code.find(type, at + 1)) {
    const std::size_t line = code.rfind('\n', at) + 1;
    const std::size_t name_end = at + type.size();
    const std::size_t brace = code.find_first_of(";{()", name_end);
    if (!std::regex_match(code.substr(line, at - line), head) || code[brace] != '{' ||
        std::isalnum(static_cast<unsigned char>(code[name_end])) != 0)
      continue;
    std::size_t end = brace + 1;
    for (int depth = 1; depth > 0 && end < code.size(); ++end)
      depth += code[end] == '{' ? 1 : code[end] == '}' ? -1 : 0;
    bodies += code.substr(brace, end - brace) + '\n';
  }
  return bodies;
}

std::set<std::string> words_of(const std::string& text) {
  std::set<std::string> words;
  const std::regex word("[A-Za-z_][A-Za-z0-9_]*");
  for (auto at = std::sregex_iterator(text.begin(), text.end(), word); at != std::sregex_iterator();
       ++at)
    words.insert(at->str());
  return words;
}

/// "section.key" of each setting.
std::set<std::string> settings() {
  std::set<std::string> names;
  std::string section;
  std::istringstream text(read_file("conf/default.toml"));
  for (std::string line; std::getline(text, line);) {
    if (line.starts_with('[')) section = line.substr(1, line.find(']') - 1);
    const std::size_t equals = line.find(" = ");
    if (!line.starts_with('#') && equals != std::string::npos)
      names.insert(section + '.' + line.substr(0, equals));
  }
  return names;
}

class Names {
 public:
  /// Whether the type has a member of that name.
  bool has(const std::string& type, const std::string& member) {
    auto [at, is_new] = members_.try_emplace(type);
    if (is_new) at->second = words_of(body_of(type, code_));
    return at->second.contains(member);
  }
  [[nodiscard]] bool has_word(const std::string& word) const { return words_.contains(word); }
  [[nodiscard]] bool has_setting(const std::string& name) const { return settings_.contains(name); }
  [[nodiscard]] bool has_section(const std::string& name) const {
    const auto at = settings_.lower_bound(name + '.');
    return at != settings_.end() && at->starts_with(name + '.');
  }

 private:
  std::string code_ = headers();
  std::set<std::string> words_ = words_of(code_);
  std::set<std::string> settings_ = settings();
  std::map<std::string, std::set<std::string>> members_;
};

/// Others' names stand in the first column of the tables of moving.md.
std::string without_others(const ProseLine& line) {
  if (line.page != "include/moving.md" || !line.text.starts_with('|')) return line.text;
  return line.text.substr(line.text.find('|', 1));
}

/// Each "Type::member" of a code text; a nested name is checked level by level.
void check_members(Names& names, const std::string& code, const std::string& where) {
  const std::regex scoped("\\b([A-Z][A-Za-z0-9]*)::(~?[A-Za-z_][A-Za-z0-9_]*)");
  for (auto at = std::sregex_iterator(code.begin(), code.end(), scoped);
       at != std::sregex_iterator(); ++at) {
    if ((*at)[1] == "Spinwire") continue;  // a CMake target
    const std::string member = (*at)[2].str();
    EXPECT_TRUE(names.has((*at)[1], member.starts_with('~') ? member.substr(1) : member))
        << where << ": " << at->str() << " does not exist";
  }
}

/// Each "section.key" of a code text.
void check_settings(const Names& names, const std::string& code, const std::string& where) {
  const std::regex setting("(^|[ \"])([a-z_]+)\\.([a-z_]+)(?![a-z_(*])");
  for (auto at = std::sregex_iterator(code.begin(), code.end(), setting);
       at != std::sregex_iterator(); ++at) {
    if (!names.has_section((*at)[2]) || (*at)[3] == "h") continue;  // a header
    EXPECT_TRUE(names.has_setting((*at)[2].str() + '.' + (*at)[3].str()))
        << where << ": no such setting: " << at->str();
  }
}

TEST(Documents, TheGuideNamesWhatExists) {
  Names names;
  ASSERT_TRUE(names.has_section("rpc")) << "run this in the source tree";
  const std::regex call("([a-z_]+)\\((?![1-8]\\)).*\\)");  // not a manual page
  int checked = 0;
  for (const std::string& page : pages_for_users()) {
    for (const ProseLine& line : read_page(page).prose) {
      const std::string where = line.page + ':' + std::to_string(line.line);
      for (const std::string& code : code_in(without_others(line))) {
        if (code.find("::") != std::string::npos) check_members(names, code, where);
        if (code.find('.') != std::string::npos) check_settings(names, code, where);
        std::smatch function;
        if (code.find('(') != std::string::npos && std::regex_match(code, function, call)) {
          EXPECT_TRUE(names.has_word(function[1])) << where << ": no such function: " << code;
        }
        ++checked;
      }
    }
  }
  EXPECT_GT(checked, 500);
}

TEST(Documents, AWrongNameIsFound) {
  Names names;
  EXPECT_TRUE(names.has("Engine", "poll"));
  EXPECT_FALSE(names.has("Engine", "pole"));
  EXPECT_FALSE(names.has("Engine", "max_message")) << "a member of another type";
  EXPECT_TRUE(names.has("Status", "peer_lost"));
  EXPECT_FALSE(names.has("Motor", "poll"));
  EXPECT_TRUE(names.has_setting("rpc.window"));
  EXPECT_FALSE(names.has_setting("rpc.windows"));
}

/// The last cell of a row.
std::string last_cell(std::string row) {
  while (!row.empty() && (row.back() == '|' || row.back() == ' ')) row.pop_back();
  return row.substr(row.rfind(" | ") + 1);
}

TEST(Documents, TheTablesForMoversNameWhatExists) {
  const Names names;
  std::set<std::string> others = words_of(read_file("conf/default.toml"));
  others.insert("std");
  int rows = 0;
  for (const ProseLine& line : read_page("include/moving.md").prose) {
    if (!line.text.starts_with("| ") || line.text.starts_with("| theirs")) continue;
    for (const std::string& code : code_in(last_cell(line.text))) {
      if (std::filesystem::exists(bin() + '/' + code)) continue;  // a program
      for (const std::string& word : words_of(code))
        EXPECT_TRUE(names.has_word(word) || others.contains(word))
            << line.page << ':' << line.line << ": '" << word << "' does not exist";
    }
    ++rows;
  }
  EXPECT_GT(rows, 80) << "run this in the source tree";
}

/// A heading as it stands behind "#" in a link.
std::string anchor_of(const std::string& heading) {
  std::string anchor;
  for (const char c : heading.substr(heading.find_first_not_of("# "))) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) != 0 || c == '-' || c == '_' || byte >= 0x80)
      anchor += static_cast<char>(std::tolower(byte));
    else if (c == ' ')
      anchor += '-';
  }
  return anchor;
}

std::set<std::string> anchors_of(const std::string& page) {
  std::set<std::string> anchors;
  for (const ProseLine& line : read_page(page).prose)
    if (line.text.starts_with('#')) anchors.insert(anchor_of(line.text));
  return anchors;
}

TEST(Documents, EachLinkLeadsSomewhere) {
  const std::regex link("\\]\\(([^)# ]*)(#([^) ]*))?\\)");
  int links = 0;
  for (const std::string& page : all_pages()) {
    for (const ProseLine& line : read_page(page).prose) {
      for (auto at = std::sregex_iterator(line.text.begin(), line.text.end(), link);
           at != std::sregex_iterator(); ++at) {
        const std::string target = (*at)[1];
        if (target.find("://") != std::string::npos) continue;
        const std::filesystem::path path = target.empty()
                                               ? std::filesystem::path(page)
                                               : std::filesystem::path(page).parent_path() / target;
        EXPECT_TRUE(std::filesystem::exists(path)) << page << ':' << line.line << ": " << path;
        if ((*at)[3].matched && path.extension() == ".md") {
          EXPECT_TRUE(anchors_of(path).contains((*at)[3]))
              << page << ':' << line.line << ": " << at->str();
        }
        ++links;
      }
    }
  }
  EXPECT_GT(links, 80) << "run this in the source tree";
}

TEST(Documents, TheGuideLinksToWhatIsInstalledWithIt) {
  for (const std::string& page : pages_for_users()) {
    if (page == "README.md") continue;
    for (const ProseLine& line : read_page(page).prose)
      EXPECT_EQ(line.text.find("](../"), std::string::npos) << page << ':' << line.line;
  }
}

TEST(Documents, ReadmeIsShortAndInOrder) {
  const std::string readme = read_file("README.md");
  EXPECT_LE(std::count(readme.begin(), readme.end(), '\n'), 70);
  std::size_t before = 0;
  for (const char* const part : {"![", "make demo", "make test", "#include", "| instructions |"}) {
    const std::size_t at = readme.find(part);
    ASSERT_NE(at, std::string::npos) << part;
    EXPECT_LT(before, at) << part;
    before = at;
  }
}

/// The texts of causes in a source of spinwire-stat; of a text with places for values, its longest
/// part.
std::set<std::string> causes_in(const std::string& source) {
  const std::regex cause(
      "(?:(?:Cause|Meaning)\\{\"[^\"]*\",\\s*|cause = "
      "(?:fmt::format\\()?|noted\\(Severity::\\w+,\\s*|"
      "cause = \\w+ \\? |[?:] )\"([^\"]*)\"");
  std::set<std::string> found;
  for (auto at = std::sregex_iterator(source.begin(), source.end(), cause);
       at != std::sregex_iterator(); ++at) {
    std::string longest;
    std::istringstream parts(std::regex_replace((*at)[1].str(), std::regex("\\{[^}]*\\}"), "\n"));
    for (std::string part; std::getline(parts, part);)
      if (part.size() > longest.size()) longest = part;
    const bool is_text = longest.find_first_of("();:0123456789") == std::string::npos;
    if (is_text && longest.size() > 3 && !longest.starts_with(" lately")) found.insert(longest);
  }
  return found;
}

TEST(Documents, TroubleshootingHasEachLineOfSpinwireStat) {
  std::string named;
  for (const ProseLine& line : read_page("include/troubleshooting.md").prose)
    if (line.text.starts_with('|'))
      for (const std::string& code : code_in(line.text)) named += code + " \n";
  std::size_t causes = 0;
  for (const char* source :
       {"tools/common/stat_findings.cc", "tools/common/stat_event_findings.cc"}) {
    for (const std::string& cause : causes_in(read_file(source))) {
      EXPECT_NE(named.find(cause), std::string::npos) << source << ": " << cause;
      ++causes;
    }
  }
  EXPECT_GT(causes, 35u) << "run this in the source tree";
}

/// The recorded counts of bench/instructions.txt by name.
std::map<std::string, double> recorded_counts() {
  std::map<std::string, double> counts;
  std::istringstream text(read_file("bench/instructions.txt"));
  for (std::string line; std::getline(text, line);) {
    std::istringstream words(line);
    std::string name;
    double count = 0;
    if (!line.starts_with('#') && words >> name >> count) counts[name] = count;
  }
  return counts;
}

TEST(Documents, ReadmesFiguresAreTheRecordedOnes) {
  const std::map<std::string, double> counts = recorded_counts();
  const std::regex row("\\| .* \\| ([0-9]+) \\| `([a-z_0-9]+)` \\|");
  int figures = 0;
  for (const ProseLine& line : read_page("README.md").prose) {
    std::smatch parts;
    if (!std::regex_match(line.text, parts, row)) continue;
    ASSERT_TRUE(counts.contains(parts[2])) << line.text;
    EXPECT_EQ(std::lround(counts.at(parts[2])), std::stol(parts[1])) << line.text;
    ++figures;
  }
  EXPECT_GE(figures, 5) << "run this in the source tree";
}

TEST(Documents, TheIndexLeadsToEachPage) {
  const std::string index = read_file("include/README.md");
  for (const std::string& page : pages_for_users()) {
    if (page == "README.md" || page == "include/README.md") continue;
    const std::string name = std::filesystem::path(page).filename();
    EXPECT_NE(index.find("](" + name + ")"), std::string::npos) << page;
  }
}

}  // namespace
}  // namespace guide_names_test
