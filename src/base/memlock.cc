#include "base/memlock.h"

#include <fmt/core.h>
#include <linux/capability.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/units.h"

namespace spinwire::base {
namespace {

std::uint64_t from_rlimit(rlim_t limit) noexcept {
  return limit == RLIM_INFINITY ? LockLimits::kUnlimited : limit;
}

std::string limit_text(std::uint64_t limit) {
  return limit == LockLimits::kUnlimited ? "unlimited" : bytes_text(limit);
}

/// Parses the value of a line "NAME: value" in base `number_base`; false if the line has another
/// name.
bool read_field(const char* line, const char* name, int number_base,
                std::uint64_t& value) noexcept {
  const std::size_t length = std::strlen(name);
  if (std::strncmp(line, name, length) != 0) return false;
  value = std::strtoull(line + length, nullptr, number_base);
  return true;
}

}  // namespace

LockLimits lock_limits() noexcept {
  LockLimits limits;
  rlimit memlock{};
  if (::getrlimit(RLIMIT_MEMLOCK, &memlock) == 0) {
    limits.soft = from_rlimit(memlock.rlim_cur);
    limits.hard = from_rlimit(memlock.rlim_max);
  }
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen("/proc/self/status", "re"),
                                                             &std::fclose);
  if (file == nullptr) return limits;
  char line[256];
  std::uint64_t value = 0;
  while (std::fgets(line, sizeof line, file.get()) != nullptr) {
    if (read_field(line, "VmLck:", 10, value)) limits.locked = value * 1024;
    if (read_field(line, "VmPin:", 10, value)) limits.pinned = value * 1024;
    if (read_field(line, "CapEff:", 16, value)) {
      limits.privileged = (value >> CAP_IPC_LOCK & 1) != 0;
    }
  }
  return limits;
}

Error lock_error(std::string asked, std::string_view call, int error, std::uint64_t bytes,
                 LockUse use, const LockLimits& limits) {
  const std::uint64_t already = use == LockUse::lock ? limits.locked : limits.pinned;
  const bool exceeded = limits.exceeded(bytes, already);
  std::string found = fmt::format(
      "{}: {}; {} asked, {} locked (VmLck) and {} pinned (VmPin) already; RLIMIT_MEMLOCK is {} "
      "soft, {} hard{}",
      call, errno_text(error), bytes_text(bytes), bytes_text(limits.locked),
      bytes_text(limits.pinned), limit_text(limits.soft), limit_text(limits.hard),
      limits.privileged ? ", and CAP_IPC_LOCK lifts it" : "");
  // Whole KiB, the unit of ulimit and limits.conf.
  const std::uint64_t needed = (already + bytes + 1023) / 1024;
  std::string fix = fmt::format(
      "raise the limit: ulimit -l {0} (up to the hard limit), \"memlock\" {0} in "
      "/etc/security/limits.conf, LimitMEMLOCK={0}K in the systemd unit; or give the program "
      "CAP_IPC_LOCK",
      needed);
  if (!exceeded) {
    fix =
        "the limit is not exceeded, so it is only a possible cause, as are a cgroup's or the "
        "device's own limits; if it is the limit, " +
        fix;
  }
  return make_error(Status::no_memory, std::move(asked), std::move(found), std::move(fix));
}

}  // namespace spinwire::base
