#include "base/available_memory.h"

#include <fmt/core.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/units.h"

namespace spinwire::base {
namespace {

using std::string_view;

constexpr std::uint64_t kUnlimited = AvailableMemory::kUnlimited;

std::uint64_t minus(std::uint64_t a, std::uint64_t b) noexcept { return a > b ? a - b : 0; }
/// The sum, or kUnlimited if it is no number of 64 bits.
std::uint64_t plus(std::uint64_t a, std::uint64_t b) noexcept {
  return a > kUnlimited - b ? kUnlimited : a + b;
}

/// A text for people: at most three digits before the unit.
std::string about(std::uint64_t bytes) {
  constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
  return bytes_text(bytes < 10 * kMiB ? bytes / 1024 * 1024 : bytes / kMiB * kMiB);
}

/// The number in a file of one line; none without the file, or for "max".
std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

/// The value of the line "NAME VALUE ..." of a file; none if there is no such line.
std::optional<std::uint64_t> read_field(const std::string& path, string_view name) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (!line.starts_with(name) || line.size() == name.size() || line[name.size()] != ' ') continue;
    unsigned long long value = 0;
    if (std::sscanf(line.c_str() + name.size(), "%llu", &value) == 1) return value;  // NOLINT
  }
  return std::nullopt;
}

void limit(AvailableMemory& available, std::uint64_t bytes, std::string found) {
  if (bytes >= available.bytes) return;
  available = {bytes, std::move(found)};
}

/// Swap counts, because the kernel can move the memory of other processes there.
void limit_by_machine(AvailableMemory& available, const MemoryFiles& files) {
  const std::string path = files.proc + "/meminfo";
  const auto total = read_field(path, "MemTotal:");
  const auto free = read_field(path, "MemAvailable:");
  if (!total || !free) return;
  const std::uint64_t swap = read_field(path, "SwapFree:").value_or(0);
  const std::uint64_t bytes = std::min(*total, *free + swap) * 1024;
  limit(available, bytes,
        fmt::format("the machine has {} of memory, of which {} can be taken", about(*total * 1024),
                    about(bytes)));
}

/// The files of a version of cgroups.
struct CgroupFiles {
  const char* limit;
  const char* used;
  const char* caches[2];  ///< fields of memory.stat
  const char* swap_limit;
  const char* swap_used;
};
constexpr CgroupFiles kVersion1{"memory.limit_in_bytes",
                                "memory.usage_in_bytes",
                                {"total_inactive_file", "total_active_file"},
                                nullptr,
                                nullptr};
constexpr CgroupFiles kVersion2{"memory.max",
                                "memory.current",
                                {"inactive_file", "active_file"},
                                "memory.swap.max",
                                "memory.swap.current"};

/// Limits by one cgroup. `name` is as in /proc/self/cgroup.
void limit_by_cgroup(AvailableMemory& available, const std::string& folder, string_view name,
                     const CgroupFiles& files) {
  const auto most = read_number(fmt::format("{}/{}", folder, files.limit));
  const auto used = read_number(fmt::format("{}/{}", folder, files.used));
  if (!most || !used) return;
  std::uint64_t bytes = minus(*most, *used);
  for (const char* const cache : files.caches)
    bytes = plus(bytes, read_field(folder + "/memory.stat", cache).value_or(0));
  if (files.swap_limit != nullptr) {
    const auto swap = read_number(fmt::format("{}/{}", folder, files.swap_limit));
    const auto swapped = read_number(fmt::format("{}/{}", folder, files.swap_used));
    // Without a limit, the machine's swap space is what limits.
    if (swapped) bytes = plus(bytes, minus(swap.value_or(kUnlimited), *swapped));
  }
  bytes = std::min(bytes, *most);
  limit(available, bytes,
        fmt::format("the cgroup {} may have {} of memory, of which {} can be taken",
                    name.empty() ? "/" : name, about(*most), about(bytes)));
}

/// Limits by a cgroup and all above it. A container may see its own cgroup as the root.
void limit_by_cgroups(AvailableMemory& available, const std::string& root, string_view name,
                      const CgroupFiles& files) {
  for (;;) {
    limit_by_cgroup(available, fmt::format("{}{}", root, name), name, files);
    if (name.empty()) return;
    name = name.substr(0, name.rfind('/'));
  }
}

void limit_by_cgroups(AvailableMemory& available, const MemoryFiles& files) {
  std::ifstream file(files.proc + "/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    // HIERARCHY:CONTROLLERS:PATH
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const string_view controllers = string_view(line).substr(first + 1, second - first - 1);
    string_view name = string_view(line).substr(second + 1);
    if (name == "/") name = {};
    if (controllers == "memory") {
      limit_by_cgroups(available, files.cgroup + "/memory", name, kVersion1);
    } else if (controllers.empty()) {
      limit_by_cgroups(available, files.cgroup, name, kVersion2);
    }
  }
}

void limit_by_address_space(AvailableMemory& available, const MemoryFiles& files) {
  rlimit most{};
  if (::getrlimit(RLIMIT_AS, &most) != 0 || most.rlim_cur == RLIM_INFINITY) return;
  const auto pages = read_number(files.proc + "/self/statm");
  if (!pages) return;
  const std::uint64_t used = *pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t bytes = minus(most.rlim_cur, used);
  limit(available, bytes,
        fmt::format("this process may have {} of address space (ulimit -v), of which {} are left",
                    about(most.rlim_cur), about(bytes)));
}

}  // namespace

AvailableMemory available_memory(const MemoryFiles& files) {
  AvailableMemory available;
  limit_by_machine(available, files);
  limit_by_cgroups(available, files);
  limit_by_address_space(available, files);
  return available;
}

Result<void> check_available_memory(std::uint64_t bytes, string_view asked, string_view remedy,
                                    const MemoryFiles& files) {
  AvailableMemory available = available_memory(files);
  if (bytes <= available.bytes) return {};
  return fail(Status::no_memory, asked, std::move(available.found), remedy);
}

void require_record_memory(std::uint64_t bytes) {
  auto there = check_available_memory(
      bytes, fmt::format("take {} for a table of records", about(bytes)),
      "lower the settings that count records, such as connections.maximum, queues.operations and "
      "rpc.sessions, or free memory of this machine or its cgroup");
  if (!there) throw NotEnoughMemory(std::move(there.error()));
}

}  // namespace spinwire::base
