// Draws the faults of each request from the plan's seed and the request's number.
#include "base/random.h"
#include "softverbs/context_gid.h"
#include "softverbs/faults/fault_layer.h"

namespace spinwire::softverbs {

RequestFaults draw_faults(const FaultPlan& plan, std::uint64_t number, Nanoseconds delay_min,
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
  // All values are drawn, needed or not, so that no fault depends on another's probability.
  RequestFaults faults{};
  faults.drop = chance(plan.drop);
  faults.duplicate = chance(plan.duplicate);
  faults.rnr = chance(plan.rnr);
  const bool reorder = chance(plan.reorder);
  const auto distance = 1 + static_cast<std::uint32_t>(random.below(plan.reorder_distance));
  faults.overtakers = reorder ? distance : 0;
  faults.delay[0] = delay();
  faults.delay[1] = delay();
  return faults;
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
