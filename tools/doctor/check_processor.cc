// What makes a polling thread late: frequency, idle states, other work, the clock, quotas.
#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "doctor/checks.h"

namespace spinwire::doctor {
namespace {

/// An idle state that takes longer to leave costs more than a message.
constexpr std::int64_t kMostIdleMicroseconds = 10;

std::string cpu_folder(int cpu) { return fmt::format("/sys/devices/system/cpu/cpu{}", cpu); }

bool has_word(const std::string& line, std::string_view word) {
  std::istringstream in(line);
  for (std::string next; in >> next;) {
    if (next == word) return true;
  }
  return false;
}

/// The longest time that any process of this host accepts for leaving an idle state.
std::optional<std::int32_t> latency_request(const Reading& file) {
  std::int32_t microseconds = 0;
  if (!file || file.text->size() < sizeof microseconds) return std::nullopt;
  std::memcpy(&microseconds, file.text->data(), sizeof microseconds);
  return microseconds;
}

struct IdleState {
  std::string name;
  std::string path;
  std::int64_t latency = -1;  ///< microseconds until the processor runs again
};

/// The slowest idle state that an allowed processor may enter. Without a path: none is shown.
IdleState slowest_state(const Subject& subject) {
  IdleState slowest;
  for (const int cpu : subject.cpus) {
    const std::string folder = cpu_folder(cpu) + "/cpuidle";
    for (const std::string& state : subject.host.list(folder)) {
      const std::string path = folder + '/' + state;
      if (subject.host.number(path + "/disable").value_or(0) != 0) continue;
      const std::int64_t latency = subject.host.number(path + "/latency").value_or(0);
      if (latency <= slowest.latency) continue;
      slowest = {subject.host.read(path + "/name").text.value_or(state), path, latency};
    }
  }
  return slowest;
}

/// Adds parameters to the kernel's command line, unless it has them.
std::string boot_with(const std::string& parameters) {
  return fmt::format(
      "sed -i '/{0}/!s/^GRUB_CMDLINE_LINUX=\"/&{0} /' /etc/default/grub && update-grub  # and "
      "reboot",
      parameters);
}

/// What the kernel's command line says of idle states.
std::string idle_parameters(const Host& host) {
  std::istringstream words(host.read("/proc/cmdline").text.value_or(""));
  std::string found;
  for (std::string word; words >> word;) {
    if (word.starts_with("intel_idle.") || word.starts_with("processor.") ||
        word.starts_with("idle="))
      found += ' ' + word;
  }
  return found.empty() ? found : "; /proc/cmdline:" + found;
}

void check_counter_flags(const Subject& subject, Findings& findings) {
  const Reading info = subject.host.read("/proc/cpuinfo");
  const auto flags = info ? field(*info.text, "flags") : std::nullopt;
  if (!flags) return;  // not this kind of processor
  std::string missing;
  for (const char* flag : {"constant_tsc", "nonstop_tsc"}) {
    if (!has_word(*flags, flag)) missing += (missing.empty() ? "" : ", ") + std::string(flag);
  }
  findings.add(
      "clock", missing.empty() ? Severity::ok : Severity::warning,
      missing.empty() ? "the time-stamp counter ticks evenly"
                      : "the time-stamp counter may stop or change its rate, so reading "
                        "the time may cost a call of the kernel's clock",
      fmt::format("/proc/cpuinfo: flags {}",
                  missing.empty() ? "has constant_tsc and nonstop_tsc" : "lacks " + missing),
      missing.empty() ? ""
                      : "# no command: a virtual machine of QEMU needs -cpu "
                        "host,migratable=no,+invtsc; an old processor lacks the flags");
}

}  // namespace

void check_governor(const Subject& subject, Findings& findings) {
  std::string slow;
  std::string evidence;
  bool any = false;
  for (const int cpu : subject.cpus) {
    const std::string path = cpu_folder(cpu) + "/cpufreq/scaling_governor";
    const Reading governor = subject.host.read(path);
    if (!governor) continue;
    any = true;
    if (*governor.text == "performance") continue;
    if (slow.empty()) evidence = fmt::format("{}: {}", path, *governor.text);
    slow += fmt::format("{}{}", slow.empty() ? "" : ",", cpu);
  }
  if (!any) {
    findings.add_unknown("governor", "the frequency governor",
                         "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
                         "missing; in a virtual machine, see its host");
    return;
  }
  findings.add(
      "governor", slow.empty() ? Severity::ok : Severity::warning,
      slow.empty() ? "allowed processors keep their frequency"
                   : "processors lower their frequency while they have little to do",
      slow.empty() ? "scaling_governor of allowed processors: performance" : evidence,
      slow.empty() ? "" : fmt::format("cpupower -c {} frequency-set -g performance", slow));
}

void check_idle_states(const Subject& subject, Findings& findings) {
  const IdleState state = slowest_state(subject);
  if (state.path.empty()) {
    findings.add_unknown("idle states", "the idle states of processors",
                         "/sys/devices/system/cpu/cpu*/cpuidle", "missing or empty");
    return;
  }
  if (state.latency <= kMostIdleMicroseconds) {
    findings.add("idle states", Severity::ok, "idle processors wake up at once",
                 fmt::format("/sys/devices/system/cpu/cpu*/cpuidle: longest latency {} us{}",
                             state.latency, idle_parameters(subject.host)));
    return;
  }
  constexpr std::string_view kRequests = "/dev/cpu_dma_latency";
  const Reading file = subject.host.read(kRequests);
  const auto request = latency_request(file);
  const std::string evidence =
      fmt::format("{}/latency: {} us ({}); {}: {}{}", state.path, state.latency, state.name,
                  kRequests, request ? fmt::format("{} us", *request) : "not known, " + file.why,
                  idle_parameters(subject.host));
  if (request && *request <= kMostIdleMicroseconds) {
    findings.add("idle states", Severity::ok, "a process keeps processors from deep idle states",
                 evidence);
    return;
  }
  findings.add("idle states", Severity::warning,
               fmt::format("a processor that slept takes up to {} us to wake up", state.latency),
               evidence, fmt::format("cpupower idle-set -D {}", kMostIdleMicroseconds));
}

void check_isolation(const Subject& subject, Findings& findings) {
  constexpr std::string_view kFolder = "/sys/devices/system/cpu/";
  const Reading isolated = subject.host.read(fmt::format("{}isolated", kFolder));
  const Reading tickless = subject.host.read(fmt::format("{}nohz_full", kFolder));
  const std::string evidence = fmt::format("{0}isolated: {1}; {0}nohz_full: {2}", kFolder,
                                           isolated ? '"' + *isolated.text + '"' : isolated.why,
                                           tickless ? '"' + *tickless.text + '"' : tickless.why);
  const std::vector<int> apart = processors(isolated.text.value_or(""));
  const std::vector<int> quiet = processors(tickless.text.value_or(""));
  const bool both = std::any_of(apart.begin(), apart.end(), [&](int cpu) {
    return std::find(quiet.begin(), quiet.end(), cpu) != quiet.end();
  });
  if (both) {
    findings.add("isolation", Severity::ok,
                 "some processors run nothing but what is pinned to them", evidence);
    return;
  }
  findings.add("isolation", Severity::note,
               apart.empty()
                   ? "no processor is isolated: other processes interrupt a polling thread"
                   : "isolated processors still have timer ticks",
               evidence,
               boot_with(apart.empty()
                             ? "isolcpus=managed_irq,domain,LIST nohz_full=LIST rcu_nocbs=LIST"
                             : fmt::format("nohz_full={0} rcu_nocbs={0}", processors_text(apart))));
}

void check_clock(const Subject& subject, Findings& findings) {
  constexpr std::string_view kFolder = "/sys/devices/system/clocksource/clocksource0/";
  const std::string path = fmt::format("{}current_clocksource", kFolder);
  const Reading current = subject.host.read(path);
  const Reading info = subject.host.read("/proc/cpuinfo");
  const bool has_counter = info && field(*info.text, "flags").has_value();
  if (!current) {
    findings.add_unknown("clock", "the kernel's clock source", path, current.why);
  } else if (has_counter && *current.text != "tsc") {
    const Reading others = subject.host.read(fmt::format("{}available_clocksource", kFolder));
    const bool available = has_word(others.text.value_or(""), "tsc");
    findings.add("clock", Severity::warning,
                 "the kernel does not trust the time-stamp counter: reading the time is slow",
                 fmt::format("{}: {}; available_clocksource: {}", path, *current.text,
                             others.text.value_or(others.why)),
                 available ? fmt::format("echo tsc > {}", path)
                           : "# no command: the kernel found the counter unreliable; see "
                             "'dmesg | grep -i tsc' for the reason");
  } else {
    findings.add("clock", Severity::ok, "the kernel keeps time by a fast clock",
                 fmt::format("{}: {}", path, *current.text));
  }
  check_counter_flags(subject, findings);
}

void check_realtime(const Subject& subject, Findings& findings) {
  constexpr std::string_view kPath = "/proc/sys/kernel/sched_rt_runtime_us";
  const auto runtime = subject.host.number(kPath);
  const auto priority = soft_limit(subject.host, "Max realtime priority");
  if (!runtime || !priority) {
    findings.add_unknown(
        "realtime", "the share of real-time threads", kPath,
        runtime ? "no limit on real-time priority in /proc/self/limits" : "cannot be read");
    return;
  }
  const bool throttled = *priority != 0 && *runtime >= 0;
  findings.add(
      "realtime", throttled ? Severity::warning : Severity::ok,
      throttled ? "the kernel stops real-time threads that always poll, for a part of each second"
                : "no real-time thread is stopped",
      fmt::format("{}: {}; /proc/self/limits: Max realtime priority {}", kPath, *runtime,
                  *priority),
      throttled ? "sysctl -w kernel.sched_rt_runtime_us=-1" : "");
}

void check_cpu_cgroup(const Subject& subject, Findings& findings) {
  if (const Reading groups = subject.host.read("/proc/self/cgroup"); !groups)
    return findings.add_unknown("cpu quota", "the cgroup's quota", "/proc/self/cgroup", groups.why);
  bool limited = false;
  for (const CgroupLimit& limit :
       cgroup_limits(subject.host, "cpu", "cpu.max", "cpu.cfs_quota_us")) {
    if (limit.text.starts_with("max") || limit.text.starts_with("-1")) continue;
    limited = true;
    const bool v2 = limit.path.ends_with("cpu.max");
    findings.add("cpu quota", Severity::warning,
                 "the cgroup has a quota of processor time: a polling thread is stopped for "
                 "milliseconds when it is used up",
                 fmt::format("{}: {}", limit.path, limit.text),
                 fmt::format("echo {} > {}", v2 ? "max" : "-1", limit.path));
  }
  if (!limited)
    findings.add("cpu quota", Severity::ok, "no cgroup limits processor time", "/proc/self/cgroup");
}

}  // namespace spinwire::doctor
