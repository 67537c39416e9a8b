// Checks a fault plan.
#include "softverbs/faults/fault_plan.h"

#include <initializer_list>
#include <string>
#include <utility>

#include "base/error.h"
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

}  // namespace spinwire::softverbs
