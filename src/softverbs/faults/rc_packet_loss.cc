// Lost packets of reliable connections. The sender goes back to the lost packet (IB specification
// volume 1, 9.7.5 and 9.7.6) when later packets expose the gap or its timer expires. Random numbers
// and the clock decide everything; the plain code only sees the work request later. Cold.
#include <algorithm>
#include <cmath>

#include "softverbs/faults/fault_layer.h"
#include "softverbs/queues.h"

namespace spinwire::softverbs {
namespace {

constexpr std::uint64_t kMaxWasted = std::uint64_t{1} << 30;  // bytes, for one packet lost

/// Whether the response carries data.
constexpr bool brings_data(std::uint8_t opcode) noexcept {
  return !is_packet(opcode) && opcode != IBV_WR_RDMA_WRITE;
}

std::uint32_t mtu_of(const Qp& qp) noexcept { return 128u << qp.attr.path_mtu; }

std::uint32_t packets_of(const Qp& qp, std::uint32_t position) noexcept {
  const std::uint32_t length = qp.sq[position & qp.sq_mask].length;
  return std::max(1u, (length + mtu_of(qp) - 1) / mtu_of(qp));
}

/// Uniformly between 0 and 1, both excluded.
double unit(Loss& loss) noexcept {
  constexpr double kUnit = 1.0 / (std::uint64_t{1} << 53);
  return (static_cast<double>(loss.random.next() >> 11) + 0.5) * kUnit;
}

bool chance(Loss& loss, double probability) noexcept { return unit(loss) < probability; }
/// Draws whether all of `packets` packets are lost.
bool all_lost(Loss& loss, std::uint32_t packets) noexcept {
  return chance(loss, std::pow(loss.probability, packets));
}

/// Draws the number of packets that get through before one is lost, with a single random number.
std::uint32_t draw_gap(Loss& loss) noexcept {
  if (loss.probability >= 1) return 0;
  const double gap = std::log(unit(loss)) / std::log1p(-loss.probability);
  return gap < kNoLoss ? static_cast<std::uint32_t>(gap) : kNoLoss;
}

/// Begins a try: it sends data and gets a response, or, if it `asks`, sends a request and gets
/// data.
void begin_try(Loss& loss, bool asks) noexcept {
  const std::uint32_t gap = draw_gap(loss);
  const std::uint32_t left = loss.packets - loss.through;
  if (gap > left) {
    loss.next = kNoLoss;
  } else if (asks) {
    loss.next = gap == 0 ? loss.packets : loss.through + gap - 1;
  } else {
    loss.next = loss.through + gap;
  }
}

HeldWr& first_held(const Qp& qp) noexcept { return qp.faults->held[qp.sq_head & qp.sq_mask]; }

struct Amount {
  std::uint64_t bytes = 0;
  std::uint64_t packets = 0;
};

/// The amount sent behind the lost packet, of its own and later work requests, before the loss was
/// known: at most what the link carries in that time.
Amount wasted_behind(const Qp& qp, const Pace& pace) noexcept {
  const HeldWr& held = first_held(qp);
  const Loss& loss = held.loss;
  __extension__ using Wide = unsigned __int128;
  const Wide time = held.ready - loss.since;
  const auto most = static_cast<std::uint64_t>(
      pace.rate == 0 ? Wide{kMaxWasted}
                     : std::min(Wide{kMaxWasted}, time * pace.rate / 1'000'000'000));
  const std::uint64_t length = qp.sq[qp.sq_head & qp.sq_mask].length;
  const std::uint64_t sent = std::min(length, (std::uint64_t{loss.through} + 1) * mtu_of(qp));
  Amount sum{length - sent, loss.packets - loss.through - 1};
  for (std::uint32_t at = qp.sq_head + 1; at != qp.faults->posted && sum.bytes < most; ++at) {
    const SendWr& wr = qp.sq[at & qp.sq_mask];
    if (qp.faults->held[at & qp.sq_mask].ready > loss.since) break;
    if (is_local(wr.opcode)) continue;
    sum.bytes += wr.length;
    sum.packets += packets_of(qp, at);
  }
  if (sum.bytes <= most) return sum;
  sum.packets -= (sum.bytes - most) / mtu_of(qp);
  sum.bytes = most;
  return sum;
}

}  // namespace

void plan_loss(const FaultPlan& plan, std::uint64_t number, const Qp& qp,
               std::uint32_t position) noexcept {
  const std::uint32_t slot = position & qp.sq_mask;
  Loss& loss = qp.faults->held[slot].loss;
  loss.random = base::Random(base::Random::mix(~plan.seed ^ base::Random::mix(number)));
  loss.probability = plan.packet_loss;
  loss.round_trip = static_cast<std::uint64_t>(plan.round_trip.count());
  loss.packets = packets_of(qp, position);
  begin_try(loss, brings_data(qp.sq[slot].opcode));
}

std::uint64_t bytes_to_leave(const Qp& qp) noexcept {
  const Loss& loss = first_held(qp).loss;
  const std::uint64_t length = qp.sq[qp.sq_head & qp.sq_mask].length;
  if (loss.probability == 0) return length;
  if (loss.exhausted) return 0;
  const std::uint64_t mtu = mtu_of(qp);
  const std::uint64_t from = std::min(length, loss.through * mtu);
  const bool asks = brings_data(qp.sq[qp.sq_head & qp.sq_mask].opcode);
  if (asks && loss.next == loss.packets) return 0;
  if (loss.next >= loss.packets) return length - from;
  return std::min(length, (loss.next + std::uint64_t{1}) * mtu) - from;
}

void drop_packet(Qp& qp, std::uint64_t at) noexcept {
  Faults& f = *context_of(qp.context).faults;
  HeldWr& held = first_held(qp);
  Loss& loss = held.loss;
  const bool asks = brings_data(qp.sq[qp.sq_head & qp.sq_mask].opcode);
  const bool of_data = loss.next != loss.packets;
  ++f.statistics.packets_lost;
  loss.happened = true;
  loss.since = at;
  loss.answer = !of_data && !asks;
  const std::uint32_t back_to = of_data ? loss.next : asks ? loss.through : loss.packets - 1;
  if (back_to != loss.through) loss.tries = 0;
  loss.through = back_to;
  loss.exhausted = loss.tries++ >= qp.attr.retry_cnt;
  const std::uint32_t behind = of_data ? loss.packets - 1 - back_to : 0;
  bool shown = behind != 0 && !all_lost(loss, behind);
  if (shown && !asks && chance(loss, loss.probability)) {  // the NAK, which is sent only once
    ++f.statistics.packets_lost;
    shown = false;
  }
  loss.silent = !shown;
  held.ready = shown                  ? at + loss.round_trip
               : qp.attr.timeout == 0 ? kNever
                                      : at + (std::uint64_t{4096} << qp.attr.timeout);
  begin_try(loss, asks);
  // Work requests posted before may expose the loss.
  for (std::uint32_t other = qp.sq_head + 1; other != qp.faults->posted && loss.silent; ++other)
    expose_loss(qp, other);
  const Amount wasted = of_data ? wasted_behind(qp, *f.pace) : Amount{};
  charge_wasted(f, at, wasted.bytes);
  loss.again = 1 + wasted.packets + (asks && of_data ? 1 : 0);
}

void expose_loss(Qp& qp, std::uint32_t position) noexcept {
  HeldWr& held = first_held(qp);
  Loss& loss = held.loss;
  const SendWr& wr = qp.sq[position & qp.sq_mask];
  if (!loss.silent || position == qp.sq_head || is_local(wr.opcode)) return;
  if (all_lost(loss, brings_data(wr.opcode) ? 1 : packets_of(qp, position))) return;
  const std::uint64_t sent = std::max(loss.since, qp.faults->held[position & qp.sq_mask].ready);
  const std::uint64_t shown = sent + (loss.answer ? 0 : loss.round_trip);
  if (shown >= held.ready) return;
  held.ready = shown;
  loss.silent = false;
  if (!loss.answer) return;
  // The response to the later request also acknowledges this one: nothing has to be sent again.
  loss.through = loss.packets;
  loss.next = kNoLoss;
  loss.again = 0;
  loss.exhausted = false;
}

void begin_retry(Qp& qp) noexcept {
  Loss& loss = first_held(qp).loss;
  FaultStatistics& statistics = context_of(qp.context).faults->statistics;
  if (loss.silent) ++statistics.loss_timeouts;
  if (!loss.exhausted) statistics.packets_retransmitted += loss.again;
  loss.silent = false;
  loss.again = 0;
}

}  // namespace spinwire::softverbs
