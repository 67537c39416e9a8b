// Deadlines of many objects, at constant cost per timer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace spinwire::base {

/// Embedded in the object that waits. While scheduled(), it must not move, and must be cancelled
/// before it is destroyed. The user may set `index` and `kind` at any time: the wheel does not read
/// them.
struct Timer {
  Timer() noexcept = default;
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  [[nodiscard]] bool scheduled() const noexcept { return next != nullptr; }

  std::uint32_t index = 0;  ///< the user's, e.g. of the object in its pool
  std::uint16_t kind = 0;   ///< the user's, e.g. which of the object's timers
  // Owned by the wheel.
  std::uint16_t list = 0;
  std::uint64_t deadline = 0;  ///< in ticks, as given
  Timer* next = nullptr;       ///< circular; null while not scheduled
  Timer* prev = nullptr;
};

/// The last multiple of `grid` up to `deadline`: periodic timers of many objects that are due on a
/// grid wake a sleeping engine together.
[[nodiscard]] constexpr std::uint64_t align_down(std::uint64_t deadline,
                                                 std::uint64_t grid) noexcept {
  return grid != 0 ? deadline - deadline % grid : deadline;
}

/// A hierarchical timer wheel: levels of 64 lists, each level 64 times as coarse as the one below.
/// A timer starts in the level of its distance from now and moves down as its deadline gets nearer.
/// It never fires before its deadline; it fires at the first advance() at least `resolution` ticks
/// after. One thread. Never allocates. All calls are amortised O(1). Control step and hot path.
class TimerWheel {
 public:
  static constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

  /// `resolution` in ticks, rounded down to a power of two, at least 1; `now` is the wheel's first
  /// tick.
  TimerWheel(std::uint64_t resolution, std::uint64_t now) noexcept;
  TimerWheel(const TimerWheel&) = delete;
  TimerWheel& operator=(const TimerWheel&) = delete;

  /// Arms a timer that is not scheduled. If its deadline has passed, it fires at the next
  /// advance().
  void schedule(Timer& timer, std::uint64_t deadline) noexcept;
  /// Disarms the timer; a no-op if it is not scheduled.
  void cancel(Timer& timer) noexcept;
  /// Arms the timer again, scheduled or not.
  void reschedule(Timer& timer, std::uint64_t deadline) noexcept {
    cancel(timer);
    schedule(timer, deadline);
  }

  /// Advances time to `now` and calls fire(Timer&) for at most `max_fired` timers that are due, in
  /// the order of their deadlines to within the resolution. Returns the number fired. The work is
  /// bounded: a call that meets a large backlog stops early, and the next one continues. A fired
  /// timer is no longer scheduled. `fire` may schedule and cancel any timer and destroy its own,
  /// but not call advance().
  template <typename Fire>
  std::size_t advance(std::uint64_t now, std::size_t max_fired, Fire&& fire) {
    const std::uint64_t target = now >> shift_;
    if (target < current_) return 0;
    std::size_t fired = 0;
    std::size_t moves = kMovesPerAdvance;
    while (step(target, moves)) {
      while (Timer* timer = first_due()) {
        if (fired == max_fired) return fired;
        cancel(*timer);
        ++fired;
        fire(*timer);
      }
    }
    return fired;
  }

  /// No timer fires before this tick, so advance() need not be called earlier; kNever if none is
  /// scheduled. For a far deadline the tick is early: ask again after advance().
  [[nodiscard]] std::uint64_t next_deadline() const noexcept;
  /// The tick from which advance() fires the first timer, for a caller that sleeps until then;
  /// kNever if none is scheduled. Like next_deadline() it may be early, but only if more than
  /// `most` timers lie in the first list.
  [[nodiscard]] std::uint64_t next_fire(std::size_t most) const noexcept;
  [[nodiscard]] std::size_t size() const noexcept { return size_; }  ///< timers scheduled
  [[nodiscard]] std::uint64_t resolution() const noexcept { return std::uint64_t{1} << shift_; }

 private:
  static constexpr unsigned kBits = 6;
  static constexpr unsigned kSlots = 1u << kBits;
  static constexpr unsigned kLevels = (64 + kBits - 1) / kBits;
  /// Limit on the timers that one advance() moves to a lower level.
  static constexpr std::size_t kMovesPerAdvance = 256;

  [[nodiscard]] unsigned digit(unsigned level) const noexcept {
    return static_cast<unsigned>(current_ >> (level * kBits)) % kSlots;
  }
  [[nodiscard]] Timer* first_due() const noexcept { return lists_[digit(0)]; }
  /// First unit in which a timer with this deadline may fire.
  [[nodiscard]] std::uint64_t unit_of(std::uint64_t deadline) const noexcept {
    return (deadline >> shift_) + ((deadline & (resolution() - 1)) != 0 ? 1 : 0);
  }
  void place(Timer& timer) noexcept;
  void take(Timer& timer) noexcept;
  bool step(std::uint64_t target, std::size_t& moves) noexcept;
  bool come_down(std::size_t& moves) noexcept;
  [[nodiscard]] unsigned lowest_level() const noexcept;
  [[nodiscard]] std::uint64_t slot_start(unsigned level) const noexcept;
  [[nodiscard]] std::uint64_t tick_of(std::uint64_t unit) const noexcept {
    return unit > (kNever >> shift_) ? kNever : unit << shift_;
  }

  unsigned shift_;            ///< ticks to units
  unsigned coming_down_ = 0;  ///< level whose list at `current_` is moving down; 0: none
  std::uint64_t current_;     ///< units; every timer before it has fired
  std::size_t size_ = 0;
  std::array<std::uint64_t, kLevels> used_{};  ///< per level, one bit per list that is not empty
  std::array<Timer*, kLevels * kSlots> lists_{};
};

}  // namespace spinwire::base
