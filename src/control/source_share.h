// How much of a limited number of things, such as sessions, one source may have. Cold.
//
// A source gets one more while it has less than its share, and less than three times of what is
// free. So room is left for others, however many sources take what they can: one has at most three
// quarters, two have three sevenths each, and k of them leave 1 / (3k + 1) free. A fixed share of
// three quarters would let two sources take all.
//
// A source is an IPv4 address or an IPv6 /64, because one host may have all of a /64. Hosts that
// share a /64 follow the same rule in it: a host gets one more while it has less than three times
// of what its /64 may still have. Link-local addresses are hosts of their own, since all links have
// one prefix.
#pragma once

#include <cstdint>

#include "control/address.h"

namespace spinwire::control {

inline constexpr std::uint32_t kShareOfFree = 3;

/// How much more a source that holds `held` may take while `free` are free: each while it has less
/// than three times of what is free.
constexpr std::uint64_t room_of_source(std::uint64_t held, std::uint64_t free) noexcept {
  const std::uint64_t most = kShareOfFree * (free + 1);
  return most > held ? (most - held) / (kShareOfFree + 1) : 0;
}
/// Whether a share (0: three quarters) leaves room for others. A larger one is the user's decision
/// that one source may have all; then the share is the only limit.
constexpr bool leaves_room(std::uint32_t maximum, std::uint32_t share) noexcept {
  return share <= maximum - maximum / 4;
}

class SourceShare {
 public:
  /// What a peer was counted for; see add(). Empty for a peer on this host.
  class Place {
    friend class SourceShare;
    bool is_counted_ = false;
    SourceCounts::iterator source_;
    SourceCounts::iterator host_;
  };

  /// `maximum`: of all sources. `share`: of one; 0: three quarters. See leaves_room().
  SourceShare(std::uint32_t maximum, std::uint32_t share) noexcept
      : share_(share != 0 ? share : maximum - maximum / 4),
        leaves_room_(leaves_room(maximum, share)) {}

  /// Whether the peer may have one more while `free` are free. Peers on this host may, because they
  /// all have one address.
  [[nodiscard]] bool admits(const Address& peer, std::uint32_t free) const noexcept;
  /// How many the peer's source has.
  [[nodiscard]] std::uint32_t used_by(const Address& peer) const noexcept;
  /// Counts one more for the peer. May throw std::bad_alloc.
  [[nodiscard]] Place add(const Address& peer);
  /// Ends what add() has counted.
  void remove(Place& place) noexcept;

 private:
  std::uint32_t share_;
  bool leaves_room_;
  SourceCounts sources_;
  SourceCounts hosts_;
};

}  // namespace spinwire::control
