#include "base/timer_wheel.h"

#include <algorithm>
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

/// Appends a timer to the list of its deadline. The level is the highest digit in which the timer's
/// unit differs from the current one. So all timers of a level agree with `current_` in the digits
/// above, and every timer of a level fires before those of the next.
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

/// Takes one step towards `target`. True if the current unit may have timers to fire, false if the
/// target is reached or `moves` is used up.
bool TimerWheel::step(std::uint64_t target, std::size_t& moves) noexcept {
  if (!come_down(moves)) return false;
  if (first_due() != nullptr) return true;
  const unsigned level = lowest_level();
  if (level == kLevels || slot_start(level) > target) {
    // No timer lies in between, and the jump changes no timer's highest differing digit.
    current_ = target;
    return false;
  }
  current_ = slot_start(level);
  coming_down_ = level;
  return come_down(moves);
}

/// Moves the timers of the list that the current unit has reached to lower levels. False if `moves`
/// ran out first.
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
  // Timers still to move down may be due before all others.
  std::uint64_t unit = current_;
  if (coming_down_ == 0) {
    const unsigned level = lowest_level();
    if (level == kLevels) return kNever;
    unit = slot_start(level);
  }
  return tick_of(unit);
}

std::uint64_t TimerWheel::next_fire(std::size_t most) const noexcept {
  const unsigned level = lowest_level();
  if (coming_down_ != 0 || level == 0 || level == kLevels) return next_deadline();
  const auto slot = static_cast<unsigned>(std::countr_zero(used_[level]));
  const Timer* const first = lists_[level * kSlots + slot];
  std::uint64_t least = unit_of(first->deadline);
  for (const Timer* timer = first->next; timer != first; timer = timer->next) {
    if (most-- == 0) return next_deadline();
    least = std::min(least, unit_of(timer->deadline));
  }
  return tick_of(least);
}

/// The lowest level that holds timers; kLevels if none does.
unsigned TimerWheel::lowest_level() const noexcept {
  unsigned level = 0;
  while (level < kLevels && used_[level] == 0) ++level;
  return level;
}

/// First unit of a level's first list in use. Unless timers are due or moving down, no list in use
/// lies at or before the level's current digit: its timers have fired or moved down.
std::uint64_t TimerWheel::slot_start(unsigned level) const noexcept {
  const unsigned above = (level + 1) * kBits;
  const std::uint64_t upper = above < 64 ? current_ >> above << above : 0;
  return upper | static_cast<std::uint64_t>(std::countr_zero(used_[level])) << (level * kBits);
}

}  // namespace spinwire::base
