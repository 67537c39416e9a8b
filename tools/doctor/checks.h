// The checks of one host.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "doctor/findings.h"
#include "doctor/host.h"
#include "doctor/ports.h"
#include "spinwire/config.h"
#include "spinwire/footprint.h"

namespace spinwire::doctor {

/// The host, and the engine that is to run on it.
struct Subject {
  Subject(const Host& where, const Config& settings, bool settings_given);

  const Host& host;
  Config config;
  Footprint need;
  bool uses_devices;    ///< the engine may use an RDMA device
  bool uses_softverbs;  ///< the engine may use the embedded device
  std::string device;   ///< the only device that it may use; empty: any
  std::vector<Port> ports;
  std::vector<int> cpus;  ///< processors that this process may run on

  [[nodiscard]] bool is_wanted(const Port& port) const noexcept;
  /// How severe the fault of a port is: an error unless another port serves.
  [[nodiscard]] Severity severity_at(const Port& port) const noexcept;
};

// Each adds at least one finding.
void check_devices(const Subject& subject, Findings& findings);
void check_device_files(const Subject& subject, Findings& findings);
void check_ports(const Subject& subject, Findings& findings);
void check_gids(const Subject& subject, Findings& findings);
void check_mtu(const Subject& subject, Findings& findings);
void check_numa(const Subject& subject, Findings& findings);

void check_memlock(const Subject& subject, Findings& findings);
void check_hugepages(const Subject& subject, Findings& findings);
void check_free_memory(const Subject& subject, Findings& findings);
void check_memory_cgroup(const Subject& subject, Findings& findings);
void check_transparent_hugepages(const Subject& subject, Findings& findings);
void check_map_count(const Subject& subject, Findings& findings);
void check_overcommit(const Subject& subject, Findings& findings);

void check_governor(const Subject& subject, Findings& findings);
void check_idle_states(const Subject& subject, Findings& findings);
void check_isolation(const Subject& subject, Findings& findings);
void check_clock(const Subject& subject, Findings& findings);
void check_realtime(const Subject& subject, Findings& findings);
void check_cpu_cgroup(const Subject& subject, Findings& findings);

void check_kernel(const Subject& subject, Findings& findings);
void check_libraries(const Subject& subject, Findings& findings);
void check_ptrace_scope(const Subject& subject, Findings& findings);
void check_system_calls(const Subject& subject, Findings& findings);
void check_open_files(const Subject& subject, Findings& findings);
void check_observability(const Subject& subject, Findings& findings);

/// The limit "name" of /proc/self/limits; all bits for "unlimited". None if it cannot be read.
[[nodiscard]] std::optional<std::uint64_t> soft_limit(const Host& host, std::string_view name);
/// The version of rdma-core, "44.0" for libibverbs.so.1.14.44.0, and where it was read. Empty if it
/// is not found.
[[nodiscard]] std::pair<std::string, std::string> verbs_version(const Host& host);
/// A limit of this process's cgroups.
struct CgroupLimit {
  std::string path;
  std::string text;
};
/// The files of a controller in this process's cgroup and all above it: `v2` in a unified
/// hierarchy, `v1` in one of its own.
[[nodiscard]] std::vector<CgroupLimit> cgroup_limits(const Host& host, std::string_view controller,
                                                     std::string_view v2, std::string_view v1);

/// Makes all checks.
[[nodiscard]] Findings examine(const Subject& subject);

}  // namespace spinwire::doctor
