#include <fmt/core.h>

#include <algorithm>
#include <set>

#include "doctor/clocks.h"
#include "doctor/plan.h"
#include "doctor/two_hosts.h"
#include "spinwire/version.h"

namespace spinwire::doctor {
namespace {

/// The port that an engine would use; null: none.
const Port* first_port(const Subject& subject) {
  const auto find = [&](auto&& holds) {
    const auto found = std::find_if(subject.ports.begin(), subject.ports.end(), holds);
    return found == subject.ports.end() ? nullptr : &*found;
  };
  const Port* const usable =
      find([&](const Port& port) { return subject.is_wanted(port) && port.is_usable(); });
  return usable != nullptr ? usable
                           : find([&](const Port& port) { return subject.is_wanted(port); });
}

std::string gid_types(const Port& port) {
  std::set<std::string> types;
  for (const Gid& gid : port.gids) {
    if (!gid.is_link_local()) types.insert(gid.type);
  }
  std::string text;
  for (const std::string& type : types) text += (text.empty() ? "" : ", ") + type;
  return text;
}

/// Whether two lists of GID types have one in common.
bool share_gid_type(const std::string& ours, const std::string& theirs) {
  for (std::size_t at = 0; at <= ours.size();) {
    const std::size_t end = std::min(ours.find(", ", at), ours.size());
    if ((", " + theirs + ",").find(", " + ours.substr(at, end - at) + ",") != std::string::npos)
      return true;
    at = end + 2;
  }
  return false;
}

struct Comparison {
  const Facts& ours;
  const Facts& theirs;
  Findings& findings;

  /// Adds a finding that two values differ, or that they agree. What a host does not know does not
  /// differ.
  void compare(std::string_view check, std::string_view name, Severity severity,
               std::string_view effect, std::string_view remedy) const {
    const std::string here = fact(ours, name);
    const std::string there = fact(theirs, name);
    if (here.empty() || there.empty()) return;
    const std::string evidence = fmt::format("{}: {} here, {} there", name, here, there);
    if (here == there) {
      findings.add(check, Severity::ok, fmt::format("{} agrees", name), evidence);
    } else {
      findings.add(check, severity, fmt::format("{} differs: {}", name, effect), evidence,
                   std::string(remedy));
    }
  }

  /// What mends an active MTU that differs although the MTUs of the interfaces agree. An interface
  /// that is set up again takes its MTU to the device.
  [[nodiscard]] std::string set_up_again() const {
    constexpr std::uint32_t kMostMtu = 4096;
    const auto here = number_fact(ours, "port.active_mtu", kMostMtu);
    const auto there = number_fact(theirs, "port.active_mtu", kMostMtu);
    if (!here || !there) return "# no command: a host does not say its active MTU";
    const bool ours_is_less = here < there;
    return fmt::format("ip link set dev {0} down; ip link set dev {0} up  # {1}",
                       interface_fact(ours_is_less ? ours : theirs, "port.netdev"),
                       ours_is_less ? "here" : "there");
  }

  void compare_mtu() const {
    constexpr std::uint32_t kMostMtu = 65536;
    // The texts of the peer do not go into the command: it is to be run as root.
    const auto here = number_fact(ours, "port.netdev_mtu", kMostMtu);
    const auto there = number_fact(theirs, "port.netdev_mtu", kMostMtu);
    const bool ours_is_less = here < there;
    const std::string remedy =
        here && there ? fmt::format("ip link set dev {} mtu {}  # {}",
                                    interface_fact(ours_is_less ? ours : theirs, "port.netdev"),
                                    std::max(*here, *there), ours_is_less ? "here" : "there")
                      : "# no command: a host does not say the MTU of its interface";
    compare("mtu", "port.netdev_mtu", Severity::warning,
            "long packets of one host are lost on the way or at the other", remedy);
    compare("mtu", "port.active_mtu", Severity::warning,
            "queue pairs use the lower one, or are refused",
            here && here == there ? set_up_again() : remedy);
  }

  void compare_gids() const {
    const std::string here = fact(ours, "port.gid_types");
    const std::string there = fact(theirs, "port.gid_types");
    if (here.empty() || there.empty()) return;
    const bool share = share_gid_type(here, there);
    findings.add(
        "gid", share ? Severity::ok : Severity::error,
        share ? "both hosts have GIDs of a common type"
              : "the hosts have no common type of GID: no queue pair connects them",
        fmt::format("port.gid_types: {} here, {} there", here, there),
        share ? "" : "ip address add ADDRESS/PREFIX dev INTERFACE  # where RoCE v2 is missing");
  }
};

}  // namespace

Facts facts_of(const Subject& subject) {
  const Host& host = subject.host;
  Facts facts;
  facts["spinwire"] = std::string(spinwire::version());
  facts[kClockFact] = std::to_string(kClockExchanges);
  facts["kernel"] = host.read("/proc/sys/kernel/osrelease").text.value_or("");
  facts["boot"] = host.read("/proc/sys/kernel/random/boot_id").text.value_or("");
  facts["rdma_core"] = verbs_version(host).first;
  facts["connections.mtu"] = std::to_string(subject.config.connections.mtu);
  if (const Port* const port = first_port(subject)) {
    facts["port.device"] = port->device;
    facts["port.state"] = port->state;
    facts["port.link_layer"] = port->link_layer;
    facts["port.rate"] = port->rate;
    facts["port.gid_types"] = gid_types(*port);
    facts["port.netdev"] = port->netdev;
    if (port->netdev_mtu != 0) facts["port.netdev_mtu"] = std::to_string(port->netdev_mtu);
    if (port->active_mtu != 0) facts["port.active_mtu"] = std::to_string(port->active_mtu);
  }
  return facts;
}

void compare_facts(const Facts& ours, const Facts& theirs, Findings& findings) {
  const Comparison pair{ours, theirs, findings};
  pair.compare("version", "spinwire", Severity::warning,
               "features of the newer release are not used, or connections are refused",
               "# no command: install the same release of Spinwire on both hosts");
  pair.compare("version", "rdma_core", Severity::note, "drivers may behave differently", "");
  pair.compare("version", "kernel", Severity::note, "drivers may behave differently", "");
  pair.compare("link layer", "port.link_layer", Severity::error,
               "InfiniBand and Ethernet do not connect",
               "export SPINWIRE_DEVICE_NAME=NAME  # on one host: a device of the other's kind");
  pair.compare("rate", "port.rate", Severity::note, "the slower port limits both", "");
  pair.compare("settings", "connections.mtu", Severity::note, "connections use the lower one", "");
  pair.compare_mtu();
  pair.compare_gids();
}

Config measuring_config(const Config& config, bool is_small) {
  Config measuring = config;
  if (is_small) {
    if (const auto small = plan(Demand{})) measuring = *small;
    measuring.device = config.device;
    measuring.security = config.security;
    measuring.memory.hugepages = HugepagePolicy::off;
  }
  // A host that is only busy answers within these times.
  measuring.rpc.min_rto = std::chrono::seconds(1);
  measuring.rpc.call_timeout = std::chrono::seconds(30);
  measuring.connections.peer_timeout = std::chrono::seconds(60);
  measuring.connections.handshake_timeout = std::chrono::seconds(20);
  return measuring;
}

}  // namespace spinwire::doctor
