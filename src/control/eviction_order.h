// Which inbound handshake comes first when one has to give way: of the source with the most
// handshakes, the one that has waited for the longest time. Searches and changes take O(log n) of
// n handshakes, so that a flood does not make each accept as long as the port is large.
// handshake_eviction.cc has the rules. Cold.
//
// A handshake belongs to one group, which names everything else that the rules depend on. Sources
// have positions, in the order of their number of handshakes. A count changes by one, so a source
// changes places with the first or the last one of equal count. For each group a tree has, at the
// position of each source, since when its oldest handshake of that group waits.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/min_tree.h"
#include "control/address.h"

namespace spinwire::control {

/// What an inbound handshake waits for.
enum class WaitsFor : std::uint8_t {
  us,            ///< this engine: it does not give way
  peer,          ///< the peer's next frame
  room,          ///< room for a connection; its peer has said all
  confirmation,  ///< the peer's confirmation: it is a half-open connection
};

struct HandshakeGroup {
  WaitsFor waits_for = WaitsFor::us;
  bool is_proved = false;   ///< the peer has proved a key
  bool is_request = false;  ///< it came through rdma_cm
  friend bool operator==(const HandshakeGroup&, const HandshakeGroup&) noexcept = default;
};

class EvictionOrder {
 public:
  /// Handshakes are named by numbers below `names`; `most` are there at once. May throw
  /// std::bad_alloc. Set-up: all memory is allocated here but that of a new source's record.
  EvictionOrder(std::uint32_t names, std::uint32_t most);
  EvictionOrder(const EvictionOrder&) = delete;
  EvictionOrder& operator=(const EvictionOrder&) = delete;

  /// Adds a handshake, one of `most` at most. May throw std::bad_alloc, without an effect.
  void add(std::uint32_t name, const Source& source, HandshakeGroup group, std::uint64_t since);
  /// Changes what a handshake waits for, and since when. Allocates nothing.
  void move(std::uint32_t name, HandshakeGroup group, std::uint64_t since) noexcept;
  /// Allocates nothing.
  void remove(std::uint32_t name) noexcept;

  /// The handshakes of a source, of all groups.
  [[nodiscard]] std::uint32_t count_of(const Source& source) const noexcept {
    const auto found = slots_.find(source);
    return found != slots_.end() ? sources_[found->second].count : 0;
  }
  /// The handshakes of a handshake's source.
  [[nodiscard]] std::uint32_t count_beside(std::uint32_t name) const noexcept {
    return sources_[at_[name]->source].count;
  }

  struct Found {
    std::uint32_t name = 0;
    std::uint32_t count = 0;  ///< of its source's handshakes
    std::uint64_t since = 0;
  };
  static constexpr std::uint64_t kAnyTime = base::MinTree::kNone - 1;
  /// Of the handshakes in groups that `is_wanted(group)` names which wait since `latest` or longer,
  /// the first. Of those with an equal count and time, one.
  template <typename IsWanted>
  [[nodiscard]] std::optional<Found> first(IsWanted&& is_wanted,
                                           std::uint64_t latest = kAnyTime) const noexcept {
    std::optional<Found> best;
    for (std::uint32_t i = 0; i < kGroups; ++i) {
      if (oldest_[i].least() > latest || !is_wanted(group(i))) continue;
      const Found found = first_of(i, latest);
      if (!best || found.count > best->count ||
          (found.count == best->count && found.since < best->since))
        best = found;
    }
    return best;
  }

  // For audits.
  struct Member {
    Source source;
    HandshakeGroup group;
    std::uint64_t since;
  };
  [[nodiscard]] std::optional<Member> find(std::uint32_t name) const noexcept;
  [[nodiscard]] std::size_t size() const noexcept { return members_.size(); }
  /// Compares everything with a plain count. Returns the first fault; empty: none. May throw
  /// std::bad_alloc.
  [[nodiscard]] std::string audit() const;

 private:
  static constexpr std::uint32_t kGroups = 16;
  static constexpr std::uint32_t index(HandshakeGroup group) noexcept {
    return static_cast<std::uint32_t>(group.waits_for) * 4 + (group.is_proved ? 2 : 0) +
           (group.is_request ? 1 : 0);
  }
  static constexpr HandshakeGroup group(std::uint32_t index) noexcept {
    return {static_cast<WaitsFor>(index / 4), index % 4 >= 2, index % 2 == 1};
  }

  /// Members of one source and group stand together, the oldest first.
  struct Place {
    std::uint32_t source = 0;  ///< in sources_
    std::uint32_t group = 0;
    std::uint64_t since = 0;
    std::uint32_t name = 0;
    friend bool operator<(const Place& a, const Place& b) noexcept {
      return std::tie(a.source, a.group, a.since, a.name) <
             std::tie(b.source, b.group, b.since, b.name);
    }
  };
  using Members = std::set<Place>;
  using Slots = std::map<Source, std::uint32_t>;
  struct SourceRecord {
    Slots::iterator slot;
    std::uint32_t count = 0;  ///< 0: free
    std::uint32_t position = 0;
  };

  [[nodiscard]] Found first_of(std::uint32_t group, std::uint64_t latest) const noexcept;
  [[nodiscard]] std::uint64_t oldest_in(std::uint32_t source, std::uint32_t group) const noexcept;
  void insert(Members::node_type&& node) noexcept;
  [[nodiscard]] Members::node_type extract(std::uint32_t name) noexcept;
  void update_oldest(std::uint32_t source, std::uint32_t group) noexcept;
  void count_up(std::uint32_t source) noexcept;
  void count_down(std::uint32_t source) noexcept;
  void swap_positions(std::uint32_t a, std::uint32_t b) noexcept;

  Members members_;
  std::vector<Members::node_type> spare_;  ///< nodes for the members that may come
  std::vector<Members::iterator> at_;      ///< of each name; the end: no member
  Slots slots_;                            ///< of sources that have members, in sources_
  std::vector<SourceRecord> sources_;
  std::vector<std::uint32_t> order_;      ///< the source at each position, the free ones last
  std::vector<std::uint32_t> with_more_;  ///< [n]: how many sources have more than n members
  std::vector<base::MinTree> oldest_;     ///< of each group, by position
};

}  // namespace spinwire::control
