#include "observe/event_places.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/random.h"

namespace spinwire::observe {
namespace {

constexpr std::uint32_t kMostSources = ~0u >> 1;

}  // namespace

EventPlaces::EventPlaces(std::uint32_t count)
    : keys_{base::random_seed(), base::random_seed()},
      size_(count),
      share_(std::max(count / kPartOfSource, 1u)),
      most_of_source_(std::max(count / kPartKeptOfSource, 1u)),
      kept_list_(count),
      others_list_(count + 1),
      places_(std::size_t{count} + 2),
      sources_(count),
      by_key_(count) {
  for (std::uint32_t i = 0; i + 1 < count; ++i) sources_[i].next_free = i + 1;
  for (const std::uint32_t list : {kept_list_, others_list_})
    places_[list].previous = places_[list].next = list;
}

std::uint32_t EventPlaces::key_of(const EventSource& source) const noexcept {
  std::array<std::uint64_t, 2> words;
  std::memcpy(words.data(), source.data(), sizeof words);
  const std::uint64_t first = base::Random::mix(words[0] ^ keys_[0]);
  return static_cast<std::uint32_t>(base::Random::mix(first ^ words[1] ^ keys_[1]));
}

std::uint32_t EventPlaces::take(const EventSource& source) noexcept {
  const std::uint32_t key = key_of(source);
  std::uint32_t index = by_key_.find(key);
  std::uint32_t place = used_;
  if (used_ < size_) {
    ++used_;
  } else {
    // A full ring has others: at most half of it are kept.
    const bool has_share = index != kNone && sources_[index].count >= share_;
    place = has_share ? sources_[index].oldest : places_[others_list_].next;
    displace(place);
    if (index != kNone && sources_[index].count == 0) index = kNone;
  }
  if (index == kNone) {
    index = std::exchange(free_source_, sources_[free_source_].next_free);
    by_key_.insert(key, index);
  }
  add(index, place);
  return place;
}

/// `place`: the oldest one of its source. The first one of the others is, because a source's events
/// come there in their order, and before those that are kept.
void EventPlaces::displace(std::uint32_t place) noexcept {
  const std::uint32_t index = places_[place].source;
  Source& s = sources_[index];
  if (places_[place].is_kept != 0) keep_no_more(place);
  unlink(place);
  s.oldest = places_[place].newer;
  if (--s.count != 0) return;
  by_key_.erase(index);
  s.next_free = std::exchange(free_source_, index);
}

void EventPlaces::add(std::uint32_t index, std::uint32_t place) noexcept {
  Source& s = sources_[index];
  (s.count == 0 ? s.oldest : places_[s.newest].newer) = place;
  if (s.kept == 0) s.oldest_kept = place;
  s.newest = place;
  ++s.count;
  ++s.kept;
  ++kept_;
  places_[place].source = index & kMostSources;
  places_[place].is_kept = 1;
  append(kept_list_, place);
  if (s.kept > most_of_source_) keep_no_more(s.oldest_kept);
  if (kept_ > size_ / kPartKept) keep_no_more(places_[kept_list_].next);
}

/// `place`: the oldest kept one of its source.
void EventPlaces::keep_no_more(std::uint32_t place) noexcept {
  Source& s = sources_[places_[place].source];
  s.oldest_kept = places_[place].newer;
  --s.kept;
  --kept_;
  places_[place].is_kept = 0;
  unlink(place);
  append(others_list_, place);
}

void EventPlaces::append(std::uint32_t list, std::uint32_t place) noexcept {
  Place& p = places_[place];
  p.next = list;
  p.previous = std::exchange(places_[list].previous, place);
  places_[p.previous].next = place;
}

void EventPlaces::unlink(std::uint32_t place) noexcept {
  const Place& p = places_[place];
  places_[p.previous].next = p.next;
  places_[p.next].previous = p.previous;
}

}  // namespace spinwire::observe
