// When a client makes its connection or session again, at which address and through which local
// path: round after round over both lists, with a pause that grows from round to round. Cold.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/random.h"
#include "control/address.h"
#include "spinwire/clock.h"
#include "spinwire/reconnect.h"
#include "spinwire/status.h"

namespace spinwire::agent {

/// How an attempt, or what it had made, has ended.
struct AttemptEnd {
  bool was_ready = false;
  bool is_final = false;       ///< not is_retryable(): the same attempt again is futile
  std::uint64_t ready_at = 0;  ///< tick
};

class ReconnectPlan {
 public:
  /// The address and its alternatives, of which there is at least one; no paths: the default one.
  ReconnectPlan(const Reconnect& options, const std::vector<control::Address>& addresses,
                const std::vector<LocalPath>& paths, const Clock& clock);
  /// Checks the delays, and reads the addresses. Errors: invalid_argument. May throw.
  static Result<ReconnectPlan> make(const char* asked, const Reconnect& options,
                                    std::string_view address,
                                    const std::vector<std::string>& alternatives,
                                    const Clock& clock, const std::vector<LocalPath>& paths = {});

  /// The address of the present attempt.
  [[nodiscard]] const control::Address& address() const noexcept {
    return addresses_[targets_[place_].address].address;
  }
  /// The local path of the present attempt; null: the default one.
  [[nodiscard]] const LocalPath* local_path() const noexcept {
    return paths_.empty() ? nullptr : &paths_[targets_[place_].path];
  }
  /// Whether there is more than one attempt to a round.
  [[nodiscard]] bool has_choice() const noexcept { return targets_.size() > 1; }
  /// Whether a round is one attempt, through the default path.
  [[nodiscard]] bool is_only_default() const noexcept { return paths_.empty() && !has_choice(); }
  /// Whether the present attempt goes through this port, and another one need not.
  [[nodiscard]] bool can_leave(std::uint32_t port) const noexcept;
  /// Rounds in a row without lasting success.
  [[nodiscard]] std::uint32_t rounds() const noexcept { return rounds_; }
  /// Whether a final end of the present attempt ends all: no other one may succeed.
  [[nodiscard]] bool is_last_hope() const noexcept { return targets_.size() == 1 || all_final_; }
  /// Whether the round has no further attempt.
  [[nodiscard]] bool is_round_over() const noexcept { return left_ == 0; }
  /// Whether an attempt may follow one that ended so.
  [[nodiscard]] bool has_next(const AttemptEnd& end, std::uint64_t now) const noexcept;
  /// Goes on to the next attempt; has_next() must have been true. Returns the pause before it, in
  /// ticks.
  std::uint64_t next(const AttemptEnd& end, std::uint64_t now) noexcept;
  /// Begins the present attempt by `begin`, then the others of this round, until one does not end
  /// at once. Returns how the last one began. The next round tries all again.
  template <typename Begin>
  [[nodiscard]] std::invoke_result_t<const Begin&> begin_round(const Begin& begin,
                                                               std::uint64_t now) {
    auto begun = begin();
    while (!begun && !is_round_over()) {
      (void)next({}, now);
      begun = begin();
    }
    return begun;
  }
  /// The peer at the present address asks for no attempt there before `least` has passed. Other
  /// addresses are tried meanwhile. A random part of up to a quarter is added, so that clients that
  /// were given the same time do not come all at once.
  void hold_off(std::uint64_t now, Nanoseconds least) noexcept {
    const std::uint64_t ticks = clock_.ticks(least);
    addresses_[targets_[place_].address].not_before = now + ticks + random_.below(ticks / 4 + 1);
  }

 private:
  struct PeerAddress {
    control::Address address;
    std::uint64_t not_before = 0;  ///< tick
  };
  /// An attempt of each round.
  struct Target {
    std::uint32_t address = 0;  ///< in `addresses_`
    std::uint32_t path = 0;     ///< in `paths_`
  };
  [[nodiscard]] std::uint64_t not_before(std::uint32_t target) const noexcept {
    return addresses_[targets_[target].address].not_before;
  }
  [[nodiscard]] std::uint32_t rounds_after(const AttemptEnd& end, std::uint64_t now) const noexcept;
  std::uint64_t next_pause() noexcept;
  std::uint64_t skip_held_off(std::uint64_t when) noexcept;

  Reconnect options_;
  Clock clock_;
  base::Random random_;
  std::vector<PeerAddress> addresses_;
  std::vector<LocalPath> paths_;
  std::vector<Target> targets_;
  std::uint32_t place_ = 0;   ///< of the present attempt
  std::uint32_t left_ = 0;    ///< further attempts of this round
  std::uint32_t rounds_ = 0;  ///< without lasting success, behind the first attempts
  bool all_final_ = true;     ///< all attempts of this round so far ended for good
};

/// The error that on_closed reports: of the last attempt, if that is final and has ended all, or
/// else the first error with the code and the goodbye of the last. Its text also names the other.
[[nodiscard]] Error last_error(Error first, Error last, const ReconnectPlan& plan) noexcept;

}  // namespace spinwire::agent
