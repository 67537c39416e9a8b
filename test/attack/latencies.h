// How long honest clients wait while a victim is under attack.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "attack/victim.h"

namespace attack_test {

/// The bound on the 99th percentile. It also holds if the TCP backlog is full when the honest
/// client begins.
inline const double kMostMs = 100.0 * slowness();

/// How long something took, each time. On a busy machine either of the two ends may have no
/// processor, and no time of a clock says anything of the library then. So what counts is the time
/// in which both ran: each time that the victim shows how long it has run, the lesser of what both
/// have run since. On a machine with a processor for each, that is the time that passes.
class Latencies {
 public:
  Latencies(const Victim& victim, Node& client) : victim_(victim), client_(client) {}
  /// From `begin()` until `is_over()`. Begins once strangers have all that `is_under_attack()`
  /// wants; fails if they never have.
  template <typename IsUnderAttack, typename Begin, typename IsOver>
  void measure(IsUnderAttack&& is_under_attack, Begin&& begin, IsOver&& is_over) {
    const std::uint64_t next = victim_.control_steps() + kStepsBetween;
    ASSERT_TRUE(
        until({&client_}, [&] { return is_under_attack() && victim_.control_steps() >= next; }))
        << "strangers have " << victim_.handshakes() << " handshakes, " << victim_.sessions()
        << " sessions and " << victim_.connections() << " connections only";
    const auto begun = std::chrono::steady_clock::now();
    Ran seen = now();
    std::chrono::nanoseconds both{0};
    begin();
    (void)until({&client_}, [&] {
      const Ran after = now();
      if (after.victim != seen.victim) {
        both += std::min(after.victim - seen.victim, after.client - seen.client);
        seen = after;
      }
      return is_over();
    });
    both_ms_.push_back(std::chrono::duration<double, std::milli>(both).count());
    passed_ms_.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begun)
            .count());
  }
  /// Prints a line, and returns the 99th percentile of the milliseconds in which both ends ran.
  double print(const char* what) {
    std::sort(both_ms_.begin(), both_ms_.end());
    std::sort(passed_ms_.begin(), passed_ms_.end());
    const std::size_t middle = both_ms_.size() / 2, at = (both_ms_.size() - 1) * 99 / 100;
    std::printf(
        "%zu %s under attack: both ends ran for %.2f ms, p99 %.2f ms, longest %.2f ms; passed: "
        "%.2f ms, p99 %.2f ms\n",
        both_ms_.size(), what, both_ms_[middle], both_ms_[at], both_ms_.back(), passed_ms_[middle],
        passed_ms_[at]);
    std::fflush(stdout);
    return both_ms_[at];
  }

 private:
  struct Ran {
    std::chrono::nanoseconds client, victim;
  };
  /// Control steps before each measurement. Strangers take the places of the peers that gave way to
  /// the last connect.
  static constexpr std::uint64_t kStepsBetween = 32;
  [[nodiscard]] Ran now() const { return {thread_time(), victim_.processor_time()}; }

  const Victim& victim_;
  Node& client_;
  std::vector<double> passed_ms_, both_ms_;
};

/// Expects that what a round measures has a 99th percentile below `most_ms`. A round that the
/// machine has disturbed, for example by stolen processor time, is no proof of a slow library. So
/// the test fails only if two rounds in a row are too slow.
template <typename Round>
void expect_soon(const Victim& victim, Node& client, const char* what, Round&& round,
                 double most_ms = kMostMs) {
  double p99 = most_ms;
  for (int i = 0; i < 2 && p99 >= most_ms; ++i) {
    Latencies latencies(victim, client);
    round(latencies);
    if (testing::Test::HasFailure()) return;
    p99 = std::min(p99, latencies.print(what));
  }
  EXPECT_LT(p99, most_ms) << what << ", in the better of two rounds";
}

}  // namespace attack_test
