// Sessions with calls in flight, ordered by the time of the last check for resends. A timer per
// session would be simpler, but with thousands of sessions each call would cost cache misses for
// the timer's neighbours.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>

namespace spinwire::rpc {

/// A ring as short as the number of sessions allows, so that it stays in the caches. Calls end in
/// any order. The entry of an idle session is dropped at the front, or when the ring is full.
class RetransmissionQueue {
 public:
  struct Entry {
    std::uint64_t checked_at;  ///< tick of the last check
    std::uint32_t session;     ///< 0: the session's calls have ended
  };
  /// Holds at most `most` sessions. May throw std::bad_alloc. Set-up.
  explicit RetransmissionQueue(std::uint32_t most)
      : entries_(std::make_unique_for_overwrite<Entry[]>(
            std::max(2 * std::bit_ceil(most), kFirstRoom))) {}

  [[nodiscard]] bool full() const noexcept { return tail_ - head_ > mask_; }
  /// Adds a session; the ring must not be full(). Answers the place, for end().
  std::uint16_t add(std::uint64_t now, std::uint32_t session) noexcept {
    entries_[tail_ & mask_] = {now, session};
    return static_cast<std::uint16_t>(tail_++);
  }
  void end(std::uint16_t place) noexcept {
    entries_[place & mask_].session = 0;
    if (((head_ ^ place) & mask_) == 0) ++head_;  // the usual case: entries end in order
  }
  [[nodiscard]] const Entry& at(std::uint16_t place) const noexcept {
    return entries_[place & mask_];
  }
  /// The session whose last check is longest ago; null if there is none.
  [[nodiscard]] const Entry* first() noexcept {
    while (head_ != tail_ && entries_[head_ & mask_].session == 0) ++head_;
    return head_ != tail_ ? &entries_[head_ & mask_] : nullptr;
  }
  void pop() noexcept { ++head_; }
  /// Makes room if the ring is full: drops ended entries and, if that is too little, lengthens the
  /// ring. Calls moved(entry, place) for each entry that has moved. Cold.
  template <typename Moved>
  void make_room(Moved&& moved) noexcept {
    if (first() == nullptr || tail_ - head_ <= room() / 4 * 3) return;
    const std::uint32_t live = gather(head_, moved);
    if (live > room() / 2) {
      const std::uint32_t end = room();
      const std::uint32_t from = head_;
      for (std::uint32_t i = 0; i < live; ++i) {
        entries_[end + i] = entries_[(from + i) & mask_];
        moved(entries_[end + i], static_cast<std::uint16_t>(end + i));
      }
      mask_ = 2 * mask_ + 1;
      head_ = end;
      tail_ = end + live;
    }
  }

 private:
  static constexpr std::uint32_t kFirstRoom = 64;

  [[nodiscard]] std::uint32_t room() const noexcept { return mask_ + 1; }
  /// Gathers the live entries from `to` on. Answers their number.
  template <typename Moved>
  std::uint32_t gather(std::uint32_t to, Moved&& moved) noexcept {
    for (std::uint32_t i = head_; i != tail_; ++i) {
      const Entry entry = entries_[i & mask_];
      if (entry.session == 0) continue;
      entries_[to & mask_] = entry;
      if (to != i) moved(entry, static_cast<std::uint16_t>(to));
      ++to;
    }
    tail_ = to;
    return tail_ - head_;
  }

  std::unique_ptr<Entry[]> entries_;
  std::uint32_t mask_ = kFirstRoom - 1;
  std::uint32_t head_ = 0;
  std::uint32_t tail_ = 0;
};

}  // namespace spinwire::rpc
