// Lists of records that hold their own links, so that adding a record allocates nothing.
//
//   IntrusiveQueue  first in, first out; one link per record; O(1) at both ends.
//                   For run queues and for records that wait their turn.
//   IntrusiveStack  last in, first out; one link per record.
//                   For records whose order does not matter.
//   IntrusiveList   one IntrusiveLinks per record; O(1) removal from any place.
//                   For records that end in any order, such as leases.
//   RoundQueue      a queue that is emptied in rounds: what a round adds waits for the next one.
//                   For callbacks that may cause more callbacks.
//
// The template argument names the link: a pointer to a member of the record, or a function that
// returns a reference to the link. Use a function when the record's type is incomplete where the
// list is declared, or when the link lies deeper inside the record.
//
//   struct Call {
//     Call* next_due = nullptr;
//   };
//   base::IntrusiveQueue<&Call::next_due> due;
//
//   struct Session;
//   Session*& next_stalled(Session& session) noexcept;
//   base::IntrusiveQueue<next_stalled> stalled;
//
// Rules for all lists: one thread; a record is in at most one list per link; a list does not own
// its records; a record must not move while it is in a list. A record does not know whether it is
// in a list; keep a flag beside the link if you need to know. A range-for loop reads a record's
// link after the loop's body, so the body must not remove the record it visits. To remove records,
// loop over `pop_front()` or take the whole list with `std::exchange`.
#pragma once

#include <functional>
#include <iterator>
#include <utility>

namespace spinwire::base {

/// The links of a record in an IntrusiveList.
template <typename T>
struct IntrusiveLinks {
  T* next = nullptr;
  T* prev = nullptr;
};

namespace list_detail {

template <typename Link>
struct RecordOf;
template <typename T, typename Value>
struct RecordOf<Value T::*> {
  using type = T;
};
template <typename T, typename Value>
struct RecordOf<Value& (*)(T&)> {
  using type = T;
};
template <typename T, typename Value>
struct RecordOf<Value& (*)(T&) noexcept> {
  using type = T;
};

/// Visits a list from its front; `List::next` follows the link.
template <typename List>
class Iterator {
 public:
  using iterator_category = std::forward_iterator_tag;
  using value_type = typename List::value_type;
  using difference_type = std::ptrdiff_t;
  using pointer = value_type*;
  using reference = value_type&;

  Iterator() = default;
  explicit Iterator(pointer at) noexcept : at_(at) {}
  reference operator*() const noexcept { return *at_; }
  pointer operator->() const noexcept { return at_; }
  Iterator& operator++() noexcept {
    at_ = List::next(*at_);
    return *this;
  }
  Iterator operator++(int) noexcept { return std::exchange(*this, Iterator(List::next(*at_))); }
  friend bool operator==(const Iterator&, const Iterator&) = default;

 private:
  pointer at_ = nullptr;
};

}  // namespace list_detail

/// A singly linked queue. Copying it copies the two ends only; move it with `std::exchange`.
template <auto link>
class IntrusiveQueue {
 public:
  using value_type = typename list_detail::RecordOf<decltype(link)>::type;
  using iterator = list_detail::Iterator<IntrusiveQueue>;

  [[nodiscard]] bool empty() const noexcept { return first_ == nullptr; }
  /// The oldest record; null in an empty queue.
  [[nodiscard]] value_type* front() const noexcept { return first_; }
  /// The newest record. The queue must not be empty.
  [[nodiscard]] value_type& back() const noexcept { return *last_; }
  /// The record behind this one; null behind the last.
  [[nodiscard]] static value_type* next(value_type& record) noexcept {
    return std::invoke(link, record);
  }

  void push_back(value_type& record) noexcept {
    std::invoke(link, record) = nullptr;
    (first_ == nullptr ? first_ : std::invoke(link, *last_)) = &record;
    last_ = &record;
  }

  void push_front(value_type& record) noexcept {
    std::invoke(link, record) = first_;
    if (first_ == nullptr) last_ = &record;
    first_ = &record;
  }

  /// Removes the front and returns it. The queue must not be empty.
  value_type& pop_front() noexcept {
    value_type& record = *first_;
    first_ = std::invoke(link, record);
    return record;
  }

  /// Removes a record of this queue, from any place: O(n).
  void erase(value_type& record) noexcept {
    value_type* before = nullptr;
    for (value_type* at = first_; at != &record; at = next(*at)) before = at;
    (before == nullptr ? first_ : std::invoke(link, *before)) = next(record);
    if (last_ == &record) last_ = before;
  }

  [[nodiscard]] iterator begin() const noexcept { return iterator(first_); }
  [[nodiscard]] iterator end() const noexcept { return iterator(); }

 private:
  value_type* first_ = nullptr;
  value_type* last_ = nullptr;  // undefined in an empty queue
};

/// A queue whose records are visited in rounds.
template <auto link>
class RoundQueue {
 public:
  using value_type = typename IntrusiveQueue<link>::value_type;

  /// Whether the next round has nothing to visit.
  [[nodiscard]] bool empty() const noexcept { return waiting_.empty(); }

  /// During a round, the record waits for the next round.
  void push_back(value_type& record) noexcept { waiting_.push_back(record); }

  /// Removes a record of this queue, from any place: O(n).
  void erase(value_type& record) noexcept {
    for (const value_type& each : round_) {
      if (&each == &record) return round_.erase(record);
    }
    waiting_.erase(record);
  }

  /// Removes the records that are in the queue now, the oldest first, and calls `visit(record)` for
  /// each. `visit` may add records, and erase those that it was not called for yet. It must not
  /// throw, and must not run a round.
  template <typename Visit>
  void run_round(Visit&& visit) {
    round_ = std::exchange(waiting_, {});
    while (!round_.empty()) visit(round_.pop_front());
  }

  /// Calls `visit(record)` for each record, the oldest first, until it returns false. `visit` must
  /// not change the queue.
  template <typename Visit>
  void for_each(Visit&& visit) const {
    for (value_type& record : round_) {
      if (!visit(record)) return;
    }
    for (value_type& record : waiting_) {
      if (!visit(record)) return;
    }
  }

 private:
  IntrusiveQueue<link> round_;    ///< the rest of the present round
  IntrusiveQueue<link> waiting_;  ///< for the next round
};

/// A singly linked stack. Copying it copies the front only; move it with `std::exchange`.
template <auto link>
class IntrusiveStack {
 public:
  using value_type = typename list_detail::RecordOf<decltype(link)>::type;
  using iterator = list_detail::Iterator<IntrusiveStack>;

  [[nodiscard]] bool empty() const noexcept { return first_ == nullptr; }
  /// The record below this one; null below the last.
  [[nodiscard]] static value_type* next(value_type& record) noexcept {
    return std::invoke(link, record);
  }

  void push_front(value_type& record) noexcept {
    std::invoke(link, record) = std::exchange(first_, &record);
  }

  /// Removes the front and returns it. The stack must not be empty.
  value_type& pop_front() noexcept { return *std::exchange(first_, next(*first_)); }

  /// Removes a record of this stack, from any place: O(n).
  void erase(value_type& record) noexcept {
    value_type** at = &first_;
    while (*at != &record) at = &std::invoke(link, **at);
    *at = next(record);
  }

  [[nodiscard]] iterator begin() const noexcept { return iterator(first_); }
  [[nodiscard]] iterator end() const noexcept { return iterator(); }

 private:
  value_type* first_ = nullptr;
};

/// A doubly linked list. Copying it copies the two ends only; move it with `std::exchange`.
template <auto link>
class IntrusiveList {
 public:
  using value_type = typename list_detail::RecordOf<decltype(link)>::type;
  using iterator = list_detail::Iterator<IntrusiveList>;

  [[nodiscard]] bool empty() const noexcept { return first_ == nullptr; }
  /// Null in an empty list.
  [[nodiscard]] value_type* front() const noexcept { return first_; }
  /// Null in an empty list.
  [[nodiscard]] value_type* back() const noexcept { return last_; }
  /// The record behind this one; null behind the last.
  [[nodiscard]] static value_type* next(value_type& record) noexcept {
    return std::invoke(link, record).next;
  }

  void push_front(value_type& record) noexcept {
    std::invoke(link, record) = {.next = first_, .prev = nullptr};
    (first_ == nullptr ? last_ : std::invoke(link, *first_).prev) = &record;
    first_ = &record;
  }

  void push_back(value_type& record) noexcept {
    std::invoke(link, record) = {.next = nullptr, .prev = last_};
    (last_ == nullptr ? first_ : std::invoke(link, *last_).next) = &record;
    last_ = &record;
  }

  /// Removes the front and returns it. The list must not be empty.
  value_type& pop_front() noexcept {
    value_type& record = *first_;
    erase(record);
    return record;
  }

  /// Removes a record of this list, from any place: O(1).
  void erase(value_type& record) noexcept {
    const auto links = std::invoke(link, record);
    (links.prev == nullptr ? first_ : std::invoke(link, *links.prev).next) = links.next;
    (links.next == nullptr ? last_ : std::invoke(link, *links.next).prev) = links.prev;
  }

  [[nodiscard]] iterator begin() const noexcept { return iterator(first_); }
  [[nodiscard]] iterator end() const noexcept { return iterator(); }

 private:
  value_type* first_ = nullptr;
  value_type* last_ = nullptr;
};

}  // namespace spinwire::base
