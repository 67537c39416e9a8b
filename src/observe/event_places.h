// Which event of the ring of all subjects a new one displaces. Cold.
//
// While the ring has room, each event takes some: an engine with one peer has the whole ring for
// it. In a full ring this is kept:
//
// - Of the events that are among the newest eight of their source, the newest 512, which is half of
//   the ring. So such an event stays until 64 other sources have had events since, and a source
//   with few events keeps them, however much a few others have to say.
// - Of the others, those that came last. A new event displaces the one that is there for longest:
//   when its source has had eight newer ones, or 64 other sources have become active since. So with
//   more sources than that, this is an ordinary ring of the last events of all.
// - A source that has an eighth of the ring, and so does the engine, displaces its own oldest event
//   instead: it takes no more than that from others.
//
// So events of sources that have gone may stay as long as others need no room, but a source that
// goes on has an eighth of the ring for its newest events, with up to four such sources at a time.
// More of them share half of the ring, by how much they have to say.
//
// To displace from the source with the most, as a router drops from the longest queue, would let
// sources that have gone hold the ring against each new one. A limit in time would be simpler, but
// a peer that stays would get past it, and the events of a single busy peer would be dropped
// although nobody else needs the room.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/key_map.h"

namespace spinwire::observe {

/// Who causes an event: the origin of the peer as control::Source has it. Zero: the engine.
using EventSource = std::array<std::uint8_t, 16>;

/// Of the ring, this part is the most that a source takes from others.
inline constexpr std::uint32_t kPartOfSource = 8;
/// Of the ring, this part is what a source keeps whatever others do: eight of 1,024.
inline constexpr std::uint32_t kPartKeptOfSource = 128;
/// Of the ring, this part is the most that all sources keep in this way.
inline constexpr std::uint32_t kPartKept = 2;

/// The places of a ring, by the source of the event there. Each source with an event there has a
/// record, so there are at most as many as places, and none to evict. Not thread-safe.
class EventPlaces {
 public:
  /// `count`: of places. May throw std::bad_alloc. Set-up: a system call.
  explicit EventPlaces(std::uint32_t count);

  /// Takes a place for an event, after displacing the one there, if any. O(1) on average.
  [[nodiscard]] std::uint32_t take(const EventSource& source) noexcept;

 private:
  static constexpr std::uint32_t kNone = base::KeyMap::kNone;

  struct Source {
    std::uint32_t count = 0;  ///< of its places
    std::uint32_t kept = 0;   ///< of these, in the list of kept ones: the newest
    std::uint32_t oldest = kNone;
    std::uint32_t oldest_kept = kNone;
    std::uint32_t newest = kNone;
    std::uint32_t next_free = kNone;  ///< of a free record
  };
  /// A place is in one of two lists, which are circular and begin at a place that no event has.
  struct Place {
    std::uint32_t source : 31 = 0;
    std::uint32_t is_kept : 1 = 0;
    std::uint32_t newer = kNone;  ///< the next one of its source
    std::uint32_t previous = kNone;
    std::uint32_t next = kNone;
  };

  /// Sources are told apart by 32 bits that nobody outside can predict. Two sources that share
  /// them, which has a chance of 2^-32, share their places.
  [[nodiscard]] std::uint32_t key_of(const EventSource& source) const noexcept;
  void displace(std::uint32_t place) noexcept;
  void add(std::uint32_t index, std::uint32_t place) noexcept;
  void keep_no_more(std::uint32_t place) noexcept;
  void append(std::uint32_t list, std::uint32_t place) noexcept;
  void unlink(std::uint32_t place) noexcept;

  std::array<std::uint64_t, 2> keys_;  ///< of key_of()
  std::uint32_t size_;
  std::uint32_t share_;            ///< the most that a source takes from others
  std::uint32_t most_of_source_;   ///< kept ones of a source
  std::uint32_t used_ = 0;         ///< places that have an event
  std::uint32_t kept_ = 0;         ///< of these, in the list of kept ones
  std::uint32_t free_source_ = 0;  ///< the first free record
  std::uint32_t kept_list_;        ///< the place at which it begins; the oldest event comes first
  std::uint32_t others_list_;
  std::vector<Place> places_;
  std::vector<Source> sources_;
  base::KeyMap by_key_;
};

}  // namespace spinwire::observe
