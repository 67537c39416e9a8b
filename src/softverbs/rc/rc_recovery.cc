// Negative answers, retries, timers, errors, flushes and events. Cold.
#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/log_message.h"
#include "softverbs/device_control.h"
#include "softverbs/objects.h"
#include "softverbs/queues.h"
#include "softverbs/ud/ud_datagram.h"

namespace spinwire::softverbs {
namespace {

/// RNR timer field to microseconds (IB specification volume 1, table 45).
constexpr std::uint32_t kRnrMicroseconds[32] = {
    655360, 10,    20,    30,    40,    60,     80,     120,    160,    240,   320,
    480,    640,   960,   1280,  1920,  2560,   3840,   5120,   7680,   10240, 15360,
    20480,  30720, 40960, 61440, 81920, 122880, 163840, 245760, 327680, 491520};

/// Copies the bytes of short inline messages back from the lane before their lines are reused.
void fetch_from_lane(Qp& qp) noexcept {
  for (std::uint32_t i = qp.sq_tail; i != qp.sq_next; ++i) {
    const std::uint32_t slot = i & qp.sq_mask;
    SendWr& wr = qp.sq[slot];
    if (wr.sge_count != kInLane) continue;
    std::byte* copy = &qp.sq_inline[std::size_t{slot} * qp.max_inline];
    const Line& line = qp.peer->out.lines[(wr.lane_end - 1) & (kLaneLines - 1)];
    std::memcpy(copy, line.payload, wr.length);
    wr.first = {reinterpret_cast<std::uint64_t>(copy), wr.length, 0};
    wr.sge_count = 1;
  }
}

}  // namespace

void wait_until(Qp& qp, Nanoseconds delay) noexcept {
  Context& c = context_of(qp.context);
  qp.retry_at = c.clock.now() + c.clock.ticks(delay);
  if (qp.waiting) return;
  qp.waiting = true;
  qp.open = false;
  c.waiting.push_back(&qp);  // room is reserved when a queue pair is created
  ++c.pending.slow_work;
}

void stop_waiting(Qp& qp) noexcept {
  if (!qp.waiting) return;
  Context& c = context_of(qp.context);
  qp.waiting = false;
  qp.open = qp.state == IBV_QPS_RTS && qp.peer != nullptr && !qp.peer->gone && !qp.direct_lost;
  c.waiting.erase(std::find(c.waiting.begin(), c.waiting.end(), &qp));
  --c.pending.slow_work;
}

void push_error(Cq& cq, const Qp& qp, std::uint64_t wr_id, ibv_wc_status status,
                ibv_wc_opcode opcode) noexcept {
  ibv_wc* wc = completion_slot(cq);
  if (wc == nullptr) return;
  ++cq.solicited;
  *wc = ibv_wc{};
  wc->wr_id = wr_id;
  wc->status = status;
  wc->opcode = opcode;
  wc->qp_num = qp.qp_num;
}

/// One piece without calls: adding a completion then keeps its caller's registers.
[[gnu::noinline]] void raise_event(Context& c, ibv_event_type type, void* element) noexcept {
  if (c.events.size() == c.events.capacity())
    return;  // room is reserved once; the oldest events matter most
  ibv_async_event event{};
  event.event_type = type;
  event.element = std::bit_cast<decltype(event.element)>(element);  // a union of pointers
  c.events.push_back(event);
}

void drop_events(Context& c, const void* element) noexcept {
  std::erase_if(c.events, [&](const ibv_async_event& event) {
    return std::bit_cast<const void*>(event.element) == element;
  });
}

void stall(Qp& qp) noexcept {
  if (!std::exchange(qp.stalled, true)) qp.peer->stalled.push_back(qp);
}

void unstall(Qp& qp) noexcept {
  if (std::exchange(qp.stalled, false)) qp.peer->stalled.erase(qp);
}

void resume_stalled(Peer& peer) noexcept {
  const OutLane& out = peer.out;
  while (!peer.stalled.empty()) {
    Qp& qp = *peer.stalled.front();
    const std::uint32_t before = qp.sq_next;
    run_send_queue(qp);
    const bool full = out.tail == out.limit;
    if (full && qp.sq_next == before) return;  // needs more room and keeps its place
    unstall(qp);
    if (!full) continue;
    if (qp.sq_next != qp.sq_head) stall(qp);  // goes to the end of the list after its turn
    return;
  }
}

void stop_serving(Qp& qp) noexcept {
  const std::uint64_t before = qp.rights->ident.load(std::memory_order_relaxed);
  if ((before & kServed) == 0) return;
  show_expected(qp);
  set_ident(qp, before & ~kServed);
  if (qp.peer_access.state == PeerAccess::recorded)
    qp.peer_access.state =
        PeerAccess::possible;  // recorded before serving stopped, so record again
}

void enter_error(Qp& qp) noexcept {
  stop_waiting(qp);
  drop_waiting(qp);
  const bool first = qp.state != IBV_QPS_ERR;
  qp.state = IBV_QPS_ERR;
  forget_batches(context_of(qp.context), qp);
  qp.open = false;
  expect_nothing(qp);
  stop_serving(qp);
  ++qp.epoch;
  Cq& send = *static_cast<Cq*>(qp.send_cq);
  while (qp.sq_tail != qp.sq_head) {
    const SendWr& wr = qp.sq[qp.sq_tail++ & qp.sq_mask];
    push_error(send, qp, wr.wr_id, IBV_WC_WR_FLUSH_ERR, completion_opcode(wr.opcode));
  }
  qp.sq_next = qp.sq_reclaimed = qp.sq_tail;
  if (qp.srq != nullptr) {
    if (first) raise_event(context_of(qp.context), IBV_EVENT_QP_LAST_WQE_REACHED, &qp);
    return;
  }
  ReceiveQueue& receives = qp.own_receives;
  while (receives.count() != 0) {
    const ReceiveWr& wr = receives.ring[receives.head++ & receives.mask];
    push_error(*static_cast<Cq*>(qp.recv_cq), qp, wr.wr_id, IBV_WC_WR_FLUSH_ERR, IBV_WC_RECV);
  }
}

void fail_oldest(Qp& qp, ibv_wc_status status) noexcept {
  const SendWr& wr = qp.sq[qp.sq_tail++ & qp.sq_mask];
  push_error(*static_cast<Cq*>(qp.send_cq), qp, wr.wr_id, status, completion_opcode(wr.opcode));
  enter_error(qp);
}

void retry(Qp& qp, Nak reason, std::uint32_t rnr_timer) noexcept {
  ++qp.epoch;
  complete_what_ran_ahead(qp);
  // A direct message cannot be sent again, since no copy of it is kept.
  bool direct_behind = false;
  if (qp.sq_tail != qp.sq_next) {
    direct_behind = qp.direct_end > qp.sq[qp.sq_tail & qp.sq_mask].lane_end;
    fetch_from_lane(qp);
    qp.next_psn = oldest_psn(qp);
  }
  qp.sq_next = qp.sq_tail;
  switch (reason) {
    case Nak::rnr:
      // A count of 7 means no limit.
      if (direct_behind || (qp.attr.rnr_retry != 7 && qp.rnr_retries++ >= qp.attr.rnr_retry))
        return fail_oldest(qp, IBV_WC_RNR_RETRY_EXC_ERR);
      return wait_until(qp, std::chrono::microseconds(kRnrMicroseconds[rnr_timer & 31]));
    case Nak::invalid_request:
      return fail_oldest(qp, IBV_WC_REM_INV_REQ_ERR);
    case Nak::access:
      return fail_oldest(qp, IBV_WC_REM_ACCESS_ERR);
    case Nak::operational:
      return fail_oldest(qp, IBV_WC_REM_OP_ERR);
    case Nak::none:
    case Nak::not_ready:
      break;
  }
  // The peer is not ready, or gives no reason that exists. Handled as an unanswered packet: timeout
  // 0 waits for ever (IB specification 9.7.6.1.3).
  if (direct_behind || (qp.attr.timeout != 0 && qp.retries++ >= qp.attr.retry_cnt))
    return fail_oldest(qp, IBV_WC_RETRY_EXC_ERR);
  wait_until(qp, Nanoseconds(std::int64_t{4096} << (qp.attr.timeout == 0 ? 8 : qp.attr.timeout)));
}

void handle_unreachable(Qp& qp) noexcept {
  const bool retries_later =
      context_of(qp.context).driving == Driving::by_poll && qp.attr.timeout != 0;
  if (!retries_later) return fail_oldest(qp, IBV_WC_RETRY_EXC_ERR);
  retry(qp, Nak::not_ready, 0);
}

namespace {

/// Completes the packets that the remote queue pair received, and retries those that it refused.
/// The acknowledgement covers the lines from `acked` to `head`.
void apply_nak(Qp& qp, std::uint64_t acked, std::uint64_t head) noexcept {
  complete_what_ran_ahead(qp);
  if (qp.sq_tail == qp.sq_next && qp.direct_end <= acked) return;  // nothing in flight
  const QueuePairEntry& remote = remote_entry(qp);
  const std::uint64_t ident = remote.rights.ident.load(std::memory_order_acquire);
  const std::uint64_t ours = queue_pair_ident(qp.dest_qpn, qp.qp_num);
  bool known = (ident >> 8) == (ours >> 8) &&
               remote.rights.remote.load(std::memory_order_relaxed) == qp.peer->context->nonce;
  const std::uint32_t serial = remote.nak_serial.load(std::memory_order_acquire);
  const Nak answer = remote.nak.load(std::memory_order_relaxed);
  const std::uint32_t expected = remote.expected_psn.load(std::memory_order_acquire);
  // The entry may have been reused meanwhile.
  known = known && remote.rights.ident.load(std::memory_order_acquire) >> 8 == ours >> 8;
  // A queue pair that responds, and has refused nothing since, has received what is acknowledged.
  if (known && ident == ours && serial == qp.naks_handled) return;
  Nak reason = Nak::not_ready;
  bool answered = false;
  if (known) {
    while (qp.sq_tail != qp.sq_next && psn_diff(oldest_psn(qp), expected) < 0) {
      complete_oldest(qp);
      complete_what_ran_ahead(qp);
    }
    answered = serial != qp.naks_handled;
    if (answered) reason = answer;
  }
  qp.naks_handled = serial;
  const bool only_direct = qp.sq_tail == qp.sq_next;
  const std::uint64_t end = only_direct ? qp.direct_end : qp.sq[qp.sq_tail & qp.sq_mask].lane_end;
  if (!answered && end > head) return;
  // A refused packet in front of the oldest work request is a direct message.
  const std::uint32_t oldest = only_direct ? qp.next_psn : oldest_psn(qp);
  if (qp.direct_end != 0 && (known ? expected != oldest : only_direct)) {
    fail_direct_messages(qp);
    if (qp.sq_tail != qp.sq_head) fail_oldest(qp, IBV_WC_RETRY_EXC_ERR);
  } else if (!only_direct) {
    // The oldest packet was consumed but refused, or answered negatively: retransmit.
    retry(qp, reason, remote.rights.rnr_timer.load(std::memory_order_relaxed));
  }
}

}  // namespace

void apply_naks(Peer& peer, std::uint64_t acked, std::uint64_t head) noexcept {
  for (Qp& qp : peer.queue_pairs) apply_nak(qp, acked, head);
}

void run_timers(Context& c) noexcept {
  if (c.driving == Driving::by_poll && c.self_control-- == 0) {
    constexpr std::uint32_t kPollsPerControl = 1024;
    c.self_control = kPollsPerControl;
    control(c);
  }
  if (c.waiting.empty()) return;
  const std::uint64_t now = read_clock(c);
  for (std::size_t i = 0; i < c.waiting.size();) {
    Qp& qp = *c.waiting[i];
    if (now < qp.retry_at) {
      ++i;
      continue;
    }
    stop_waiting(qp);
    qp.qp_type == IBV_QPT_UD ? send_waiting_datagrams(qp)
                             : run_send_queue(qp);  // may append the queue pair to the list again
    if (i < c.waiting.size() && c.waiting[i] == &qp) ++i;
  }
}

}  // namespace spinwire::softverbs
