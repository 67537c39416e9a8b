// The congestion window of a session.
#pragma once

#include <cstdint>

#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// Adjusts cwnd after a round trip of `trip` ticks. Cold unless there is congestion.
[[gnu::cold]] void adjust_cwnd(Rpc& r, ClientSession& c, std::uint64_t trip,
                               std::uint16_t server_time) noexcept;
/// A request or its reply was lost.
[[gnu::cold]] void on_loss(Rpc& r, ClientSession& c) noexcept;
/// Time for which the server had the request, in ticks; a lower bound for kServerTimeMax.
[[nodiscard]] inline std::uint64_t server_time_ticks(const Rpc& r,
                                                     std::uint16_t server_time) noexcept {
  return r.context.clock.ticks(Nanoseconds(std::int64_t{server_time} << kServerTimeShift));
}

}  // namespace spinwire::rpc
