// Name patterns as in GoogleTest's filters.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <vector>

namespace conformance {

/// Supports * and ?.
inline bool matches(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern[0] == '*') {
    for (std::size_t skip = 0; skip <= name.size(); ++skip) {
      if (matches(pattern.substr(1), name.substr(skip))) return true;
    }
    return false;
  }
  return !name.empty() && (pattern[0] == '?' || pattern[0] == name[0]) &&
         matches(pattern.substr(1), name.substr(1));
}

/// The patterns between the colons.
inline std::vector<std::string_view> patterns_of(std::string_view list) {
  std::vector<std::string_view> patterns;
  for (std::string_view rest = list; !rest.empty();) {
    const std::size_t end = std::min(rest.find(':'), rest.size());
    patterns.push_back(rest.substr(0, end));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return patterns;
}

inline bool matches_any(std::string_view list, std::string_view name) {
  const std::vector<std::string_view> patterns = patterns_of(list);
  return std::any_of(patterns.begin(), patterns.end(),
                     [name](std::string_view pattern) { return matches(pattern, name); });
}

}  // namespace conformance
