// Trees of files that spinwire-doctor takes for a host.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <string>

#include "tools/programs.h"

namespace tools_test {

/// Whether a remedy is a line for the shell: one that begins with a command, perhaps behind
/// variables for it, or a comment that says that there is none. A path is a command if it can be
/// executed. No command reboots, or replaces a file of settings.
inline testing::AssertionResult is_line_for_a_shell(const std::string& remedy) {
  static const std::set<std::string> kCommands = {"apt-get",
                                                  "chmod",
                                                  "chronyc",
                                                  "cpupower",
                                                  "docker",
                                                  "echo",
                                                  "ethtool",
                                                  "export",
                                                  "getent",
                                                  "ip",
                                                  "make",
                                                  "mkdir",
                                                  "modprobe",
                                                  "mount",
                                                  "numactl",
                                                  "sed",
                                                  "sysctl",
                                                  "systemctl",
                                                  "taskset",
                                                  "ulimit",
                                                  "spinwire-devices",
                                                  "spinwire-doctor",
                                                  "#"};
  static const std::regex kVariables("^([A-Z_]+=[^ ]* +)*");
  const std::string line = std::regex_replace(remedy, kVariables, "");
  const std::string word = line.substr(0, line.find(' '));
  const bool is_path = word.starts_with('/') && ::access(word.c_str(), X_OK) == 0;
  if (!kCommands.contains(word) && !is_path)
    return testing::AssertionFailure() << "no command: '" << remedy << "'";
  const std::string command = remedy.substr(0, remedy.find('#'));
  for (const char* harm : {"reboot", " >/etc/", " > /etc/", "restart opensm;"}) {
    if (command.find(harm) != std::string::npos)
      return testing::AssertionFailure() << harm << ": '" << remedy << "'";
  }
  Program shell({"/bin/bash", "-n", "-c", remedy});
  if (shell.wait() != 0)
    return testing::AssertionFailure() << "'" << remedy << "': " << shell.err();
  return testing::AssertionSuccess();
}

/// The folder of the adapter's port.
inline const std::string kPort = "sys/class/infiniband/mlx5_0/ports/1/";

/// A host with one RoCE adapter and nothing to mend. Tests plant faults.
class DoctorHost {
 public:
  DoctorHost() {
    process();
    kernel();
    memory();
    for (const char* cpu : {"cpu0", "cpu1"}) processor(cpu);
    adapter();
  }

  DoctorHost& put(const std::string& path, const std::string& text) {
    const std::filesystem::path file = folder_ / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary | std::ios::trunc) << text << '\n';
    return *this;
  }
  DoctorHost& remove(const std::string& path) {
    EXPECT_NE(std::filesystem::remove_all(folder_ / path), 0u) << path;
    return *this;
  }
  /// Replaces a line of a file that begins with `name`.
  DoctorHost& set_line(const std::string& path, const std::string& name, const std::string& line) {
    std::istringstream in(read_file(folder_ / path));
    std::string text;
    bool found = false;
    for (std::string next; std::getline(in, next);) {
      const bool is_it = next.starts_with(name);
      found = found || is_it;
      text += (is_it ? line : next) + '\n';
    }
    EXPECT_TRUE(found) << path << " has no " << name;
    return put(path, text);
  }
  [[nodiscard]] std::string root() const { return folder_ / "."; }
  [[nodiscard]] std::string file(const std::string& name) const { return folder_ / name; }

 private:
  void process() {
    put("proc/self/status",
        "Name:\tspinwire-doctor\nCapEff:\t0000000000000000\nSeccomp:\t0\nCpus_allowed_list:\t0-1");
    put("proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units\n"
        "Max locked memory         unlimited            unlimited            bytes\n"
        "Max open files            65536                65536                files\n"
        "Max realtime priority     0                    0\n");
    put("proc/self/cgroup", "0::/jobs/engine");
    put("sys/fs/cgroup/jobs/engine/cpu.max", "max 100000");
    put("sys/fs/cgroup/jobs/engine/memory.max", "max");
    put("sys/fs/cgroup/jobs/cpu.max", "max 100000");
    std::filesystem::create_directories(folder_ / "dev/shm");
  }
  void kernel() {
    put("proc/sys/kernel/osrelease", "6.1.0-31-amd64");
    put("proc/sys/kernel/yama/ptrace_scope", "0");
    put("proc/sys/kernel/sched_rt_runtime_us", "950000");
    put("proc/sys/vm/max_map_count", "65530");
    put("proc/sys/vm/overcommit_memory", "0");
    put("proc/sys/fs/file-nr", "2048\t0\t9223372036854775807");
    put("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu tsc constant_tsc nonstop_tsc avx2");
    put("proc/cmdline", "BOOT_IMAGE=/vmlinuz isolcpus=managed_irq,domain,1 nohz_full=1");
    put("sys/devices/system/cpu/isolated", "1");
    put("sys/devices/system/cpu/nohz_full", "1");
    put("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc");
    put("sys/devices/system/clocksource/clocksource0/available_clocksource", "tsc hpet acpi_pm");
    put("etc/libibverbs.d/mlx5.driver", "driver mlx5");
    std::filesystem::create_directories(folder_ / "usr/lib/x86_64-linux-gnu");
    std::filesystem::create_symlink("libibverbs.so.1.14.44.0",
                                    folder_ / "usr/lib/x86_64-linux-gnu/libibverbs.so.1");
  }
  void memory() {
    put("proc/meminfo", "MemTotal:       32768000 kB\nMemAvailable:   24000000 kB");
    put("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never");
    const std::string pages = "sys/kernel/mm/hugepages/hugepages-2048kB/";
    put(pages + "nr_hugepages", "512");
    put(pages + "free_hugepages", "512");
    put(pages + "resv_hugepages", "0");
    put("sys/devices/system/node/node0/cpulist", "0-1");
    put("sys/devices/system/node/node1/cpulist", "2-3");
  }
  void processor(const std::string& name) {
    const std::string folder = "sys/devices/system/cpu/" + name;
    put(folder + "/cpufreq/scaling_governor", "performance");
    idle_state(folder + "/cpuidle/state0/", "POLL", "0", "0");
    idle_state(folder + "/cpuidle/state1/", "C1", "2", "0");
    idle_state(folder + "/cpuidle/state2/", "C6", "133", "1");
  }
  void idle_state(const std::string& folder, const char* name, const char* latency,
                  const char* disable) {
    put(folder + "name", name).put(folder + "latency", latency).put(folder + "disable", disable);
  }
  void adapter() {
    const std::string device = "sys/class/infiniband/mlx5_0/";
    put(device + "device/numa_node", "0");
    const std::string port = device + "ports/1/";
    put(port + "state", "4: ACTIVE").put(port + "phys_state", "5: LinkUp");
    put(port + "rate", "100 Gb/sec (4X EDR)").put(port + "link_layer", "Ethernet");
    put(port + "active_mtu", "4096");
    gid(port, "0", "fe80:0000:0000:0000:0202:c9ff:fe00:0001", "IB/RoCE v1");
    gid(port, "1", "fe80:0000:0000:0000:0202:c9ff:fe00:0001", "RoCE v2");
    gid(port, "2", "0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1");
    gid(port, "3", "0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2");
    put(port + "gids/4", "0000:0000:0000:0000:0000:0000:0000:0000");
    put("sys/class/net/eth0/mtu", "9000");
    put("sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0");
    put("dev/infiniband/uverbs0", "").put("dev/infiniband/rdma_cm", "");
  }
  void gid(const std::string& port, const std::string& index, const char* address,
           const char* type) {
    put(port + "gids/" + index, address).put(port + "gid_attrs/types/" + index, type);
    put(port + "gid_attrs/ndevs/" + index, "eth0");
  }

  Folder folder_;
};

}  // namespace tools_test
