// The memory of another process, which this one has started.
#pragma once

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "base/unique_fd.h"
#include "tools/programs.h"

namespace tools_test {

class ProcessMemory {
 public:
  explicit ProcessMemory(pid_t pid)
      : pid_(pid), fd_(open(pid, "mem", O_RDWR)), pages_(open(pid, "pagemap", O_RDONLY)) {}

  [[nodiscard]] bool read(std::uint64_t address, std::span<std::byte> to) const {
    return ::pread(fd_.get(), to.data(), to.size(), static_cast<off_t>(address)) ==
           static_cast<ssize_t>(to.size());
  }
  [[nodiscard]] bool write(std::uint64_t address, std::span<const std::byte> from) const {
    return ::pwrite(fd_.get(), from.data(), from.size(), static_cast<off_t>(address)) ==
           static_cast<ssize_t>(from.size());
  }
  /// The first address of shared memory where `bytes` lie within a page, and `fits` holds; 0: there
  /// is none.
  [[nodiscard]] std::uint64_t find(std::string_view bytes,
                                   const std::function<bool(std::uint64_t)>& fits) const {
    std::istringstream maps(read_process_file(pid_, "maps"));
    for (std::string line; std::getline(maps, line);) {
      if (line.find(" rw-s ") == std::string::npos) continue;
      const std::uint64_t begin = std::stoull(line, nullptr, 16);
      const std::uint64_t end = std::stoull(line.substr(line.find('-') + 1), nullptr, 16);
      for (const std::uint64_t page : touched_pages(begin, end)) {
        std::array<char, kPage> text{};
        if (!read(page, std::as_writable_bytes(std::span(text)))) continue;
        const std::string_view all(text.data(), text.size());
        for (std::size_t at = all.find(bytes); at != std::string_view::npos;
             at = all.find(bytes, at + 1)) {
          if (fits(page + at)) return page + at;
        }
      }
    }
    return 0;
  }

 private:
  static constexpr std::uint64_t kPage = 4096;

  static int open(pid_t pid, const char* file, int flags) {
    return ::open(("/proc/" + std::to_string(pid) + '/' + file).c_str(), flags | O_CLOEXEC);
  }
  /// The pages that the process has touched. To read others would give it memory.
  [[nodiscard]] std::vector<std::uint64_t> touched_pages(std::uint64_t begin,
                                                         std::uint64_t end) const {
    constexpr std::uint64_t kPresent = std::uint64_t{1} << 63;
    std::vector<std::uint64_t> entries((end - begin) / kPage), touched;
    const ssize_t size = static_cast<ssize_t>(entries.size() * sizeof entries[0]);
    const auto offset = static_cast<off_t>(begin / kPage * sizeof entries[0]);
    if (::pread(pages_.get(), entries.data(), static_cast<std::size_t>(size), offset) != size)
      return {};
    for (std::size_t i = 0; i < entries.size(); ++i)
      if ((entries[i] & kPresent) != 0) touched.push_back(begin + i * kPage);
    return touched;
  }

  pid_t pid_;
  spinwire::base::UniqueFd fd_;
  spinwire::base::UniqueFd pages_;
};

/// The file that a process has mapped at an address, as /proc names it: device and inode; empty if
/// there is none.
inline std::string file_mapped_at(pid_t pid, std::uint64_t address) {
  std::istringstream maps(read_process_file(pid, "maps"));
  for (std::string line; std::getline(maps, line);) {
    if (std::stoull(line, nullptr, 16) > address) break;
    if (std::stoull(line.substr(line.find('-') + 1), nullptr, 16) <= address) continue;
    std::istringstream words(line);
    std::string range, rights, offset, device, inode;
    words >> range >> rights >> offset >> device >> inode;
    return inode == "0" ? "" : device + ' ' + inode + ' ';
  }
  return {};
}

}  // namespace tools_test
