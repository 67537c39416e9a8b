// Versions, permissions, system calls, descriptors.
#include <fmt/core.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <utility>

#include "doctor/checks.h"
#include "spinwire/version.h"

namespace spinwire::doctor {
namespace {

/// libibverbs' part for a device: libmlx5 for mlx5_0.
std::string library_of(const std::string& device) {
  for (const char* known : {"mlx4", "mlx5", "bnxt_re", "irdma", "rxe", "siw", "efa", "erdma", "hns",
                            "qedr", "cxgb4", "ocrdma", "mana"}) {
    if (device.starts_with(known)) return known;
  }
  return {};
}

}  // namespace

std::pair<std::string, std::string> verbs_version(const Host& host) {
  for (const char* folder : {"/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
                             "/usr/lib64", "/usr/lib", "/lib/x86_64-linux-gnu", "/lib64", "/lib"}) {
    const std::string path = fmt::format("{}/libibverbs.so.1", folder);
    const std::string name = host.link_name(path);
    int major = 0;
    int minor = 0;
    if (std::sscanf(name.c_str(), "libibverbs.so.1.%*d.%d.%d", &major, &minor) == 2)  // NOLINT
      return {fmt::format("{}.{}", major, minor), path};
  }
  return {};
}

void check_kernel(const Subject& subject, Findings& findings) {
  constexpr std::string_view kPath = "/proc/sys/kernel/osrelease";
  const Reading release = subject.host.read(kPath);
  int major = 0;
  int minor = 0;
  if (!release || std::sscanf(release.text->c_str(), "%d.%d", &major, &minor) != 2) {  // NOLINT
    findings.add_unknown("kernel", "the kernel's version", kPath,
                         release ? *release.text : release.why);
    return;
  }
  const std::pair version(major, minor);
  const std::string evidence = fmt::format("{}: {}", kPath, *release.text);
  if (version < std::pair(5, 3)) {
    findings.add("kernel", subject.uses_softverbs ? Severity::error : Severity::warning,
                 "the kernel is older than 5.3: softverbs cannot watch its peers (pidfd_open)",
                 evidence, "apt-get install linux-image-amd64");
  } else if (version < std::pair(5, 14)) {
    findings.add("kernel", Severity::note,
                 "the kernel is older than 5.14: opening large pools takes longer "
                 "(MADV_POPULATE_WRITE)",
                 evidence, "apt-get install linux-image-amd64");
  } else {
    findings.add("kernel", Severity::ok, "the kernel has all that the library uses", evidence);
  }
}

void check_libraries(const Subject& subject, Findings& findings) {
  const auto [version, path] = verbs_version(subject.host);
  if (version.empty()) {
    findings.add_unknown("libraries", "the version of rdma-core", "libibverbs.so.1",
                         "not in the usual folders");
  } else {
    findings.add("libraries", Severity::ok,
                 fmt::format("spinwire {}, rdma-core {}", spinwire::version(), version),
                 fmt::format("link {}", path));
  }
  std::set<std::string> seen;
  for (const Port& port : subject.ports) {
    const std::string library = library_of(port.device);
    if (library.empty() || !seen.insert(library).second) continue;
    const std::string driver = fmt::format("/etc/libibverbs.d/{}.driver", library);
    const bool present = subject.host.exists(driver);
    findings.add("libraries",
                 present                   ? Severity::ok
                 : subject.is_wanted(port) ? Severity::error
                                           : Severity::note,
                 present ? fmt::format("libibverbs has its part for {}", port.device)
                         : fmt::format("libibverbs has no part for {}, so programs do not see it",
                                       port.device),
                 fmt::format("{}: {}", driver, present ? "is there" : "missing"),
                 present ? "" : "apt-get install ibverbs-providers");
  }
}

void check_ptrace_scope(const Subject& subject, Findings& findings) {
  constexpr std::string_view kPath = "/proc/sys/kernel/yama/ptrace_scope";
  const Reading scope = subject.host.read(kPath);
  if (!scope) {
    // Without Yama there is no such file, and nothing is forbidden.
    findings.add("ptrace scope", Severity::ok, "the kernel has no Yama",
                 fmt::format("{}: {}", kPath, scope.why));
    return;
  }
  const bool forbidden = *scope.text != "0" && subject.uses_softverbs;
  findings.add("ptrace scope", forbidden ? Severity::warning : Severity::ok,
               forbidden ? "on softverbs, other processes cannot reach memory of "
                           "register_memory(); memory of the pools they reach"
                         : "processes of one user may reach each other's registered memory",
               fmt::format("{}: {}", kPath, *scope.text),
               forbidden ? "sysctl -w kernel.yama.ptrace_scope=0" : "");
}

void check_system_calls(const Subject& subject, Findings& findings) {
  const Reading status = subject.host.read("/proc/self/status");
  const std::string seccomp =
      status ? field(*status.text, "Seccomp").value_or("not shown") : status.why;
  std::string container;
  for (const char* mark : {"/.dockerenv", "/run/.containerenv"}) {
    if (subject.host.exists(mark)) container = fmt::format("; {} exists: a container", mark);
  }
  bool good = true;
  for (const char* call : {"memfd_create", "membarrier", "pidfd_open", "process_vm_readv"}) {
    const int error = subject.host.probe(call);
    if (error == 0) continue;
    good = false;
    // Pools of any device are memfds. The other calls are those of softverbs.
    const bool needed = subject.uses_softverbs || std::strcmp(call, "memfd_create") == 0;
    findings.add(
        "system calls", needed ? Severity::error : Severity::note,
        fmt::format("the kernel or a filter refuses {}, which {} needs", call,
                    std::strcmp(call, "memfd_create") == 0 ? "every engine" : "softverbs"),
        fmt::format("{}: {}; /proc/self/status: Seccomp {}{}", call, std::strerror(error), seccomp,
                    container),
        fmt::format("docker run --security-opt seccomp=PROFILE  # with a profile that allows {}",
                    call));
  }
  if (good)
    findings.add("system calls", Severity::ok, "all calls that the library needs work",
                 fmt::format("called each; /proc/self/status: Seccomp {}{}", seccomp, container));
}

void check_observability(const Subject& subject, Findings& findings) {
  const std::string& folder = subject.config.observability.directory;
  if (folder.empty()) {
    findings.add("observability", Severity::ok, "the engine keeps no file for spinwire-stat",
                 "observability.directory: empty");
    return;
  }
  const int error = subject.host.access_error(folder);
  const bool is_missing = error == ENOENT;
  if (error == 0 && !subject.host.is_in_memory(folder)) {
    findings.add("observability", Severity::warning,
                 "engines open, but spinwire-stat does not show them",
                 fmt::format("observability.directory: {}: not in memory, so that polls would wait "
                             "for the disk",
                             folder),
                 "export SPINWIRE_OBSERVABILITY_DIRECTORY=/dev/shm");
    return;
  }
  findings.add("observability", error == 0 ? Severity::ok : Severity::warning,
               error == 0 ? "the engine can show itself to spinwire-stat"
                          : "engines open, but spinwire-stat does not show them",
               fmt::format("observability.directory: {}: {}", folder,
                           error == 0 ? "can be written" : std::strerror(error)),
               error == 0 ? ""
               : is_missing
                   ? fmt::format("mkdir -p {0} && mount -t tmpfs -o mode=1777 tmpfs {0}", folder)
                   : fmt::format("mount -o remount,rw,mode=1777 {}", folder));
}

void check_open_files(const Subject& subject, Findings& findings) {
  const auto limit = soft_limit(subject.host, "Max open files");
  if (!limit) {
    findings.add_unknown("open files", "the limit on open files", "/proc/self/limits",
                         "cannot be read");
  } else {
    // Handshakes have a socket each; softverbs holds descriptors of each peer's process.
    const std::uint64_t needed = 64 + 2 * std::uint64_t{subject.config.connections.handshakes} +
                                 (subject.uses_softverbs ? subject.need.connections : 0);
    const bool enough = *limit >= needed;
    findings.add(
        "open files", enough ? Severity::ok : Severity::warning,
        enough ? "the limit on open files suffices"
               : fmt::format("the limit on open files is too low for {} handshakes and {} "
                             "connections",
                             subject.config.connections.handshakes, subject.need.connections),
        fmt::format("/proc/self/limits: Max open files {}; about {} needed", *limit, needed),
        enough ? ""
               : fmt::format("ulimit -n {0}  # or LimitNOFILE={0} in the systemd unit", needed));
  }
  constexpr std::string_view kPath = "/proc/sys/fs/file-nr";
  const Reading used = subject.host.read(kPath);
  std::array<unsigned long long, 3> numbers{};
  if (!used ||
      std::sscanf(used.text->c_str(), "%llu %llu %llu", &numbers[0], &numbers[1],  // NOLINT
                  &numbers[2]) != 3)
    return findings.add_unknown("open files", "the open files of the host", kPath,
                                used ? *used.text : used.why);
  const bool full = numbers[0] > numbers[2] / 10 * 9;
  findings.add("open files", full ? Severity::warning : Severity::ok,
               full ? "the host is about to reach its limit on open files"
                    : "the host is far from its limit on open files",
               fmt::format("{}: {} of {}", kPath, numbers[0], numbers[2]),
               full ? fmt::format("sysctl -w fs.file-max={}", 2 * numbers[2]) : "");
}

}  // namespace spinwire::doctor
