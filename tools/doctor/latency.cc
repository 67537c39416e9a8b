#include "doctor/latency.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>

namespace spinwire::doctor {
namespace {

/// The longest round trip of a sound link whose slower port has at least this rate.
struct LatencyLimit {
  std::string_view link_layer;
  std::string_view links;  ///< those that the limit is for
  double gigabits;
  double microseconds;
};

/// Each limit is a budget, not a measurement, for a round trip through a large network, in
/// microseconds: the two adapters, the links and switches both ways, and 1.5 for the engines at
/// both ends. Adapters of 25 Gbit/s and more take 2 to 3: for short messages perftest's ib_send_lat
/// prints 0.8 to 1.5, which is half of a round trip.
///
/// - InfiniBand from 25 Gbit/s on: 2 for adapters, 3 for five switches of 0.2 and 100 m of fibre.
/// - Older or narrower InfiniBand: 10 for adapters of the time of SDR and DDR, and 3 as above.
/// - Ethernet from 25 Gbit/s on: 3 for adapters, 5 for three switches of 0.5 and the forward error
///   correction of four links, 0.25 each.
/// - Slower Ethernet: 8 for adapters, 16 for three links of 10GBASE-T, whose two ends may delay a
///   packet by 25600 bit times, 2.56 us (IEEE 802.3), and two switches that store packets.
///
/// A processor that sleeps, a governor that saves power or a congested port adds tens.
constexpr std::array kLimits = {
    LatencyLimit{"InfiniBand", "InfiniBand from 25 Gbit/s on", 25, 8},
    LatencyLimit{"InfiniBand", "InfiniBand below 25 Gbit/s", 0, 20},
    LatencyLimit{"Ethernet", "Ethernet from 25 Gbit/s on", 25, 10},
    LatencyLimit{"Ethernet", "Ethernet below 25 Gbit/s", 0, 30},
};
/// If sysfs does not name the link layer.
constexpr LatencyLimit kUnknown{"", "an unknown link layer", 0, 30};

LatencyLimit limit_of(const Port& port, double gigabits) {
  const auto* const found =
      std::find_if(kLimits.begin(), kLimits.end(), [&](const LatencyLimit& limit) {
        return limit.link_layer == port.link_layer && gigabits >= limit.gigabits;
      });
  return found != kLimits.end() ? *found : kUnknown;
}

/// The slower port limits both. A host that does not say its rate does not count.
double slower_rate(const Port& ours, const Facts& theirs) {
  const double there = std::atof(fact(theirs, "port.rate").c_str());
  return there > 0 ? std::min(ours.gigabits(), there) : ours.gigabits();
}

}  // namespace

void judge_latency(const Port* adapter, std::string_view device, const Facts& theirs,
                   double round_trip_us, std::size_t round_trips, Findings& findings) {
  const std::string text =
      fmt::format("{} takes {:.1f} us for a round trip of 64 bytes", device, round_trip_us);
  const std::string evidence = fmt::format("median of {} round trips", round_trips);
  if (adapter == nullptr)
    return findings.add("latency", Severity::ok, text, evidence + "; no limit: it is no adapter");
  const LatencyLimit limit = limit_of(*adapter, slower_rate(*adapter, theirs));
  const bool is_slow = round_trip_us > limit.microseconds;
  findings.add(
      "latency", is_slow ? Severity::warning : Severity::ok,
      is_slow ? text + ", which is long for the link" : text,
      fmt::format("{}; limit for {}: {:g} us; rates of the ports: {} here, {} there", evidence,
                  limit.links, limit.microseconds, adapter->rate, fact(theirs, "port.rate")),
      is_slow ? "spinwire-doctor  # on both hosts: governor, idle states and NUMA node" : "");
}

}  // namespace spinwire::doctor
