#include "softverbs/ud/ud_direct.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "softverbs/queues.h"
#include "softverbs/ud/ud_datagram.h"

namespace spinwire::softverbs {

static_assert(kDirectHeader + kDirectPayload == kFirstLineBytes);

namespace {

/// In DirectRun::source the lane's serial lies above the number of the sender's queue pair.
constexpr unsigned kSerialShift = 24;

DirectSender* sender(ibv_qp* base) noexcept { return static_cast<Qp*>(base); }

DirectLane* lane(ibv_ah* base) noexcept {
  const Ah& ah = *static_cast<const Ah*>(base);
  return ah.plain ? &ah.peer->out : nullptr;
}

void hold(ibv_ah* base, Line& line, std::uint64_t word) noexcept {
  Peer& peer = *static_cast<const Ah*>(base)->peer;
  Context& c = *peer.context;
  peer.out.held = &line;
  peer.out.held_word = word;
  if (peer.has_held_line) return;
  peer.has_held_line = true;
  peer.next_held = c.held_first;
  c.held_first = &peer;
}

void publish(ibv_qp* base) noexcept { publish_held(context_of(base->context)); }

/// Sets DirectLane::direct_limit if the lane can take direct datagrams, and sends.
Sent send_checked(const DirectEnd& by, const DatagramAddress& to, std::uint64_t low,
                  std::uint64_t high, const std::byte* payload, std::uint64_t length) noexcept {
  Peer& peer = *static_cast<const Ah*>(to.ah)->peer;
  OutLane& out = peer.out;
  const InLane* const in = peer.in;
  if (to.lane != &out || !by.sender->sends_at_once || peer.gone || peer.datagrams_waiting != 0 ||
      in == nullptr || in->head < in->no_ack_until || peer.context->faults != nullptr) {
    return Sent::refused;
  }
  acknowledge(peer);
  if (out.tail + kConnectedLines >= out.limit) return Sent::refused;
  out.direct_limit = out.limit - kConnectedLines;
  out.ack_on_top = in->head << 48;
  return send_direct(by, to, low, high, payload, length);
}

void receive_runs(ibv_qp* base, DirectRuns* runs) noexcept {
  static_cast<Qp*>(base)->direct = runs;
}

void write_route(ibv_qp* base, const DirectRun& run, std::uint32_t length, std::byte* to) noexcept {
  const ibv_grh grh = route_header(*context_of(base->context).lanes[run.lane], length);
  std::memcpy(to, &grh, sizeof grh);
}

void release_run(ibv_qp* base, const DirectRun& run, std::uint32_t count) noexcept {
  InLane& lane = *context_of(base->context).lanes[run.lane];
  lane.run_reported = false;
  advance(lane, count);
  publish_head(lane);
}

}  // namespace

const DirectDatagrams& direct_datagrams() noexcept {
  static constexpr DirectDatagrams calls{sender,  lane,         send_checked, hold,
                                         publish, receive_runs, release_run,  write_route};
  return calls;
}

void publish_held(Context& c) noexcept {
  while (c.held_first != nullptr) {
    Peer& peer = *std::exchange(c.held_first, c.held_first->next_held);
    peer.has_held_line = false;
    if (peer.out.held == nullptr) continue;
    publish_line(peer);
    wake_if_asleep(peer);
  }
}

DirectOutcome report_run(InLane& lane, const Qp& qp, Cq& cq, std::uint64_t word,
                         std::uint32_t limit) noexcept {
  DirectRuns& runs = *qp.direct;
  DirectRun& run = runs.runs[runs.count];
  run.first = lane.next;
  run.most = std::min(limit, static_cast<std::uint32_t>(lane.end - lane.next));
  run.qkey = qp.attr.qkey;
  run.word = word;
  run.source = lane.serial << kSerialShift | word_psn(word);
  run.lane = lane.index;
  std::uint64_t length = 0;
  // A full array of completions has no entry to report the run with.
  if (cq.room == 0 || !run.has(*lane.next, length)) [[unlikely]]
    return DirectOutcome::none;
  if (runs.count == DirectRuns::kMost) [[unlikely]]
    return DirectOutcome::full;
  if (runs.count++ == 0)
    CompletionHead{IBV_WC_RECV, qp.qp_num, 0}.fill(*completion_slot(cq), runs.wr_id, 0);
  lane.run_reported = true;
  return DirectOutcome::reported;
}

void release_runs(Context& c, const Qp& qp) noexcept {
  if (qp.direct == nullptr) return;
  for (std::uint32_t i = 0; i < qp.direct->count; ++i) {
    if (InLane* const lane = c.lanes[qp.direct->runs[i].lane].get(); lane != nullptr)
      lane->run_reported = false;
  }
}

}  // namespace spinwire::softverbs
