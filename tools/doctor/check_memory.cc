// Locked memory, hugepages, free memory, and what the kernel does with mappings.
#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>

#include "doctor/checks.h"
#include "doctor/plan.h"

namespace spinwire::doctor {
namespace {

constexpr std::uint64_t kUnlimited = ~std::uint64_t{0};
constexpr int kCapIpcLock = 14;

struct PageSize {
  std::uint64_t bytes = 0;
  std::uint64_t total = 0;
  std::uint64_t free = 0;      ///< also those that are reserved
  std::uint64_t reserved = 0;  ///< of the free ones
  std::string folder;

  [[nodiscard]] std::uint64_t available() const noexcept {
    return free > reserved ? free - reserved : 0;
  }
  [[nodiscard]] std::uint64_t pages_for(std::uint64_t size) const noexcept {
    return (size + bytes - 1) / bytes;
  }
};

std::vector<PageSize> page_sizes(const Host& host) {
  constexpr std::string_view kFolder = "/sys/kernel/mm/hugepages";
  constexpr std::string_view kPrefix = "hugepages-";
  std::vector<PageSize> sizes;
  for (const std::string& name : host.list(kFolder)) {
    if (!name.starts_with(kPrefix)) continue;
    PageSize size;
    size.folder = fmt::format("{}/{}", kFolder, name);
    size.bytes = std::strtoull(name.c_str() + kPrefix.size(), nullptr, 10) << 10;
    const auto count = [&](const char* file) {
      return static_cast<std::uint64_t>(host.number(size.folder + '/' + file).value_or(0));
    };
    size.total = count("nr_hugepages");
    size.free = count("free_hugepages");
    size.reserved = count("resv_hugepages");
    if (size.bytes != 0) sizes.push_back(size);
  }
  std::sort(sizes.begin(), sizes.end(),
            [](const PageSize& a, const PageSize& b) { return a.bytes < b.bytes; });
  return sizes;
}

/// As the library chooses: a larger size may waste an eighth.
bool serves(const PageSize& page, bool smallest, std::uint64_t size) {
  const std::uint64_t pages = page.pages_for(size);
  return page.available() >= pages && (smallest || pages * page.bytes - size <= size / 8);
}

/// The hugepages into which the engine's pools fit; null: there are none, or it uses none.
const PageSize* pages_of_pools(const Subject& subject, const std::vector<PageSize>& sizes) {
  if (subject.config.memory.hugepages == HugepagePolicy::off) return nullptr;
  const auto found = std::find_if(sizes.begin(), sizes.end(), [&](const PageSize& page) {
    return serves(page, page.bytes == sizes.front().bytes, subject.need.pool_bytes);
  });
  return found == sizes.end() ? nullptr : &*found;
}

std::string pages_text(const std::vector<PageSize>& sizes) {
  std::string text;
  for (const PageSize& s : sizes) {
    text += fmt::format("{}{}: nr_hugepages {}, free_hugepages {}, resv_hugepages {}",
                        text.empty() ? "" : "; ", s.folder, s.total, s.free, s.reserved);
  }
  return text;
}

bool has_capability(const Host& host, int capability) {
  const Reading status = host.read("/proc/self/status");
  if (!status) return false;
  const std::string effective = field(*status.text, "CapEff").value_or("0");
  return (std::strtoull(effective.c_str(), nullptr, 16) >> capability & 1) != 0;
}

/// The word in brackets, which is in effect.
std::string chosen_word(const std::string& text) {
  const std::size_t begin = text.find('[');
  const std::size_t end = text.find(']');
  if (begin == std::string::npos || end == std::string::npos || end < begin) return text;
  return text.substr(begin + 1, end - begin - 1);
}

}  // namespace

void check_memlock(const Subject& subject, Findings& findings) {
  const auto limit = soft_limit(subject.host, "Max locked memory");
  if (!limit) {
    findings.add_unknown("memlock", "the limit on locked memory", "/proc/self/limits",
                         "cannot be read");
    return;
  }
  const bool locks = subject.config.memory.lock != LockPolicy::off;
  const bool pins = subject.uses_devices && !subject.ports.empty();
  const std::uint64_t needed = pins    ? pinned_bytes(subject.config, subject.need)
                               : locks ? subject.need.pool_bytes
                                       : 0;
  const bool privileged = has_capability(subject.host, kCapIpcLock);
  const std::string evidence =
      fmt::format("/proc/self/limits: Max locked memory {}; {} needed{}",
                  *limit == kUnlimited ? "unlimited" : size_text(*limit), size_text(needed),
                  privileged ? "; CAP_IPC_LOCK in CapEff of /proc/self/status lifts it" : "");
  if (needed <= *limit || privileged) {
    findings.add("memlock", Severity::ok, "the limit on locked memory suffices", evidence);
    return;
  }
  const bool required =
      (pins && !subject.uses_softverbs) || subject.config.memory.lock == LockPolicy::require;
  findings.add("memlock", required ? Severity::error : Severity::warning,
               "the limit on locked memory is too low: registering the pools will fail", evidence,
               fmt::format("ulimit -l {0}  # after \"* hard memlock {0}\" in "
                           "/etc/security/limits.conf, or LimitMEMLOCK={0}K in the systemd unit",
                           (needed + 1023) / 1024));
}

void check_hugepages(const Subject& subject, Findings& findings) {
  const HugepagePolicy policy = subject.config.memory.hugepages;
  const std::uint64_t size = subject.need.pool_bytes;
  const std::vector<PageSize> sizes = page_sizes(subject.host);
  if (policy == HugepagePolicy::off) {
    findings.add("hugepages", Severity::ok, "none are needed: memory.hugepages = \"off\"",
                 pages_text(sizes));
    return;
  }
  const Severity severity = policy == HugepagePolicy::require ? Severity::error : Severity::warning;
  if (sizes.empty()) {
    findings.add("hugepages", severity, "this kernel offers no hugepages",
                 "/sys/kernel/mm/hugepages: empty or missing",
                 "export SPINWIRE_MEMORY_HUGEPAGES=off  # or run a kernel with CONFIG_HUGETLBFS");
    return;
  }
  if (const PageSize* const fitting = pages_of_pools(subject, sizes)) {
    findings.add("hugepages", Severity::ok,
                 fmt::format("the pools, {}, fit into {} pages of {}", size_text(size),
                             fitting->pages_for(size), size_text(fitting->bytes)),
                 pages_text(sizes));
    return;
  }
  const PageSize& page = sizes.front();
  const std::uint64_t pages = page.pages_for(size);
  const bool held = page.total >= pages;
  findings.add(
      "hugepages", severity,
      fmt::format("the pools, {}, need {} pages of {}, and {} are free{}", size_text(size), pages,
                  size_text(page.bytes), page.available(),
                  held ? ": other processes hold or have reserved the others" : ""),
      pages_text(sizes),
      fmt::format("echo {} > {}/nr_hugepages", page.total + pages - page.available(), page.folder));
}

void check_free_memory(const Subject& subject, Findings& findings) {
  const Reading info = subject.host.read("/proc/meminfo");
  const auto available = info ? field(*info.text, "MemAvailable") : std::nullopt;
  if (!available) {
    findings.add_unknown("memory", "how much memory is free", "/proc/meminfo",
                         info ? "has no MemAvailable" : info.why);
    return;
  }
  const std::uint64_t bytes = std::strtoull(available->c_str(), nullptr, 10) << 10;
  // The kernel counts hugepages, also free ones, as memory that is in use.
  const std::vector<PageSize> sizes = page_sizes(subject.host);
  if (pages_of_pools(subject, sizes) != nullptr) {
    findings.add("memory", Severity::ok, "the pools lie in hugepages", pages_text(sizes));
    return;
  }
  const bool enough = bytes >= subject.need.pool_bytes;
  findings.add("memory", enough ? Severity::ok : Severity::error,
               enough ? "the pools fit into the free memory"
                      : fmt::format("the pools, {}, do not fit into the free memory",
                                    size_text(subject.need.pool_bytes)),
               fmt::format("/proc/meminfo: MemAvailable {}", *available),
               enough ? "" : "spinwire-doctor plan  # with fewer connections or shorter messages");
}

void check_memory_cgroup(const Subject& subject, Findings& findings) {
  if (const Reading groups = subject.host.read("/proc/self/cgroup"); !groups)
    return findings.add_unknown("memory", "the cgroup's limit", "/proc/self/cgroup", groups.why);
  bool limited = false;
  for (const CgroupLimit& limit :
       cgroup_limits(subject.host, "memory", "memory.max", "memory.limit_in_bytes")) {
    const std::uint64_t bytes =
        limit.text.starts_with("max") ? kUnlimited : std::strtoull(limit.text.c_str(), nullptr, 10);
    if (bytes >= subject.need.pool_bytes) continue;
    limited = true;
    findings.add("memory", Severity::error,
                 fmt::format("the cgroup allows less memory than the pools take, {}",
                             size_text(subject.need.pool_bytes)),
                 fmt::format("{}: {}", limit.path, limit.text),
                 fmt::format("echo {} > {}", 2 * subject.need.pool_bytes, limit.path));
  }
  if (!limited)
    findings.add("memory", Severity::ok, "no cgroup limits memory below the pools' size",
                 "/proc/self/cgroup");
}

void check_transparent_hugepages(const Subject& subject, Findings& findings) {
  constexpr std::string_view kPath = "/sys/kernel/mm/transparent_hugepage/enabled";
  const Reading enabled = subject.host.read(kPath);
  if (!enabled) {
    findings.add_unknown("thp", "transparent hugepages", kPath, enabled.why);
    return;
  }
  const bool never = chosen_word(*enabled.text) == "never";
  findings.add("thp", never ? Severity::warning : Severity::ok,
               never ? "transparent hugepages are off: with thousands of connections or sessions, "
                       "each one costs more time, as its record is in pages of 4 KiB"
                     : "transparent hugepages are available to records of connections",
               fmt::format("{}: {}", kPath, *enabled.text),
               never ? fmt::format("echo madvise > {}", kPath) : "");
}

void check_map_count(const Subject& subject, Findings& findings) {
  constexpr std::string_view kPath = "/proc/sys/vm/max_map_count";
  const auto limit = subject.host.number(kPath);
  if (!limit) {
    findings.add_unknown("map count", "the limit on mappings", kPath, "cannot be read");
    return;
  }
  // Softverbs maps the segment, the pools and the locks of each peer.
  const std::int64_t needed = 1024 + 4 * std::int64_t{subject.need.connections};
  const bool enough = *limit >= needed;
  findings.add(
      "map count", enough ? Severity::ok : Severity::warning,
      enough ? "the limit on mappings suffices"
             : fmt::format("the limit on mappings is too low for {} connections to other "
                           "processes on softverbs",
                           subject.need.connections),
      fmt::format("{}: {}", kPath, *limit),
      enough ? ""
             : fmt::format("sysctl -w vm.max_map_count={}", std::max<std::int64_t>(needed, 65530)));
}

void check_overcommit(const Subject& subject, Findings& findings) {
  constexpr std::string_view kPath = "/proc/sys/vm/overcommit_memory";
  const auto policy = subject.host.number(kPath);
  if (!policy) {
    findings.add_unknown("overcommit", "the policy of committing memory", kPath, "cannot be read");
    return;
  }
  const bool strict = *policy == 2;
  findings.add("overcommit", strict ? Severity::warning : Severity::ok,
               strict ? "the kernel counts reserved memory as used: sparse tables and segments of "
                        "softverbs may not open"
                      : "sparse tables cost only what they use",
               fmt::format("{}: {}", kPath, *policy),
               strict ? "sysctl -w vm.overcommit_memory=0" : "");
}

}  // namespace spinwire::doctor
