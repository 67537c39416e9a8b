// Checks the fields of a fault plan.
#include "softverbs/faults/fault_plan.h"

#include "softverbs/faults/fault_layer.h"
#include "softverbs/faults/field_checks.h"

namespace spinwire::softverbs {
namespace {

constexpr std::uint64_t kHighestRate = 1'000'000'000'000'000;  // sums with it fit 64 bits
constexpr std::uint64_t kLargestBurst = std::uint64_t{1} << 40;
constexpr std::uint32_t kMostHeld = 1u << 16;
constexpr FieldChecks kChecks("set a fault plan");

}  // namespace

Result<void> check(const FaultPlan& p) {
  return first_failed({
      kChecks.probability("drop", p.drop),
      kChecks.probability("duplicate", p.duplicate),
      kChecks.probability("reorder", p.reorder),
      kChecks.probability("rnr", p.rnr),
      kChecks.probability("packet_loss", p.packet_loss),
      kChecks.number("reorder_distance", p.reorder_distance, 1, kMostHeld),
      kChecks.number("held_datagrams", p.held_datagrams, 1, kMostHeld),
      kChecks.number("rnr_in_a_row", p.rnr_in_a_row, 1, UINT32_MAX),
      kChecks.number("bytes_per_second", p.bytes_per_second, 0, kHighestRate),
      kChecks.number("burst_bytes", p.burst_bytes, 0, kLargestBurst),
      kChecks.number("fail_status", static_cast<std::uint64_t>(p.fail_status), IBV_WC_LOC_LEN_ERR,
                     IBV_WC_GENERAL_ERR),
      kChecks.delay("reorder_timeout", p.reorder_timeout),
      kChecks.delay("datagram_delay_min", p.datagram_delay_min),
      kChecks.delay("datagram_delay_max", p.datagram_delay_max, p.datagram_delay_min),
      kChecks.delay("delay_min", p.delay_min),
      kChecks.delay("delay_max", p.delay_max, p.delay_min),
      kChecks.delay("round_trip", p.round_trip),
  });
}

Result<void> check_rate(std::uint64_t bytes_per_second, std::uint64_t burst_bytes) {
  return first_failed({kChecks.number("bytes_per_second", bytes_per_second, 1, kHighestRate),
                       kChecks.number("burst_bytes", burst_bytes, 0, kLargestBurst)});
}

}  // namespace spinwire::softverbs
