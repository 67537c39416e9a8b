// Which event of the ring of all subjects a new one displaces. Cold.
//
// While the ring has room, each event takes some. A full ring displaces the oldest event of the
// source that has the most there, as a router drops from the longest queue. So a source with many
// events displaces none of a source with fewer, however often it connects, and an engine with one
// peer has the whole ring for it. A source that has an eighth of the ring displaces its own oldest
// event instead: one source displaces at most so many events of others. The engine's own events
// have no such limit.
//
// A limit in time would be simpler, but a peer that stays would get past it, and the events of a
// single busy peer would be dropped although nobody else needs the room.
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
    std::uint32_t oldest = kNone;
    std::uint32_t newest = kNone;
    std::uint32_t next = kNone;  ///< with as many places; of a free record: the next one
    std::uint32_t previous = kNone;
  };

  /// Sources are told apart by 32 bits that nobody outside can predict. Two sources that share
  /// them, which has a chance of 2^-32, share their places.
  [[nodiscard]] std::uint32_t key_of(const EventSource& source) const noexcept;
  /// Whether the source displaces its own oldest event in a full ring.
  [[nodiscard]] bool yields(std::uint32_t index, const EventSource& source) const noexcept;
  [[nodiscard]] std::uint32_t renew_oldest(Source& s) noexcept;
  [[nodiscard]] std::uint32_t displace_oldest(std::uint32_t index) noexcept;
  void add(std::uint32_t index, std::uint32_t place) noexcept;
  void set_count(std::uint32_t index, std::uint32_t count) noexcept;

  std::array<std::uint64_t, 2> multipliers_;  ///< of key_of()
  std::uint32_t share_;                       ///< the most that a source takes from others
  std::uint32_t used_ = 0;                    ///< places that have an event
  std::uint32_t most_ = 0;                    ///< places of the source with the most
  std::uint32_t free_source_ = 0;             ///< the first free record
  std::vector<std::uint32_t> newer_;          ///< by place: the next one of its source
  std::vector<Source> sources_;
  std::vector<std::uint32_t> by_count_;  ///< the first source with so many places
  base::KeyMap by_key_;
};

}  // namespace spinwire::observe
