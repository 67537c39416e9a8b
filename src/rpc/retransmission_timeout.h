// The retransmission time-out (RTO) of a session, from the round trips of its calls: RFC 6298.
#pragma once

#include <algorithm>

#include "rpc/rpc.h"

namespace spinwire::rpc {

/// How often losses double the patience with calls that have not gone out yet. Each call's own
/// backs off from there.
constexpr unsigned kMaxRtoShift = 3;

/// After Jacobson: the mean of round trips, and how far they lie from it.
inline void update_rto(const Rpc& r, ClientSession& c, std::uint64_t trip) noexcept {
  if (trip < c.min_rtt) [[unlikely]] {
    if (c.srtt == 0) {
      c.srtt = trip;
      c.rttvar = trip / 2;
    }
    c.min_rtt = trip;
  }
  const auto off = static_cast<std::int64_t>(trip - c.srtt);
  c.srtt += static_cast<std::uint64_t>(off >> 3);
  c.rttvar += static_cast<std::uint64_t>(
      ((off < 0 ? -off : off) - static_cast<std::int64_t>(c.rttvar)) >> 2);
  c.rto = std::max(c.srtt + 4 * c.rttvar, r.min_rto);
}

/// A request was sent again for nothing if the server had it by then: that says nothing of the way,
/// and patience with slow handlers would be the undoing of calls that do get lost. Else it, or its
/// reply, got lost or is slow on its way: there is more patience with the next, until one of them
/// tells of a round trip.
[[gnu::cold, gnu::noinline]] inline void on_retransmitted_reply(Rpc& r, ClientSession& c,
                                                                const ClientSlot& k,
                                                                std::uint16_t held) noexcept {
  const std::uint64_t since = r.context.now - std::min(k.sent_at, r.context.now);
  const std::uint64_t there = server_time_ticks(r, held);
  if (held != kServerTimeUnknown && (held == kServerTimeMax || there >= since)) return;
  const std::uint64_t rto = std::max(c.srtt + 4 * c.rttvar, r.min_rto);
  c.rto = std::min(2 * c.rto, rto << kMaxRtoShift);
  on_loss(r, c);
}

}  // namespace spinwire::rpc
