// When a poll has to do more than look for completions. Hot.
#pragma once

#include <cstdint>

namespace spinwire::engine {

struct PollSchedule {
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};

  std::uint64_t next_wakeup = 0;       ///< tick from which a poll does more than look
  std::uint64_t next_control = 0;      ///< tick of the next control step; kNever in manual mode
  std::uint64_t control_interval = 0;  ///< ticks

  /// The next poll does more than look for completions.
  void wake_soon() noexcept { next_wakeup = 0; }
  /// The next poll takes a control step, unless the application takes those.
  void step_soon() noexcept {
    if (next_control != kNever) next_control = 0;
    wake_soon();
  }
  /// The earliest tick at which what a poll at `now` finds may have arrived, as far as control
  /// steps tell.
  [[nodiscard]] std::uint64_t last_poll_before(std::uint64_t now) const noexcept {
    const std::uint64_t due = next_control + control_interval;
    return now < due || due < control_interval ? now : next_control;
  }
};

}  // namespace spinwire::engine
