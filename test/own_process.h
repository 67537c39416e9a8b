// What the kernel says of this process and its machine.
#pragma once

#include <dirent.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>

namespace own_process {

/// The number behind "FIELD:" in a file of /proc, in the file's unit.
inline std::optional<std::uint64_t> number_in(const std::string& file, const std::string& field) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(field + ':')) return std::stoull(line.substr(field.size() + 1));
  }
  return std::nullopt;
}

inline std::size_t open_descriptors() {
  std::size_t n = 0;
  DIR* dir = opendir("/proc/self/fd");
  while (dir != nullptr && readdir(dir) != nullptr) ++n;
  if (dir != nullptr) closedir(dir);
  return n;
}

/// Memory mappings whose line contains `name`.
inline std::size_t mappings(std::string_view name = {}) {
  std::ifstream maps("/proc/self/maps");
  std::size_t n = 0;
  for (std::string line; std::getline(maps, line);)
    n += line.find(name) != std::string::npos ? 1 : 0;
  return n;
}

}  // namespace own_process
