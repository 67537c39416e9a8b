// The pages of the tree, their code blocks, and the code within their lines.
#pragma once

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "tools/programs.h"

namespace tools_test {

/// A code block between fences.
struct CodeBlock {
  std::string page;
  int line = 0;  ///< of its first line in the page
  std::string language;
  std::string text;
};

/// A line outside of code blocks.
struct ProseLine {
  std::string page;
  int line = 0;
  std::string text;
};

/// A page, taken apart.
struct Page {
  std::vector<CodeBlock> blocks;
  std::vector<ProseLine> prose;
  bool is_complete = true;  ///< each fence is closed
};

inline Page read_page(const std::string& path) {
  Page page;
  std::istringstream text(read_file(path));
  bool fenced = false;
  int number = 0;
  for (std::string line; std::getline(text, line);) {
    ++number;
    if (line.starts_with("```")) {
      fenced = !fenced;
      if (fenced) page.blocks.push_back({path, number + 1, line.substr(3), ""});
    } else if (fenced) {
      page.blocks.back().text += line + '\n';
    } else {
      page.prose.push_back({path, number, line});
    }
  }
  page.is_complete = !fenced;
  return page;
}

/// All Markdown files of the tree; paths from its top.
inline std::vector<std::string> all_pages() {
  namespace fs = std::filesystem;
  std::vector<std::string> pages;
  for (auto at = fs::recursive_directory_iterator("."); at != fs::recursive_directory_iterator();
       ++at) {
    const std::string name = at->path().filename();
    if (at->is_directory() && (name.starts_with('.') || name == "build"))
      at.disable_recursion_pending();
    else if (name.ends_with(".md"))
      pages.push_back(at->path().lexically_normal());
  }
  std::sort(pages.begin(), pages.end());
  return pages;
}

/// The pages for users: README.md and the guide.
inline std::vector<std::string> pages_for_users() {
  std::vector<std::string> pages = all_pages();
  std::erase_if(pages, [](const std::string& page) {
    return page != "README.md" && !page.starts_with("include/");
  });
  return pages;
}

/// The texts between backquotes.
inline std::vector<std::string> code_in(std::string_view line) {
  std::vector<std::string> found;
  for (std::size_t at = line.find('`'); at != std::string_view::npos; at = line.find('`', at)) {
    const std::size_t end = line.find('`', at + 1);
    if (end == std::string_view::npos) break;
    found.emplace_back(line.substr(at + 1, end - at - 1));
    at = end + 1;
  }
  return found;
}

}  // namespace tools_test
