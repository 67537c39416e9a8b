// Congestion, as round trips tell of it. A session's calls under way are bounded by a window that
// grows by one call each round trip while those take less than rpc.target_delay, and shrinks in
// proportion to what they take more, once a round trip: the rule of Swift (Kumar et al., SIGCOMM
// 2020), whose delay is taken without the time that the server had the request. Delay alone leaves
// one call under way: that a server is busy says nothing about the network. Only losses lead below
// it, to calls spaced by more than a round trip. Nothing here runs while round trips are short and
// the window is whole.
#include <algorithm>

#include "rpc/rpc.h"

namespace spinwire::rpc {
namespace {

/// The most of a window that one round trip may cost.
constexpr std::uint64_t kMostOfTwo = 2;
/// Of the delay beyond the target, four fifths.
constexpr std::uint64_t kBetaParts = 4, kBetaOf = 5;
/// At least one call in so many round trips.
constexpr std::uint32_t kLeast = kOneCall / 64;

/// How long the server had the request, in ticks.
std::uint64_t ticks_held(const Rpc& r, std::uint16_t held) noexcept {
  return r.shared.clock.ticks(Nanoseconds(std::int64_t{held} << kHeldShift));
}

/// Not before the round trip that the last one brought about is over.
bool may_shrink(const Flow& flow, std::uint64_t now, std::uint64_t trip) noexcept {
  return now - std::min(now, flow.shrunk_at) >= trip;
}

void grow(Flow& flow) noexcept {
  if (flow.window >= kOneCall) {
    flow.window += kOneCall * kOneCall / flow.window;
  } else {
    flow.window += flow.window / 2 + 1;
  }
  flow.window = std::min(flow.window, flow.whole);
}

/// Below one call: the next goes out when its share of the round trips is over.
void space(Rpc& r, ClientSession& c, std::uint64_t now, std::uint64_t trip) noexcept {
  if (c.flow.window >= kOneCall) return;
  c.flow.next = now + trip * kOneCall / c.flow.window;
  look_by(r, c, c.flow.next);
}

}  // namespace

void adjust(Rpc& r, ClientSession& c, std::uint64_t trip, std::uint16_t held) noexcept {
  // The server's clock ran out, or we were away ourselves: this says nothing.
  if (held == UINT16_MAX || r.since != r.shared.now) return;
  const std::uint64_t now = r.shared.now;
  const std::uint64_t delay = trip - std::min(trip, ticks_held(r, held));
  Flow& flow = c.flow;
  if (delay <= r.target) {
    grow(flow);
  } else if (may_shrink(flow, now, trip)) {
    const std::uint64_t beyond = (delay - r.target) * kBetaParts / kBetaOf;
    const std::uint64_t cut = std::min(flow.window * beyond / delay, flow.window / kMostOfTwo);
    const auto lowest = std::min(flow.window, kOneCall);
    flow.window = std::max(lowest, flow.window - static_cast<std::uint32_t>(cut));
    flow.shrunk_at = now;
    ++r.stats.slowed;
  }
  space(r, c, now, trip);
  allow(c);
}

void on_loss(Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  const std::uint64_t trip = std::max(c.smooth, r.target);
  if (c.flow.whole == 0 || !may_shrink(c.flow, now, trip)) return;
  c.flow.window = std::max(kLeast, c.flow.window / 2);
  c.flow.shrunk_at = now;
  ++r.stats.slowed;
  space(r, c, now, trip);
  allow(c);
}

}  // namespace spinwire::rpc
