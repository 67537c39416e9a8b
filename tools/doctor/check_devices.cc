// Devices, ports, GIDs, MTU, NUMA.
#include <arpa/inet.h>
#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

#include "doctor/checks.h"

namespace spinwire::doctor {
namespace {

std::string name_of(const Port& port) {
  return fmt::format("{} port {}", port.device, port.number);
}

std::string netdev_or(const Port& port) { return port.netdev.empty() ? "INTERFACE" : port.netdev; }

std::set<std::string> device_names(const Subject& subject) {
  std::set<std::string> names;
  for (const Port& port : subject.ports) names.insert(port.device);
  return names;
}

/// How severe a fault is that only the configured device has to be without.
Severity severity_of(const Subject& subject, const std::string& device) {
  const bool wanted = subject.uses_devices && (subject.device.empty() || subject.device == device);
  return wanted ? Severity::error : Severity::note;
}

/// The command that makes the device file of a kernel module.
void check_device_file(const Subject& subject, Findings& findings, const std::string& path,
                       const char* module, Severity severity, std::string_view needed_for) {
  const int error = subject.host.access_error(path);
  if (error == 0) {
    findings.add("device file", Severity::ok, fmt::format("{} opens", path), path);
    return;
  }
  const bool missing = error == ENOENT || error == ENXIO;
  findings.add("device file", severity,
               missing
                   ? fmt::format("{} is missing, so {} cannot work", path, needed_for)
                   : fmt::format("this user may not open {}, so {} cannot work", path, needed_for),
               fmt::format("{}: {}", path, std::strerror(error)),
               missing ? fmt::format("modprobe {}", module) : fmt::format("chmod 666 {}", path));
}

/// Whether the GID is the IP address, in IPv6 or mapped.
bool has_address(const Gid& gid, const std::string& address) {
  in6_addr shown{};
  in6_addr wanted{};
  const std::string as_v6 = address.find(':') == std::string::npos ? "::ffff:" + address : address;
  return ::inet_pton(AF_INET6, gid.address.c_str(), &shown) == 1 &&
         ::inet_pton(AF_INET6, as_v6.c_str(), &wanted) == 1 &&
         std::memcmp(&shown, &wanted, sizeof shown) == 0;
}

std::string gids_text(const Port& port) {
  std::string text;
  for (const Gid& gid : port.gids) {
    text += fmt::format("{}{}: {} ({})", text.empty() ? "" : ", ", gid.index, gid.address,
                        gid.type.empty() ? "type not known" : gid.type);
  }
  return fmt::format("{}/gids: {}", port.folder, text.empty() ? "all empty" : text);
}

/// Whether the configured GID is one that peers can reach. Adds a finding if not.
bool check_chosen_gid(const Subject& subject, const Port& port, Findings& findings) {
  const Config::Device& chosen = subject.config.device;
  if (!subject.is_wanted(port)) return true;
  if (chosen.gid_index >= 0) {
    const auto gid = std::find_if(port.gids.begin(), port.gids.end(),
                                  [&](const Gid& g) { return g.index == chosen.gid_index; });
    if (gid != port.gids.end()) return true;
    findings.add(
        "gid", subject.severity_at(port) == Severity::error ? Severity::error : Severity::warning,
        fmt::format("{}: device.gid_index = {} is an empty entry", name_of(port), chosen.gid_index),
        gids_text(port), "spinwire-devices  # then set device.gid_index to one that it lists");
    return false;
  }
  if (chosen.address.empty()) return true;
  const bool found = std::any_of(port.gids.begin(), port.gids.end(),
                                 [&](const Gid& g) { return has_address(g, chosen.address); });
  if (!found) {
    findings.add("gid", Severity::warning,
                 fmt::format("{}: no GID is device.address = {}", name_of(port), chosen.address),
                 gids_text(port),
                 fmt::format("ip address add {}/PREFIX dev {}", chosen.address, netdev_or(port)));
  }
  return found;
}

void check_port_gids(const Subject& subject, const Port& port, Findings& findings) {
  if (!port.is_ethernet()) {
    findings.add("gid", port.gids.empty() ? subject.severity_at(port) : Severity::ok,
                 port.gids.empty() ? fmt::format("{} has no GID", name_of(port))
                                   : fmt::format("{} has {} GIDs", name_of(port), port.gids.size()),
                 gids_text(port),
                 port.gids.empty() ? "systemctl restart opensm  # on its host" : "");
    return;
  }
  const std::string add_address =
      fmt::format("ip address add ADDRESS/PREFIX dev {}", netdev_or(port));
  const auto any = [&](auto&& holds) {
    return std::any_of(port.gids.begin(), port.gids.end(), holds);
  };
  if (port.gids.empty()) {
    findings.add("gid", subject.severity_at(port),
                 fmt::format("{} has no GID: its interface has no address", name_of(port)),
                 gids_text(port), add_address);
  } else if (!any([](const Gid& g) { return g.is_v2() || g.type.empty(); })) {
    findings.add(
        "gid", subject.severity_at(port),
        fmt::format("{} has only GIDs of RoCE v1, which routers and most peers do not take",
                    name_of(port)),
        gids_text(port),
        port.device.starts_with("mlx4")
            ? "echo options mlx4_core roce_mode=2 >>/etc/modprobe.d/mlx4.conf  # and reboot"
            : "# no command: RoCE v2 needs a newer driver or adapter");
  } else if (!any([](const Gid& g) { return !g.is_link_local(); })) {
    findings.add("gid",
                 subject.severity_at(port) == Severity::error ? Severity::warning : Severity::note,
                 fmt::format("{} has only link-local GIDs: peers of other networks do not reach it",
                             name_of(port)),
                 gids_text(port), add_address);
  } else if (check_chosen_gid(subject, port, findings)) {
    findings.add("gid", Severity::ok, fmt::format("{} has an address for RoCE v2", name_of(port)),
                 gids_text(port));
  }
}

void check_port_mtu(const Subject& subject, const Port& port, Findings& findings) {
  const std::uint32_t wanted = subject.config.connections.mtu;
  const Severity severity =
      subject.is_wanted(port) && port.is_active() ? Severity::warning : Severity::note;
  const std::string evidence =
      fmt::format("active MTU {} (ibv_query_port); /sys/class/net/{}/mtu: {}; connections.mtu = {}",
                  port.active_mtu == 0 ? "not known" : std::to_string(port.active_mtu), port.netdev,
                  port.netdev_mtu, wanted);
  const std::uint32_t allowed = port.is_ethernet() ? path_mtu_of(port.netdev_mtu) : 4096;
  if (port.is_ethernet() && port.netdev_mtu == 0) {
    findings.add_unknown("mtu", fmt::format("the interface of {}", name_of(port)),
                         port.folder + "/gid_attrs/ndevs", "names none");
  } else if (allowed < wanted) {
    findings.add("mtu", severity,
                 fmt::format("{}: the MTU of {} limits packets to {} bytes", name_of(port),
                             port.netdev, allowed),
                 evidence, fmt::format("ip link set dev {} mtu {}", port.netdev, wanted + 104));
  } else if (port.active_mtu != 0 && port.active_mtu < std::min(allowed, wanted)) {
    findings.add("mtu", severity,
                 fmt::format("{} uses {} bytes, although its network takes {}", name_of(port),
                             port.active_mtu, allowed),
                 evidence,
                 port.is_ethernet()
                     ? fmt::format("ip link set dev {0} down; ip link set dev {0} up", port.netdev)
                     : "# no command: set mtu=5 in opensm's partitions.conf, on the subnet "
                       "manager's host");
  } else if (port.active_mtu == 0 && subject.is_wanted(port)) {
    findings.add_unknown("mtu", fmt::format("the active MTU of {}", name_of(port)),
                         "ibv_query_port", "the device does not open");
  } else {
    findings.add("mtu", Severity::ok,
                 fmt::format("{} takes packets of {} bytes", name_of(port), wanted), evidence);
  }
}

}  // namespace

void check_devices(const Subject& subject, Findings& findings) {
  const std::set<std::string> names = device_names(subject);
  const std::string evidence =
      fmt::format("/sys/class/infiniband: {}",
                  names.empty() ? "empty or missing" : fmt::format("{} names", names.size()));
  if (!subject.device.empty() && !names.contains(subject.device)) {
    findings.add("device", Severity::error,
                 fmt::format("device.name = \"{}\": this host has no such device",
                             subject.config.device.name),
                 evidence, "spinwire-devices  # then set device.name to one that it lists");
  } else if (names.empty() && subject.uses_devices) {
    const bool needed = !subject.uses_softverbs;
    findings.add("device", needed ? Severity::error : Severity::note,
                 needed ? "this host has no RDMA device"
                        : "this host has no RDMA device; the embedded device serves it alone",
                 evidence,
                 needed ? "modprobe rdma_rxe; rdma link add rxe0 type rxe netdev INTERFACE" : "");
  } else {
    findings.add(
        "device", Severity::ok,
        names.empty() ? "no RDMA device is needed" : fmt::format("RDMA devices: {}", names.size()),
        evidence);
  }
}

void check_device_files(const Subject& subject, Findings& findings) {
  for (const std::string& device : device_names(subject)) {
    std::string file;
    for (const std::string& name : subject.host.list("/sys/class/infiniband_verbs")) {
      const std::string path = "/sys/class/infiniband_verbs/" + name + "/ibdev";
      if (subject.host.read(path).text.value_or("") == device) file = "/dev/infiniband/" + name;
    }
    if (file.empty()) {
      findings.add(
          "device file", severity_of(subject, device),
          fmt::format("{} has no file for programs: the module ib_uverbs is missing", device),
          "/sys/class/infiniband_verbs: names no such device", "modprobe ib_uverbs");
    } else {
      check_device_file(subject, findings, file, "ib_uverbs", severity_of(subject, device), device);
    }
  }
  if (!subject.ports.empty())
    check_device_file(subject, findings, "/dev/infiniband/rdma_cm", "rdma_ucm", Severity::note,
                      "Via::rdma_cm");
}

void check_ports(const Subject& subject, Findings& findings) {
  for (const Port& port : subject.ports) {
    const std::string evidence = fmt::format("{0}/state: \"{1}\", {0}/phys_state: \"{2}\"",
                                             port.folder, port.state, port.phys_state);
    if (port.state.empty()) {
      findings.add_unknown("port", fmt::format("the state of {}", name_of(port)),
                           port.folder + "/state", "cannot be read");
    } else if (port.is_active()) {
      findings.add("port", Severity::ok, fmt::format("{} is active, {}", name_of(port), port.rate),
                   evidence);
    } else if (port.state.starts_with("2") && !port.is_ethernet()) {
      findings.add("port", subject.severity_at(port),
                   fmt::format("{} waits for a subnet manager", name_of(port)), evidence,
                   "systemctl start opensm  # on one host of the network");
    } else {
      findings.add("port", subject.severity_at(port), fmt::format("{} is down", name_of(port)),
                   evidence,
                   fmt::format("ip link set dev {} up  # if it stays down, see to the cable and "
                               "the switch",
                               netdev_or(port)));
    }
  }
}

void check_gids(const Subject& subject, Findings& findings) {
  for (const Port& port : subject.ports) {
    if (port.is_active()) check_port_gids(subject, port, findings);
  }
}

void check_mtu(const Subject& subject, Findings& findings) {
  for (const Port& port : subject.ports) check_port_mtu(subject, port, findings);
}

void check_numa(const Subject& subject, Findings& findings) {
  std::set<std::string> seen;
  for (const Port& port : subject.ports) {
    if (port.numa_node < 0 || !seen.insert(port.device).second) continue;
    const std::string path = fmt::format("/sys/devices/system/node/node{}/cpulist", port.numa_node);
    const Reading list = subject.host.read(path);
    if (!list) {
      findings.add_unknown("numa", fmt::format("the processors near {}", port.device), path,
                           list.why);
      continue;
    }
    if (subject.cpus.empty()) {
      findings.add_unknown("numa", "the allowed processors", "/proc/self/status",
                           "has no Cpus_allowed_list");
      continue;
    }
    const std::vector<int> near = processors(*list.text);
    std::vector<int> both;
    for (const int cpu : subject.cpus) {
      if (std::find(near.begin(), near.end(), cpu) != near.end()) both.push_back(cpu);
    }
    const std::string evidence =
        fmt::format("numa_node of {}: {}; {}: {}; allowed processors: {}", port.device,
                    port.numa_node, path, *list.text, processors_text(subject.cpus));
    if (both.empty()) {
      findings.add(
          "numa", subject.is_wanted(port) ? Severity::warning : Severity::note,
          fmt::format("{} is on node {}, and this process may run on none of its processors",
                      port.device, port.numa_node),
          evidence, fmt::format("numactl --cpunodebind={0} --membind={0} COMMAND", port.numa_node));
    } else {
      findings.add("numa", both.size() == subject.cpus.size() ? Severity::ok : Severity::note,
                   fmt::format("{} is on node {}; of the allowed processors, {} are near",
                               port.device, port.numa_node, both.size()),
                   evidence,
                   both.size() == subject.cpus.size()
                       ? ""
                       : fmt::format("taskset -c {} COMMAND", processors_text(both)));
    }
  }
}

}  // namespace spinwire::doctor
