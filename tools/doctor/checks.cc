#include "doctor/checks.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>

namespace spinwire::doctor {
namespace {

/// The device's name without its provider.
std::string bare_name(const std::string& name) {
  const std::size_t colon = name.find(':');
  return colon == std::string::npos ? name : name.substr(colon + 1);
}

/// A folder and those above it, up to the root.
std::vector<std::string> upwards(std::string folder) {
  std::vector<std::string> all;
  while (folder.size() > 1) {
    all.push_back(folder);
    folder.erase(folder.rfind('/'));
  }
  all.emplace_back("");
  return all;
}

}  // namespace

Subject::Subject(const Host& where, const Config& settings, bool settings_given)
    : host(where), config(settings), need(footprint(settings)), ports(read_ports(where)) {
  const std::string name = bare_name(config.device.name);
  const bool embedded = name == "softverbs";
  uses_softverbs = embedded;
  uses_devices = !embedded || !settings_given;
  if (!embedded && name != "auto") device = name;
  const Reading status = host.read("/proc/self/status");
  if (status) cpus = processors(field(*status.text, "Cpus_allowed_list").value_or(""));
}

bool Subject::is_wanted(const Port& port) const noexcept {
  return uses_devices && (device.empty() || port.device == device) &&
         (config.device.port == 0 || static_cast<int>(config.device.port) == port.number);
}

Severity Subject::severity_at(const Port& port) const noexcept {
  if (!is_wanted(port)) return Severity::note;
  const bool another = std::any_of(ports.begin(), ports.end(), [&](const Port& other) {
    return is_wanted(other) && other.is_usable();
  });
  return another ? Severity::note : Severity::error;
}

std::optional<std::uint64_t> soft_limit(const Host& host, std::string_view name) {
  const Reading limits = host.read("/proc/self/limits");
  if (!limits) return std::nullopt;
  std::istringstream in(*limits.text);
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(name)) continue;
    const std::string rest = line.substr(name.size());
    const std::size_t at = rest.find_first_not_of(' ');
    if (at == std::string::npos) return std::nullopt;
    if (rest.compare(at, 9, "unlimited") == 0) return ~std::uint64_t{0};
    return std::strtoull(rest.c_str() + at, nullptr, 10);
  }
  return std::nullopt;
}

std::vector<CgroupLimit> cgroup_limits(const Host& host, std::string_view controller,
                                       std::string_view v2, std::string_view v1) {
  std::vector<CgroupLimit> limits;
  const Reading groups = host.read("/proc/self/cgroup");
  if (!groups) return limits;
  const auto add = [&](const std::string& mount, const std::string& group, std::string_view file) {
    for (const std::string& folder : upwards(group)) {
      const std::string path = fmt::format("{}{}/{}", mount, folder, file);
      if (const Reading limit = host.read(path)) limits.push_back({path, *limit.text});
    }
  };
  std::istringstream in(*groups.text);
  for (std::string line; std::getline(in, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string names = ',' + line.substr(first + 1, second - first - 1) + ',';
    const std::string group = line.substr(second + 1);
    if (names == ",,") {
      add("/sys/fs/cgroup", group, v2);
    } else if (names.find(fmt::format(",{},", controller)) != std::string::npos) {
      add(fmt::format("/sys/fs/cgroup/{}", controller), group, v1);
    }
  }
  return limits;
}

Findings examine(const Subject& subject) {
  Findings findings;
  for (const auto check : {check_devices,
                           check_device_files,
                           check_ports,
                           check_gids,
                           check_mtu,
                           check_numa,
                           check_memlock,
                           check_hugepages,
                           check_free_memory,
                           check_memory_cgroup,
                           check_transparent_hugepages,
                           check_map_count,
                           check_overcommit,
                           check_governor,
                           check_idle_states,
                           check_isolation,
                           check_clock,
                           check_realtime,
                           check_cpu_cgroup,
                           check_kernel,
                           check_libraries,
                           check_ptrace_scope,
                           check_system_calls,
                           check_open_files,
                           check_observability})
    check(subject, findings);
  return findings;
}

}  // namespace spinwire::doctor
