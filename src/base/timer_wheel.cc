#include "base/timer_wheel.h"

#include <bit>

#include "base/check.h"

namespace spinwire::base {

TimerWheel::TimerWheel(std::uint64_t resolution, std::uint64_t now) noexcept
    : shift_(resolution <= 1 ? 0 : static_cast<unsigned>(std::bit_width(resolution)) - 1),
      current_(now >> shift_) {}

void TimerWheel::schedule(Timer& timer, std::uint64_t deadline) noexcept {
  SPINWIRE_CHECK(!timer.scheduled(), "a timer lies in one list at a time");
  timer.deadline = deadline;
  place(timer);
  ++size_;
}

void TimerWheel::cancel(Timer& timer) noexcept {
  if (!timer.scheduled()) return;
  take(timer);
  --size_;
}

/// Puts a timer at the end of the list that its deadline asks for. The level is that of the highest
/// digit in which its unit differs from the current one, so all timers of a level agree with
/// `current_` in the digits above, and any level fires wholly before the next.
void TimerWheel::place(Timer& timer) noexcept {
  const std::uint64_t unit = unit_of(timer.deadline);
  unsigned level = 0;
  unsigned slot = digit(0);
  if (unit > current_) {
    level = (63u - static_cast<unsigned>(std::countl_zero(unit ^ current_))) / kBits;
    slot = static_cast<unsigned>(unit >> (level * kBits)) % kSlots;
  }
  timer.list = static_cast<std::uint16_t>(level * kSlots + slot);
  Timer*& head = lists_[timer.list];
  if (head == nullptr) {
    timer.next = timer.prev = &timer;
    head = &timer;
    used_[level] |= std::uint64_t{1} << slot;
  } else {
    timer.next = head;
    timer.prev = head->prev;
    head->prev->next = &timer;
    head->prev = &timer;
  }
}

void TimerWheel::take(Timer& timer) noexcept {
  Timer*& head = lists_[timer.list];
  if (timer.next == &timer) {
    head = nullptr;
    used_[timer.list / kSlots] &= ~(std::uint64_t{1} << (timer.list % kSlots));
  } else {
    timer.next->prev = timer.prev;
    timer.prev->next = timer.next;
    if (head == &timer) head = timer.next;
  }
  timer.next = timer.prev = nullptr;
}

/// One step towards `target`: true when there may be timers to fire at the current unit, false when
/// the target is reached or the call's work is used up.
bool TimerWheel::step(std::uint64_t target, std::size_t& moves) noexcept {
  if (!come_down(moves)) return false;
  if (first_due() != nullptr) return true;
  const unsigned level = lowest_level();
  if (level == kLevels || slot_start(level) > target) {
    // Nothing lies in between, and no timer's highest differing digit changes by going there.
    current_ = target;
    return false;
  }
  current_ = slot_start(level);
  coming_down_ = level;
  return come_down(moves);
}

/// Takes the timers of the list that the current unit has come to down to lower levels. True when
/// that is done, or nothing was to be done.
bool TimerWheel::come_down(std::size_t& moves) noexcept {
  if (coming_down_ == 0) return true;
  const unsigned list = coming_down_ * kSlots + digit(coming_down_);
  while (Timer* timer = lists_[list]) {
    if (moves == 0) return false;
    --moves;
    take(*timer);
    place(*timer);
  }
  coming_down_ = 0;
  return true;
}

std::uint64_t TimerWheel::next_deadline() const noexcept {
  // What is still to come down may be due before all that has.
  std::uint64_t unit = current_;
  if (coming_down_ == 0) {
    const unsigned level = lowest_level();
    if (level == kLevels) return kNever;
    unit = slot_start(level);
  }
  return unit > (kNever >> shift_) ? kNever : unit << shift_;
}

/// The lowest level that holds timers; kLevels if none does.
unsigned TimerWheel::lowest_level() const noexcept {
  unsigned level = 0;
  while (level < kLevels && used_[level] == 0) ++level;
  return level;
}

/// First unit of the first list in use of a level. Unless timers are due or coming down, no list in
/// use lies at or before the level's present digit: those have been fired or taken down.
std::uint64_t TimerWheel::slot_start(unsigned level) const noexcept {
  const unsigned above = (level + 1) * kBits;
  const std::uint64_t upper = above < 64 ? current_ >> above << above : 0;
  return upper | static_cast<std::uint64_t>(std::countr_zero(used_[level])) << (level * kBits);
}

}  // namespace spinwire::base
