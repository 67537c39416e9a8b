// Schedules the work of a poll besides completions. Hot.
#pragma once

#include <cstdint>

namespace spinwire::engine {

struct PollSchedule {
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};

  /// A poll at least so many ticks after the one before is reported: see StallDetector.
  std::uint64_t reported_gap = std::uint64_t{1} << 63;
  std::uint64_t next_wakeup = 0;       ///< tick from which a poll does more than check completions
  std::uint64_t next_control = 0;      ///< tick of the next control step; kNever in manual mode
  std::uint64_t control_interval = 0;  ///< ticks

  // Left by the last arm(): see wait.cc.
  bool is_armed = false;          ///< the engine may be asleep
  bool is_brief = false;          ///< and something is awaited that wakes nobody
  bool is_sleep_refused = false;  ///< the last arm() could not open what wakes the engine
  /// Polls that may yet find what has ended a sleep: softverbs wakes its lanes in the first of
  /// them. Each takes a control step.
  std::uint8_t polls_after_sleep = 0;
  /// The last control step has done a part of its work, and the next one can go on with it.
  bool has_more_work = false;
  std::uint64_t sleep_deadline = 0;        ///< tick
  std::uint64_t brief_sleep = 0;           ///< ticks of the next brief sleep
  std::uint64_t completions_at_sleep = 0;  ///< EngineStats::completions

  /// Makes the next poll do more than check completions.
  void wake_soon() noexcept { next_wakeup = 0; }
  /// Makes the next poll take a control step, unless control is manual.
  void step_soon() noexcept {
    if (next_control != kNever) next_control = 0;
    wake_soon();
  }
  /// The earliest possible arrival of completions that a poll at `now` finds, judged by the control
  /// steps; kNever if nobody knows, because the engine has slept: a message wakes it, but the
  /// process may have waited for its processor then.
  [[nodiscard]] std::uint64_t last_poll_before(std::uint64_t now) const noexcept {
    if (now < next_control) [[likely]]
      return now;
    if (polls_after_sleep != 0) return kNever;
    const std::uint64_t due = next_control + control_interval;
    return now < due || due < control_interval ? now : next_control;
  }
};

}  // namespace spinwire::engine
