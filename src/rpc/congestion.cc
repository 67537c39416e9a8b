// Congestion, as round trips tell of it. A session's calls under way are bounded by a window that
// grows by one call each round trip while those take no more than the target, and shrinks in
// proportion to what they take more, once a round trip and by half at most: the rule of Swift
// (Kumar et al., SIGCOMM 2020), whose delay is taken without the time that the server had the
// request. The target is rpc.target_delay or, over a way that is longer by itself, twice the
// shortest round trip that was seen. A way that has become longer is known by one call under way,
// and slow, for a second: then the shortest is that of this second. Delay alone leaves one call
// under way: that a server is busy says nothing about the network. Only losses lead below it, to
// calls spaced by more than a round trip, from where each reply leads back by half of what there
// is, however long it took. What takes longer than patience lasts is lost only if the server does
// not say otherwise (learn_from_repeated()). Nothing here runs while round trips are short and the
// window is whole.
#include <algorithm>

#include "rpc/rpc.h"

namespace spinwire::rpc {
namespace {

/// Of the delay beyond the target, four fifths.
constexpr std::uint64_t kBetaParts = 4, kBetaOf = 5;
/// At least one call in so many round trips.
constexpr std::uint32_t kLeast = kOneCall / 64;
/// After so long with one call under way, and slow, the way itself is.
constexpr Nanoseconds kForgetting = std::chrono::seconds(1);

/// Not before the round trip that the last one brought about is over.
bool may_shrink(const Flow& flow, std::uint64_t now, std::uint64_t trip) noexcept {
  return now - std::min(now, flow.shrunk_at) >= trip;
}

void shrink(Rpc& r, Flow& flow, std::uint32_t window) noexcept {
  if (window >= flow.window) return;
  flow.window = window;
  flow.shrunk_at = r.context.now;
  ++r.stats.slowed;
}

void grow(Flow& flow) noexcept {
  if (flow.window >= kOneCall) {
    flow.window += kOneCall * kOneCall / flow.window;
  } else {
    flow.window += flow.window / 2 + 1;
  }
  flow.window = std::min(flow.window, flow.whole);
}

/// The delay that calls under way may bring about.
std::uint64_t target_of(const Rpc& r, const ClientSession& c) noexcept {
  return c.shortest < ~std::uint64_t{0} / 2 ? std::max(r.target, 2 * c.shortest) : r.target;
}

/// Whether the way has become longer, as the last reply has it, too.
bool is_longer(const Rpc& r, ClientSession& c, std::uint64_t delay) noexcept {
  const std::uint64_t now = r.context.now;
  if (c.lately == ~std::uint64_t{0}) c.low_since = now;
  c.lately = std::min(c.lately, delay);
  if (now - std::min(c.low_since, now) < r.context.clock.ticks(kForgetting)) return false;
  c.shortest = std::exchange(c.lately, ~std::uint64_t{0});
  return true;
}

/// Below one call: the next goes out when its share of the round trips on the network is over.
void space(Rpc& r, ClientSession& c, std::uint64_t trip) noexcept {
  c.flow.next = 0;
  if (c.flow.window < kOneCall) {
    c.flow.next = r.context.now + trip * kOneCall / c.flow.window;
    look_by(r, c, c.flow.next);
  }
  allow(c);
}

}  // namespace

void adjust(Rpc& r, ClientSession& c, std::uint64_t trip, std::uint16_t held) noexcept {
  // The answer may be an older one, or we were away ourselves: this says nothing.
  if (held == kHeldUnknown || r.since != r.context.now) return;
  Flow& flow = c.flow;
  // Where the server's clock has run out, all that is known is that nothing was lost.
  const std::uint64_t delay = held == kHeldMost ? 0 : trip - std::min(trip, ticks_held(r, held));
  if (held != kHeldMost) c.shortest = std::min(c.shortest, delay);
  const std::uint64_t target = target_of(r, c);
  const bool slow = delay > target && !(flow.window <= kOneCall && is_longer(r, c, delay));
  if (!slow) c.lately = ~std::uint64_t{0};
  if (!slow || flow.window < kOneCall) {
    grow(flow);
  } else if (flow.window > kOneCall && may_shrink(flow, r.context.now, trip)) {
    const std::uint64_t beyond = (delay - target) * kBetaParts / kBetaOf;
    const std::uint64_t cut =
        std::min<std::uint64_t>(flow.window * beyond / delay, flow.window / 2);
    shrink(r, flow, std::max(kOneCall, flow.window - static_cast<std::uint32_t>(cut)));
  }
  space(r, c, delay);
}

void on_loss(Rpc& r, ClientSession& c) noexcept {
  const std::uint64_t target = target_of(r, c);
  const std::uint64_t trip = std::max(c.smooth, target);
  if (c.flow.whole == 0 || !may_shrink(c.flow, r.context.now, trip)) return;
  shrink(r, c.flow, std::max(kLeast, c.flow.window / 2));
  space(r, c, target);
}

}  // namespace spinwire::rpc
