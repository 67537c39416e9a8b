// A fault plan: checks it, and draws what it does to each request.
#include "softverbs/faults/fault_plan.h"

#include <initializer_list>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/random.h"
#include "softverbs/context_gid.h"
#include "softverbs/faults/fault_layer.h"

namespace spinwire::softverbs {
namespace {

constexpr Nanoseconds kLongestDelay = std::chrono::hours(24);
constexpr std::uint64_t kHighestRate = 1'000'000'000'000'000;  // so that sums with it fit 64 bits
constexpr std::uint64_t kLargestBurst = std::uint64_t{1} << 40;
constexpr std::uint32_t kMostHeld = 1u << 16;

// ---- validation -------------------------------------------------------------------------------

Result<void> bad_field(const char* name, const std::string& value, std::string range) {
  return base::fail(Status::invalid_argument,
                    base::format("set a fault plan: {} = {}", name, value), "it is out of range",
                    base::format("give {}", range));
}

Result<void> check_probability(const char* name, double value) {
  if (value >= 0 && value <= 1) return {};  // false for what is not a number
  return bad_field(name, base::format("{}", value), "a probability between 0 and 1");
}

Result<void> check_number(const char* name, std::uint64_t value, std::uint64_t least,
                          std::uint64_t most) {
  if (value >= least && value <= most) return {};
  return bad_field(name, base::format("{}", value), base::format("{} to {}", least, most));
}

Result<void> check_delay(const char* name, Nanoseconds least, Nanoseconds value) {
  if (value >= least && value <= kLongestDelay) return {};
  return bad_field(name, base::format("{} ns", value.count()),
                   base::format("{} to {} ns", least.count(), kLongestDelay.count()));
}

/// The first of all checks that fails.
Result<void> first_of(std::initializer_list<Result<void>> checks) {
  for (const Result<void>& check : checks) {
    if (!check) return check;
  }
  return {};
}

}  // namespace

Result<void> check(const FaultPlan& p) {
  constexpr Nanoseconds kNone{0};
  return first_of({
      check_probability("drop", p.drop),
      check_probability("duplicate", p.duplicate),
      check_probability("reorder", p.reorder),
      check_probability("rnr", p.rnr),
      check_probability("packet_loss", p.packet_loss),
      check_number("reorder_distance", p.reorder_distance, 1, kMostHeld),
      check_number("held_datagrams", p.held_datagrams, 1, kMostHeld),
      check_number("rnr_in_a_row", p.rnr_in_a_row, 1, UINT32_MAX),
      check_number("bytes_per_second", p.bytes_per_second, 0, kHighestRate),
      check_number("burst_bytes", p.burst_bytes, 0, kLargestBurst),
      check_number("fail_status", static_cast<std::uint64_t>(p.fail_status), IBV_WC_LOC_LEN_ERR,
                   IBV_WC_GENERAL_ERR),
      check_delay("reorder_timeout", kNone, p.reorder_timeout),
      check_delay("datagram_delay_min", kNone, p.datagram_delay_min),
      check_delay("datagram_delay_max", p.datagram_delay_min, p.datagram_delay_max),
      check_delay("delay_min", kNone, p.delay_min),
      check_delay("delay_max", p.delay_min, p.delay_max),
      check_delay("round_trip", kNone, p.round_trip),
  });
}

// ---- the limit of bytes per second ------------------------------------------------------------

Result<void> check_rate(std::uint64_t bytes_per_second, std::uint64_t burst_bytes) {
  return first_of({check_number("bytes_per_second", bytes_per_second, 1, kHighestRate),
                   check_number("burst_bytes", burst_bytes, 0, kLargestBurst)});
}

Fate draw(const FaultPlan& plan, std::uint64_t number, Nanoseconds delay_min,
          Nanoseconds delay_max) noexcept {
  base::Random random(base::Random::mix(plan.seed ^ base::Random::mix(number)));
  const auto chance = [&](double probability) {
    constexpr double kUnit = 1.0 / (std::uint64_t{1} << 53);
    return static_cast<double>(random.next() >> 11) * kUnit < probability;
  };
  const auto span = static_cast<std::uint64_t>((delay_max - delay_min).count());
  const auto delay = [&] {
    return static_cast<std::uint64_t>(delay_min.count()) + random.below(span + 1);
  };
  // Each is drawn, needed or not, so that none depends on the others.
  Fate fate{};
  fate.drop = chance(plan.drop);
  fate.duplicate = chance(plan.duplicate);
  fate.rnr = chance(plan.rnr);
  const bool reorder = chance(plan.reorder);
  const auto distance = 1 + static_cast<std::uint32_t>(random.below(plan.reorder_distance));
  fate.overtakers = reorder ? distance : 0;
  fate.delay[0] = delay();
  fate.delay[1] = delay();
  return fate;
}

const FaultPlan& plan_for(const Faults& f, const ibv_gid& peer) noexcept {
  for (const PeerPlan& each : f.peer_plans) {
    if (same_gid(each.peer, peer)) return each.plan;
  }
  return f.plan;
}

ibv_wc_status count_request(Faults& f, const Qp& qp) noexcept {
  ++f.number;
  ++qp.faults->count;
  const FaultPlan& p = f.plan;
  const bool of_queue = p.fail_queue_pair == qp.qp_num;
  const bool fails = p.fail_at != 0 && (p.fail_queue_pair == 0 || of_queue) &&
                     (of_queue ? qp.faults->count : f.number) == p.fail_at;
  return fails ? p.fail_status : IBV_WC_SUCCESS;
}

}  // namespace spinwire::softverbs
