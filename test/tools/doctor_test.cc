// spinwire-doctor on hosts made of files: nothing on a good one, and each planted fault by name.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "spinwire/spinwire.h"
#include "tools/doctor_host.h"
#include "tools/programs.h"

namespace tools_test {
namespace {

const std::string kPages = "sys/kernel/mm/hugepages/hugepages-2048kB/";
const std::string kCpu = "sys/devices/system/cpu/";

/// A finding, as --json prints it.
struct Seen {
  std::string check, severity, text, evidence, remedy;
};

/// All findings that are not in order.
std::vector<Seen> findings_of(const std::string& report) {
  std::vector<Seen> all;
  for (const nlohmann::json& f : parse_object(report).value("findings", nlohmann::json::array())) {
    if (f.at("severity") != "ok")
      all.push_back(
          {f.at("check"), f.at("severity"), f.at("text"), f.at("evidence"), f.at("remedy")});
  }
  return all;
}

/// Without the setting that Program adds: hugepages are a subject here.
Outcome run_doctor(const Words& arguments) {
  Words words{"/usr/bin/env", "-u", "SPINWIRE_MEMORY_HUGEPAGES", bin() + "/spinwire-doctor"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  Program program(words);
  const int code = program.wait();
  return {code, program.out(), program.err()};
}

Outcome examine(const DoctorHost& host, const std::string& settings) {
  const std::string file = host.file("engine.toml");
  std::ofstream(file) << settings;
  return run_doctor({"--json", "--root", host.root(), "--config", file});
}

const std::string kAdapter = "[device]\nname = \"auto\"\n";
const std::string kEmbedded = "[device]\nname = \"softverbs\"\n";

TEST_F(Tools, DoctorFindsNothingOnAGoodHost) {
  const DoctorHost host;
  for (const std::string& settings : {kAdapter, kEmbedded}) {
    const Outcome o = examine(host, settings);
    EXPECT_EQ(o.code, 0) << o.err;
    EXPECT_TRUE(findings_of(o.out).empty()) << o.out;
    EXPECT_EQ(parse_object(o.out).value("worst", ""), "ok") << o.out;
  }
  const Outcome text = run_doctor({"--root", host.root()});
  EXPECT_EQ(text.code, 0) << text.out;
  EXPECT_EQ(text.out.find("0 findings, "), 0u) << text.out;
}

struct Fault {
  const char* name;
  std::function<void(DoctorHost&)> plant;
  std::string settings;
  std::string check, severity, text, remedy;
};
void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.name; }

std::vector<Fault> device_faults() {
  const std::string named = "[device]\nname = \"mlx5_0\"\n";
  return {
      {"NoSuchDevice", [](DoctorHost&) {}, "[device]\nname = \"mlx5_9\"\n", "device", "error",
       "no such device", "spinwire-devices"},
      {"NoDevice",
       [](DoctorHost& h) { h.remove("sys/class/infiniband").remove("sys/class/infiniband_verbs"); },
       kAdapter, "device", "error", "no RDMA device", "rdma link add"},
      {"NoDeviceFile", [](DoctorHost& h) { h.remove("dev/infiniband/uverbs0"); }, kAdapter,
       "device file", "error", "/dev/infiniband/uverbs0 is missing", "modprobe ib_uverbs"},
      {"NoConnectionManager", [](DoctorHost& h) { h.remove("dev/infiniband/rdma_cm"); }, kAdapter,
       "device file", "note", "rdma_cm is missing", "modprobe rdma_ucm"},
      {"PortDown",
       [](DoctorHost& h) {
         h.put(kPort + "state", "1: DOWN").put(kPort + "phys_state", "3: Disabled");
       },
       kAdapter, "port", "error", "is down", "ip link set dev eth0 up"},
      {"NoSubnetManager",
       [](DoctorHost& h) {
         h.put(kPort + "state", "2: INIT").put(kPort + "link_layer", "InfiniBand");
       },
       kAdapter, "port", "error", "subnet manager", "opensm"},
      {"NoGid",
       [](DoctorHost& h) {
         h.remove(kPort + "gids").put("sys/class/infiniband/mlx5_0/parent", "eth0");
       },
       kAdapter, "gid", "error", "no address", "ip address add ADDRESS/PREFIX dev eth0"},
      {"OnlyRoceV1", [](DoctorHost& h) { h.remove(kPort + "gids/1").remove(kPort + "gids/3"); },
       kAdapter, "gid", "error", "RoCE v1", "# no command: RoCE v2 needs a newer driver"},
      {"OnlyRoceV1OfMlx4",
       [](DoctorHost& h) {
         h.remove(kPort + "gids/1").remove(kPort + "gids/3");
         const std::string devices = "sys/class/infiniband/";
         std::filesystem::rename(h.file(devices + "mlx5_0"), h.file(devices + "mlx4_0"));
         h.put("sys/class/infiniband_verbs/uverbs0/ibdev", "mlx4_0");
         h.put("etc/libibverbs.d/mlx4.driver", "driver mlx4");
       },
       kAdapter, "gid", "error", "RoCE v1",
       "echo options mlx4_core roce_mode=2 >>/etc/modprobe.d/mlx4.conf  # and reboot"},
      {"OnlyLinkLocal", [](DoctorHost& h) { h.remove(kPort + "gids/2").remove(kPort + "gids/3"); },
       kAdapter, "gid", "warning", "link-local", "ip address add"},
      {"EmptyGidChosen", [](DoctorHost&) {}, named + "gid_index = 4\n", "gid", "warning",
       "device.gid_index = 4", "spinwire-devices"},
      {"AddressOfNoGid", [](DoctorHost&) {}, named + "address = \"10.0.0.9\"\n", "gid", "warning",
       "10.0.0.9", "ip address add 10.0.0.9/PREFIX dev eth0"},
      {"SmallFrames",
       [](DoctorHost& h) {
         h.put("sys/class/net/eth0/mtu", "1500").put(kPort + "active_mtu", "1024");
       },
       kAdapter, "mtu", "warning", "limits packets to 1024 bytes", "ip link set dev eth0 mtu 4200"},
      {"SmallActiveMtu", [](DoctorHost& h) { h.put(kPort + "active_mtu", "1024"); }, kAdapter,
       "mtu", "warning", "uses 1024 bytes", "ip link set dev eth0 down"},
      {"SmallMtuOfInfiniBand",
       [](DoctorHost& h) {
         h.put(kPort + "link_layer", "InfiniBand").put(kPort + "active_mtu", "1024");
       },
       kAdapter, "mtu", "warning", "uses 1024 bytes",
       "# no command: set mtu=5 in opensm's partitions.conf"},
      {"FarNode", [](DoctorHost& h) { h.put("sys/class/infiniband/mlx5_0/device/numa_node", "1"); },
       kAdapter, "numa", "warning", "node 1", "numactl --cpunodebind=1"},
      {"NoDriverLibrary", [](DoctorHost& h) { h.remove("etc/libibverbs.d/mlx5.driver"); }, kAdapter,
       "libraries", "error", "no part for mlx5_0", "apt-get install ibverbs-providers"},
  };
}

std::vector<Fault> memory_faults() {
  return {
      {"LittleLockableMemory",
       [](DoctorHost& h) {
         h.set_line("proc/self/limits", "Max locked",
                    "Max locked memory         8388608              8388608              bytes");
       },
       kAdapter, "memlock", "error", "too low", "ulimit -l "},
      {"LittleLockableMemoryForPools",
       [](DoctorHost& h) {
         h.set_line("proc/self/limits", "Max locked",
                    "Max locked memory         8388608              8388608              bytes");
       },
       kEmbedded + "[memory]\nlock = \"prefer\"\n", "memlock", "warning", "too low", "ulimit -l "},
      {"NoHugepages",
       [](DoctorHost& h) {
         h.put(kPages + "nr_hugepages", "0").put(kPages + "free_hugepages", "0");
       },
       kAdapter, "hugepages", "warning", "and 0 are free",
       "echo 69 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"},
      {"NoRequiredHugepages",
       [](DoctorHost& h) {
         h.put(kPages + "nr_hugepages", "0").put(kPages + "free_hugepages", "0");
       },
       kAdapter + "[memory]\nhugepages = \"require\"\n", "hugepages", "error", "and 0 are free",
       "echo 69 >"},
      {"HeldHugepages", [](DoctorHost& h) { h.put(kPages + "free_hugepages", "9"); }, kAdapter,
       "hugepages", "warning", "other processes hold", "echo 572 >"},
      {"ReservedHugepages", [](DoctorHost& h) { h.put(kPages + "resv_hugepages", "500"); },
       kAdapter, "hugepages", "warning", "12 are free", "echo 569 >"},
      {"LittleMemory",
       [](DoctorHost& h) { h.set_line("proc/meminfo", "MemAvailable", "MemAvailable: 90000 kB"); },
       kAdapter + "[memory]\nhugepages = \"off\"\n", "memory", "error", "do not fit",
       "spinwire-doctor plan"},
      {"MemoryLimitOfCgroup",
       [](DoctorHost& h) { h.put("sys/fs/cgroup/jobs/memory.max", "67108864"); }, kAdapter,
       "memory", "error", "cgroup", "> /sys/fs/cgroup/jobs/memory.max"},
      {"NoTransparentHugepages",
       [](DoctorHost& h) {
         h.put("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]");
       },
       kAdapter, "thp", "warning", "off", "echo madvise >"},
      {"FewMappings", [](DoctorHost& h) { h.put("proc/sys/vm/max_map_count", "4096"); }, kAdapter,
       "map count", "warning", "too low", "sysctl -w vm.max_map_count="},
      {"StrictOvercommit", [](DoctorHost& h) { h.put("proc/sys/vm/overcommit_memory", "2"); },
       kAdapter, "overcommit", "warning", "reserved memory", "sysctl -w vm.overcommit_memory=0"},
  };
}

std::vector<Fault> processor_faults() {
  return {
      {"SavingGovernor",
       [](DoctorHost& h) { h.put(kCpu + "cpu1/cpufreq/scaling_governor", "powersave"); }, kAdapter,
       "governor", "warning", "lower their frequency",
       "cpupower -c 1 frequency-set -g performance"},
      {"DeepIdleStates", [](DoctorHost& h) { h.put(kCpu + "cpu1/cpuidle/state2/disable", "0"); },
       kAdapter, "idle states", "warning", "133 us", "cpupower idle-set -D 10"},
      {"NothingIsolated", [](DoctorHost& h) { h.put(kCpu + "isolated", ""); }, kAdapter,
       "isolation", "note", "no processor is isolated", "/etc/default/grub && update-grub  #"},
      {"TicksOnIsolated", [](DoctorHost& h) { h.remove(kCpu + "nohz_full"); }, kAdapter,
       "isolation", "note", "timer ticks", "sed -i '/nohz_full=1 rcu_nocbs=1/!s/"},
      {"SlowClock",
       [](DoctorHost& h) {
         h.put("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet");
       },
       kAdapter, "clock", "warning", "does not trust", "echo tsc >"},
      {"UnreliableClock",
       [](DoctorHost& h) {
         const std::string folder = "sys/devices/system/clocksource/clocksource0/";
         h.put(folder + "current_clocksource", "hpet");
         h.put(folder + "available_clocksource", "hpet acpi_pm");
       },
       kAdapter, "clock", "warning", "does not trust", "# no command: the kernel found"},
      {"UnevenCounter",
       [](DoctorHost& h) {
         h.put("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu tsc constant_tsc");
       },
       kAdapter, "clock", "warning", "may stop", "# no command: a virtual machine"},
      {"ThrottledRealtime",
       [](DoctorHost& h) {
         h.set_line("proc/self/limits", "Max realtime", "Max realtime priority     99  99");
       },
       kAdapter, "realtime", "warning", "real-time thread", "sched_rt_runtime_us=-1"},
      {"ProcessorQuota",
       [](DoctorHost& h) { h.put("sys/fs/cgroup/jobs/cpu.max", "150000 100000"); }, kAdapter,
       "cpu quota", "warning", "quota", "echo max > /sys/fs/cgroup/jobs/cpu.max"},
      {"ProcessorQuotaOfVersionOne",
       [](DoctorHost& h) {
         h.put("proc/self/cgroup", "3:cpu,cpuacct:/a\n2:memory:/a");
         h.put("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "50000");
       },
       kAdapter, "cpu quota", "warning", "quota",
       "echo -1 > /sys/fs/cgroup/cpu/a/cpu.cfs_quota_us"},
  };
}

std::vector<Fault> system_faults() {
  return {
      {"OldKernel", [](DoctorHost& h) { h.put("proc/sys/kernel/osrelease", "5.2.1"); }, kEmbedded,
       "kernel", "error", "older than 5.3", "apt-get install linux-image-amd64"},
      {"RatherOldKernel", [](DoctorHost& h) { h.put("proc/sys/kernel/osrelease", "5.10.0-8"); },
       kAdapter, "kernel", "note", "older than 5.14", "apt-get install linux-image-amd64"},
      {"PtraceScope", [](DoctorHost& h) { h.put("proc/sys/kernel/yama/ptrace_scope", "1"); },
       kEmbedded, "ptrace scope", "warning", "register_memory()",
       "sysctl -w kernel.yama.ptrace_scope=0"},
      {"NoMembarrier", [](DoctorHost& h) { h.put("probe/membarrier", "1"); }, kEmbedded,
       "system calls", "error", "refuses membarrier", "seccomp"},
      {"NoMemfd", [](DoctorHost& h) { h.put("probe/memfd_create", "1"); }, kAdapter, "system calls",
       "error", "refuses memfd_create", "seccomp"},
      {"FewDescriptors",
       [](DoctorHost& h) {
         h.set_line("proc/self/limits", "Max open",
                    "Max open files            256                  4096                 files");
       },
       kEmbedded, "open files", "warning", "too low", "ulimit -n "},
      {"HostOutOfFiles", [](DoctorHost& h) { h.put("proc/sys/fs/file-nr", "95000\t0\t100000"); },
       kAdapter, "open files", "warning", "limit on open files", "sysctl -w fs.file-max=200000"},
      {"FolderOnADisk", [](DoctorHost& h) { h.put("probe/disk", ""); }, kAdapter, "observability",
       "warning", "spinwire-stat does not show them", "SPINWIRE_OBSERVABILITY_DIRECTORY="},
      {"NoFolderInMemory", [](DoctorHost& h) { h.remove("dev/shm"); }, kAdapter, "observability",
       "warning", "spinwire-stat does not show them", "mount -t tmpfs"},
  };
}

class DoctorFault : public Tools, public testing::WithParamInterface<Fault> {};
const auto kName = [](const auto& test) { return std::string(test.param.name); };
INSTANTIATE_TEST_SUITE_P(Device, DoctorFault, testing::ValuesIn(device_faults()), kName);
INSTANTIATE_TEST_SUITE_P(Memory, DoctorFault, testing::ValuesIn(memory_faults()), kName);
INSTANTIATE_TEST_SUITE_P(Processor, DoctorFault, testing::ValuesIn(processor_faults()), kName);
INSTANTIATE_TEST_SUITE_P(System, DoctorFault, testing::ValuesIn(system_faults()), kName);

TEST_P(DoctorFault, IsTheOnlyFinding) {
  const Fault& fault = GetParam();
  DoctorHost host;
  fault.plant(host);
  const Outcome o = examine(host, fault.settings);
  const std::vector<Seen> seen = findings_of(o.out);
  ASSERT_EQ(seen.size(), 1u) << o.out << o.err;
  EXPECT_EQ(seen[0].check, fault.check);
  EXPECT_EQ(seen[0].severity, fault.severity);
  EXPECT_NE(seen[0].text.find(fault.text), std::string::npos) << seen[0].text;
  EXPECT_NE(seen[0].remedy.find(fault.remedy), std::string::npos) << seen[0].remedy;
  EXPECT_FALSE(seen[0].evidence.empty());
  EXPECT_TRUE(is_line_for_a_shell(seen[0].remedy));
  EXPECT_EQ(o.code, fault.severity == "error" ? 2 : fault.severity == "warning" ? 1 : 0);
}

/// The printed command changes the kernel's command line once, however often it is run.
TEST_F(Tools, DoctorAddsKernelParametersOnce) {
  DoctorHost host;
  host.remove(kCpu + "nohz_full").put("grub", "GRUB_CMDLINE_LINUX=\"quiet\"");
  const std::vector<Seen> seen = findings_of(examine(host, kAdapter).out);
  ASSERT_EQ(seen.size(), 1u);
  const std::string& remedy = seen[0].remedy;
  const std::string sed = remedy.substr(0, remedy.find(" /etc/default/grub"));
  for (int i = 0; i < 2; ++i) {
    Program shell({"/bin/bash", "-c", sed + " '" + host.file("grub") + "'"});
    EXPECT_EQ(shell.wait(), 0) << shell.err();
  }
  EXPECT_EQ(read_file(host.file("grub")), "GRUB_CMDLINE_LINUX=\"nohz_full=1 rcu_nocbs=1 quiet\"\n")
      << remedy;
}

TEST_F(Tools, DoctorSaysWhatItCannotRead) {
  struct Case {
    const char* path;
    std::size_t findings;
  };
  for (const Case& test : {
           Case{"proc/meminfo", 1},
           {"proc/self/status", 3},  // processors: governor, idle states, NUMA
           {"proc/self/cgroup", 2},
           {"proc/sys/kernel/osrelease", 1},
           {"proc/sys/kernel/sched_rt_runtime_us", 1},
           {"proc/sys/vm/max_map_count", 1},
           {"proc/sys/vm/overcommit_memory", 1},
           {"proc/sys/fs/file-nr", 1},
           {"sys/kernel/mm/transparent_hugepage/enabled", 1},
           {"sys/devices/system/clocksource/clocksource0/current_clocksource", 1},
           {"sys/devices/system/node/node0/cpulist", 1},
           {"sys/class/infiniband/mlx5_0/ports/1/active_mtu", 1},
           {"usr/lib/x86_64-linux-gnu/libibverbs.so.1", 1},
       }) {
    DoctorHost host;
    host.remove(test.path);
    const Outcome o = examine(host, kAdapter);
    const std::vector<Seen> seen = findings_of(o.out);
    EXPECT_EQ(seen.size(), test.findings) << test.path << ": " << o.out;
    for (const Seen& finding : seen) {
      EXPECT_EQ(finding.severity, "note") << test.path;
      EXPECT_EQ(finding.text.find("not known: "), 0u) << finding.text;
    }
    EXPECT_EQ(o.code, 0) << test.path;
  }
}

TEST_F(Tools, DoctorReportsFaultsOfUnusedDevicesAsNotes) {
  DoctorHost host;
  host.put(kPort + "state", "1: DOWN");
  const Outcome o = examine(host, kEmbedded);
  const std::vector<Seen> seen = findings_of(o.out);
  ASSERT_EQ(seen.size(), 1u) << o.out;
  EXPECT_EQ(seen[0].severity, "note");
}

/// MemAvailable does not count hugepages.
TEST_F(Tools, DoctorNeedsNoOtherMemoryForPoolsInHugepages) {
  DoctorHost host;
  host.set_line("proc/meminfo", "MemAvailable", "MemAvailable: 90000 kB");
  const Outcome o = examine(host, kAdapter);
  EXPECT_TRUE(findings_of(o.out).empty()) << o.out;
  EXPECT_EQ(o.code, 0);
}

TEST_F(Tools, DoctorExaminesThisHost) {
  const Outcome o = run_doctor({"--all"});
  EXPECT_LE(o.code, 2) << o.err;
  EXPECT_NE(o.out.find("in order"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("/proc/self/limits"), std::string::npos) << o.out;
}

// ---- plan -------------------------------------------------------------------------------------

struct Planned {
  spinwire::Config config;
  nlohmann::json sizes;
};
/// The settings of a plan, as the library reads them; and the sizes that are printed for them.
Planned plan(const Words& needs) {
  const Folder folder;
  const std::string file = folder / "engine.toml";
  Words words{"plan"};
  words.insert(words.end(), needs.begin(), needs.end());
  const Outcome o = run_doctor(words);
  EXPECT_EQ(o.code, 0) << o.err;
  std::ofstream(file) << o.out;
  auto config = spinwire::Config::load(file);
  EXPECT_TRUE(config) << config.error().message() << o.out;
  const Outcome back = run_doctor({"plan", "--json", "--config", file});
  EXPECT_EQ(back.code, 0) << back.err;
  words.emplace_back("--json");
  EXPECT_EQ(run_doctor(words).out, back.out) << "the same sizes, there and back";
  return {config.value_or(spinwire::Config{}), parse_object(back.out)};
}

TEST_F(Tools, DoctorPlansWhatAnEngineOpensWith) {
  for (const Words& needs :
       {Words{}, Words{"--connections", "40", "--outstanding", "8", "--message-size", "300"},
        Words{"--connections", "8", "--sessions", "100", "--window", "16"},
        Words{"--message-size", "5000000", "--long-messages", "2", "--sessions", "4", "--leases",
              "16", "--lease-bytes", "9000000"}}) {
    Planned planned = plan(needs);
    planned.config.memory.hugepages = spinwire::HugepagePolicy::off;
    auto engine = spinwire::Engine::open(planned.config);
    ASSERT_TRUE(engine) << engine.error().message();
    EXPECT_TRUE(
        engine->serve(1, [](spinwire::Request& request) { (void)request.reply(request.bytes()); }));
    EXPECT_EQ(engine->memory_stats(spinwire::Pool::send).pool_bytes,
              planned.sizes.at("send_bytes"));
    EXPECT_EQ(engine->memory_stats(spinwire::Pool::receive).pool_bytes,
              planned.sizes.at("receive_bytes"));
    EXPECT_EQ(engine->memory_stats(spinwire::Pool::rendezvous).pool_bytes,
              planned.sizes.at("rendezvous_bytes"));
  }
}

TEST_F(Tools, DoctorPlansForTheWholeDemand) {
  const Planned p = plan({"--connections", "100", "--outstanding", "20", "--sessions", "30",
                          "--window", "10", "--message-size", "1000000", "--long-messages", "3"});
  EXPECT_EQ(p.sizes.at("connections_with_all_credits"), 130u)
      << "long calls of a session take a connection";
  EXPECT_EQ(p.sizes.at("sessions_with_whole_window"), 30u);
  EXPECT_EQ(p.sizes.at("longest_messages"), 3u);
  EXPECT_EQ(p.sizes.at("longest_message"), 1000000u);
  EXPECT_EQ(p.config.rpc.window, 16u);
  EXPECT_EQ(p.config.connections.credits, 20u);
}

/// A demand that says nothing of leases does not forbid them.
TEST_F(Tools, DoctorPlansWithoutLeasesOnlyOnDemand) {
  const Planned usual = plan({}), none = plan({"--leases", "0"}), many = plan({"--leases", "2000"});
  EXPECT_EQ(usual.config.leases.maximum, spinwire::Config{}.leases.maximum);
  EXPECT_EQ(usual.config.memory.windows, spinwire::Config{}.memory.windows);
  EXPECT_EQ(none.config.leases.maximum, 0u);
  EXPECT_EQ(none.config.memory.windows, 0u) << "nothing uses them";
  EXPECT_EQ(many.config.leases.maximum, 2000u);
  EXPECT_EQ(usual.sizes.at("pool_bytes"), none.sizes.at("pool_bytes"));
}

TEST_F(Tools, DoctorTakesSizesWithUnits) {
  const Outcome bytes =
      run_doctor({"plan", "--message-size", "4194304", "--lease-bytes", "67108864"});
  const Outcome units = run_doctor({"plan", "--message-size", "4MiB", "--lease-bytes", "64mib"});
  EXPECT_EQ(units.code, 0) << units.err;
  EXPECT_EQ(units.out, bytes.out);
  EXPECT_EQ(run_doctor({"plan", "--message-size", "4 parsecs"}).code, 3);
}

TEST_F(Tools, DoctorNamesTheRangeThatAPlanExceeds) {
  const Outcome o = run_doctor({"plan", "--connections", "70000"});
  EXPECT_EQ(o.code, 3);
  EXPECT_NE(o.err.find("connections.maximum"), std::string::npos) << o.err;
  EXPECT_EQ(o.out, "");
  EXPECT_EQ(run_doctor({"plan", "--config", "x.toml", "--connections", "3"}).code, 3);
}

TEST_F(Tools, DoctorSaysWhenItCannotWork) {
  EXPECT_EQ(run_doctor({"--bogus"}).code, 3);
  EXPECT_EQ(run_doctor({"--config", "/no/such/file"}).code, 3);
}

}  // namespace
}  // namespace tools_test
