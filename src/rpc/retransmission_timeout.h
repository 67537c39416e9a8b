// The retransmission time-out (RTO) of a session, from the round trips of its calls: RFC 6298.
#pragma once

#include <algorithm>

#include "rpc/congestion.h"
#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// Losses double the session's RTO at most this many times. The backoff of each call starts there.
constexpr unsigned kMaxRtoShift = 3;

/// Jacobson's estimate: smoothed round trip and mean deviation.
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

/// Handles the reply to a call that was sent again. If the server had the request before the
/// resend, the handler is slow and the RTO stays: a longer RTO would delay calls that do get lost.
/// Otherwise the request or the reply was lost or delayed, and the RTO doubles until a reply gives
/// a round trip.
[[gnu::cold, gnu::noinline]] inline void on_retransmitted_reply(
    Rpc& r, ClientSession& c, const ClientSlot& k, std::uint16_t server_time) noexcept {
  const std::uint64_t since = r.context.now - std::min(k.sent_at, r.context.now);
  const std::uint64_t there = server_time_ticks(r, server_time);
  if (server_time != kServerTimeUnknown && (server_time == kServerTimeMax || there >= since))
    return;
  const std::uint64_t rto = std::max(c.srtt + 4 * c.rttvar, r.min_rto);
  c.rto = std::min(2 * c.rto, rto << kMaxRtoShift);
  on_loss(r, c);
}

}  // namespace spinwire::rpc
