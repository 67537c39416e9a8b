// Congestion control by delay, after Swift (Kumar et al., SIGCOMM 2020). cwnd bounds a session's
// calls in flight. It grows by one call per round trip while the delay is within the target. It
// shrinks in proportion to the excess, once per round trip and by half at most. The delay is the
// round trip without the server's time. The target is rpc.target_rtt or, on a longer path, twice
// the shortest round trip. If a single call in flight stays slow for a second, the path itself has
// become longer, and the shortest round trip is measured anew.
//
// Delay alone leaves one call in flight, because a busy server says nothing about the network.
// Losses shrink cwnd below one call: calls are then spaced by more than a round trip, and each
// reply grows cwnd by half. A call that exceeds the RTO counts as lost unless the reply says that
// the server had the request (on_retransmitted_reply()). This code does not run while round trips
// are short and the window is whole.
#include "rpc/congestion.h"

#include <algorithm>

#include "rpc/client_session.h"
#include "rpc/rpc_state.h"

namespace spinwire::rpc {
namespace {

/// cwnd shrinks by four fifths of the relative excess.
constexpr std::uint64_t kBetaParts = 4, kBetaOf = 5;
/// The minimum: one call in this many round trips.
constexpr std::uint32_t kLeast = kCwndPerCall / 64;
/// After this time with one slow call in flight, the path itself has become longer.
constexpr Nanoseconds kPathChangeTime = std::chrono::seconds(1);

/// Allows a decrease only when the round trip after the previous decrease is over.
bool may_shrink(const CongestionWindow& flow, std::uint64_t now, std::uint64_t trip) noexcept {
  return now - std::min(now, flow.last_decrease) >= trip;
}

void shrink(Rpc& r, CongestionWindow& flow, std::uint32_t window) noexcept {
  if (window >= flow.cwnd) return;
  flow.cwnd = window;
  flow.last_decrease = r.context.now;
  ++r.stats.cwnd_reductions;
}

void grow(CongestionWindow& flow) noexcept {
  if (flow.cwnd >= kCwndPerCall) {
    flow.cwnd += kCwndPerCall * kCwndPerCall / flow.cwnd;
  } else {
    flow.cwnd += flow.cwnd / 2 + 1;
  }
  flow.cwnd = std::min(flow.cwnd, flow.max_cwnd);
}

/// The delay that the session's own calls may cause.
std::uint64_t target_of(const Rpc& r, const ClientSession& c) noexcept {
  return c.min_rtt < ~std::uint64_t{0} / 2 ? std::max(r.target_rtt, 2 * c.min_rtt) : r.target_rtt;
}

/// Takes the shortest delay of late for the path's, once it lasts. Returns whether it has done so.
bool follow_path(const Rpc& r, ClientSession& c, std::uint64_t delay) noexcept {
  const std::uint64_t now = r.context.now;
  if (c.recent_min_rtt == ~std::uint64_t{0}) c.slow_since = now;
  c.recent_min_rtt = std::min(c.recent_min_rtt, delay);
  if (now - std::min(c.slow_since, now) < r.context.clock.ticks(kPathChangeTime)) return false;
  c.min_rtt = std::exchange(c.recent_min_rtt, ~std::uint64_t{0});
  return true;
}

/// Paces a cwnd below one call: the next call goes out when its share of the round trips has
/// passed.
void pace(Rpc& r, ClientSession& c, std::uint64_t trip) noexcept {
  c.congestion.next_send = 0;
  if (c.congestion.cwnd < kCwndPerCall) {
    c.congestion.next_send = r.context.now + trip * kCwndPerCall / c.congestion.cwnd;
    schedule_check(r, c, c.congestion.next_send);
  }
  update_send_window(c);
}

}  // namespace

void adjust_cwnd(Rpc& r, ClientSession& c, std::uint64_t trip, std::uint16_t server_time) noexcept {
  // No sample: the reply may be to an earlier transmission, or this process was descheduled or
  // slept.
  if (server_time == kServerTimeUnknown || r.oldest_arrival != r.context.now) return;
  CongestionWindow& flow = c.congestion;
  // kServerTimeMax only shows that nothing was lost.
  const std::uint64_t delay =
      server_time == kServerTimeMax ? 0 : trip - std::min(trip, server_time_ticks(r, server_time));
  if (server_time != kServerTimeMax) c.min_rtt = std::min(c.min_rtt, delay);
  const std::uint64_t target_rtt = target_of(r, c);
  const bool slow = delay > target_rtt && !(flow.cwnd <= kCwndPerCall && follow_path(r, c, delay));
  if (!slow) c.recent_min_rtt = ~std::uint64_t{0};
  if (!slow || flow.cwnd < kCwndPerCall) {
    grow(flow);
  } else if (flow.cwnd > kCwndPerCall && may_shrink(flow, r.context.now, trip)) {
    const std::uint64_t beyond = (delay - target_rtt) * kBetaParts / kBetaOf;
    const std::uint64_t cut = std::min<std::uint64_t>(flow.cwnd * beyond / delay, flow.cwnd / 2);
    shrink(r, flow, std::max(kCwndPerCall, flow.cwnd - static_cast<std::uint32_t>(cut)));
  }
  pace(r, c, delay);
}

void on_loss(Rpc& r, ClientSession& c) noexcept {
  const std::uint64_t target_rtt = target_of(r, c);
  const std::uint64_t trip = std::max(c.srtt, target_rtt);
  if (c.congestion.max_cwnd == 0 || !may_shrink(c.congestion, r.context.now, trip)) return;
  shrink(r, c.congestion, std::max(kLeast, c.congestion.cwnd / 2));
  pace(r, c, target_rtt);
}

}  // namespace spinwire::rpc
