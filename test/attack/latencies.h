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
inline constexpr double kMostMs = 100.0;

/// The bound on a slow machine. That is an emulated one, which takes the time that its host has
/// taken from it for processor time: a connect needs 0.3 s of it, or 5 s beside other work. So it
/// bounds turns, control steps that both ends have taken. A connect needs about as many there as on
/// any machine: 20 to 150, and up to 400 more for two attempts that give way.
inline constexpr std::uint64_t kMostTurns = 2000;

/// The place of the 99th percentile among so many sorted samples: the last one of fewer than a
/// hundred, so that a test with few samples bounds the longest.
constexpr std::size_t at_99th_percentile(std::size_t samples) {
  return (samples * 99 + 99) / 100 - 1;
}
static_assert(at_99th_percentile(5) == 4 && at_99th_percentile(50) == 49);
static_assert(at_99th_percentile(100) == 98 && at_99th_percentile(200) == 197);

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
    std::uint64_t turns = 0;
    begin();
    (void)until({&client_}, [&] {
      const Ran after = now();
      if (after.victim != seen.victim) {
        both += std::min(after.victim - seen.victim, after.client - seen.client);
        turns += std::min(after.victim_steps - seen.victim_steps,
                          after.client_steps - seen.client_steps);
        seen = after;
      }
      return is_over();
    });
    turns_.push_back(turns);
    both_ms_.push_back(std::chrono::duration<double, std::milli>(both).count());
    passed_ms_.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begun)
            .count());
  }
  /// Prints a line. Whether the 99th percentile is below the bound of this machine.
  [[nodiscard]] bool are_short(const char* what, double most_ms = kMostMs) {
    std::sort(both_ms_.begin(), both_ms_.end());
    std::sort(passed_ms_.begin(), passed_ms_.end());
    std::sort(turns_.begin(), turns_.end());
    const std::size_t middle = both_ms_.size() / 2, at = at_99th_percentile(both_ms_.size());
    std::printf(
        "%zu %s under attack: both ends ran for %.2f ms, p99 %.2f ms, longest %.2f ms; passed: "
        "%.2f ms, p99 %.2f ms; %llu turns, p99 %llu\n",
        both_ms_.size(), what, both_ms_[middle], both_ms_[at], both_ms_.back(), passed_ms_[middle],
        passed_ms_[at], static_cast<unsigned long long>(turns_[middle]),
        static_cast<unsigned long long>(turns_[at]));
    std::fflush(stdout);
    return slowness() == 1 ? both_ms_[at] < most_ms : turns_[at] < kMostTurns;
  }

 private:
  struct Ran {
    std::chrono::nanoseconds client, victim;
    std::uint64_t client_steps, victim_steps;  ///< control steps
  };
  /// Control steps before each measurement. Strangers take the places of the peers that gave way to
  /// the last connect.
  static constexpr std::uint64_t kStepsBetween = 32;
  [[nodiscard]] Ran now() const {
    return {thread_time(), victim_.processor_time(), client_.engine.stats().control_steps,
            victim_.control_steps()};
  }

  const Victim& victim_;
  Node& client_;
  std::vector<double> passed_ms_, both_ms_;
  std::vector<std::uint64_t> turns_;
};

/// Expects that what a round measures has a 99th percentile below the bound, of `most_ms` where the
/// machine is not slow. A round that the
/// machine has disturbed, for example by stolen processor time, is no proof of a slow library. So
/// the test fails only if two rounds in a row are too slow.
template <typename Round>
void expect_soon(const Victim& victim, Node& client, const char* what, Round&& round,
                 double most_ms = kMostMs) {
  bool is_soon = false;
  for (int i = 0; i < 2 && !is_soon; ++i) {
    Latencies latencies(victim, client);
    round(latencies);
    if (testing::Test::HasFailure()) return;
    is_soon = latencies.are_short(what, most_ms);
  }
  EXPECT_TRUE(is_soon) << what << " take longer than " << most_ms << " ms, or on a slow machine "
                       << kMostTurns << " turns, in both rounds";
}

}  // namespace attack_test
