#include "observe/event_places.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/random.h"

namespace spinwire::observe {

EventPlaces::EventPlaces(std::uint32_t count)
    : multipliers_{base::random_seed() | 1, base::random_seed() | 1},
      share_(std::max(count / kPartOfSource, 1u)),
      newer_(count, kNone),
      sources_(count),
      by_count_(std::size_t{count} + 1, kNone),
      by_key_(count) {
  for (std::uint32_t i = 0; i + 1 < count; ++i) sources_[i].next = i + 1;
}

std::uint32_t EventPlaces::key_of(const EventSource& source) const noexcept {
  std::array<std::uint64_t, 2> words;
  std::memcpy(words.data(), source.data(), sizeof words);
  return static_cast<std::uint32_t>((words[0] * multipliers_[0] + words[1] * multipliers_[1]) >>
                                    32);
}

bool EventPlaces::yields(std::uint32_t index, const EventSource& source) const noexcept {
  const std::uint32_t count = sources_[index].count;
  return count == most_ || (count >= share_ && source != EventSource{});
}

std::uint32_t EventPlaces::take(const EventSource& source) noexcept {
  const std::uint32_t key = key_of(source);
  std::uint32_t index = by_key_.find(key);
  std::uint32_t place = used_;
  if (used_ < newer_.size()) {
    ++used_;
  } else if (index != kNone && yields(index, source)) {
    return renew_oldest(sources_[index]);
  } else {
    place = displace_oldest(by_count_[most_]);
  }
  if (index == kNone) {
    index = std::exchange(free_source_, sources_[free_source_].next);
    by_key_.insert(key, index);
  }
  add(index, place);
  return place;
}

std::uint32_t EventPlaces::renew_oldest(Source& s) noexcept {
  const std::uint32_t place = s.oldest;
  if (place == s.newest) return place;
  s.oldest = newer_[place];
  newer_[s.newest] = place;
  s.newest = place;
  return place;
}

std::uint32_t EventPlaces::displace_oldest(std::uint32_t index) noexcept {
  Source& s = sources_[index];
  const std::uint32_t place = std::exchange(s.oldest, newer_[s.oldest]);
  set_count(index, s.count - 1);
  if (s.count == 0) {
    by_key_.erase(index);
    s.next = std::exchange(free_source_, index);
  }
  return place;
}

void EventPlaces::add(std::uint32_t index, std::uint32_t place) noexcept {
  Source& s = sources_[index];
  (s.count == 0 ? s.oldest : newer_[s.newest]) = place;
  s.newest = place;
  set_count(index, s.count + 1);
}

void EventPlaces::set_count(std::uint32_t index, std::uint32_t count) noexcept {
  Source& s = sources_[index];
  if (s.count != 0) {
    (s.previous == kNone ? by_count_[s.count] : sources_[s.previous].next) = s.next;
    if (s.next != kNone) sources_[s.next].previous = s.previous;
  }
  // A source with the most places that loses one has the most still, or shares it with others.
  if (s.count == most_ && by_count_[most_] == kNone) most_ = count;
  s.count = count;
  if (count == 0) return;
  s.previous = kNone;
  s.next = std::exchange(by_count_[count], index);
  if (s.next != kNone) sources_[s.next].previous = index;
  most_ = std::max(most_, count);
}

}  // namespace spinwire::observe
