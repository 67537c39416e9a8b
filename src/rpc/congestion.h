// The congestion window of a session.
#pragma once

#include <cstdint>

#include "rpc/rpc.h"

namespace spinwire::rpc {

/// Adjusts cwnd after a round trip of `trip` ticks. Cold unless congested.
[[gnu::cold]] void adjust_cwnd(Rpc& r, ClientSession& c, std::uint64_t trip,
                               std::uint16_t held) noexcept;
/// A request or its reply got lost.
[[gnu::cold]] void on_loss(Rpc& r, ClientSession& c) noexcept;
/// How long the server had the request, ticks; a lower bound for kServerTimeMax.
[[nodiscard]] inline std::uint64_t server_time_ticks(const Rpc& r, std::uint16_t held) noexcept {
  return r.context.clock.ticks(Nanoseconds(std::int64_t{held} << kServerTimeShift));
}

}  // namespace spinwire::rpc
