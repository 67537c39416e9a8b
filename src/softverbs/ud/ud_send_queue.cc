// Datagrams that found no room in their receiver's lane. Cold.
//
// An adapter's send queue drains at the speed of the wire, and programs rely on that backpressure.
// Here the receiver's polls make room, so a datagram waits in the send queue, uncompleted. Each
// lane has a budget of time: waiting uses it up, and lines that the receiver consumes restore it; a
// whole lane restores it fully. So a stopped receiver costs its senders the budget once, not once
// per datagram. When the budget is used up, datagrams without room are dropped until the receiver
// continues. Datagrams to other receivers overtake waiting ones; only completions keep their order.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "softverbs/device_control.h"
#include "softverbs/lane/lane_data.h"
#include "softverbs/objects.h"
#include "softverbs/queues.h"
#include "softverbs/ud/ud_datagram.h"

namespace spinwire::softverbs {
namespace {

/// Delay until the next check for room.
constexpr Nanoseconds kRoomRetryDelay = std::chrono::microseconds(1);

constexpr std::uint64_t kPlain = std::uint64_t{1} << 40;

/// Stores the destination: the address handle may be destroyed before the datagram is sent.
void keep_address(const Qp& qp, SendWr& kept, const ibv_send_wr& wr) noexcept {
  const Ah& ah = *static_cast<const Ah*>(wr.wr.ud.ah);
  const std::uint32_t key = wr.wr.ud.remote_qkey;
  kept.receiver = ah.peer;
  kept.remote_address =
      std::uint64_t{(key & kOwnKey) != 0 ? qp.attr.qkey : key} << 32 | wr.wr.ud.remote_qpn;
  kept.compare_add =
      (ah.plain ? kPlain : 0) | std::uint64_t{ah.hop_limit} << 32 | ah.version_class_flow;
  kept.imm = wr.imm_data;
}

Outgoing outgoing(const Qp& qp, const SendWr& kept) noexcept {
  return {kept.receiver,
          elements(qp, kept),
          kept.sge_count,
          kept.length,
          static_cast<std::uint32_t>(kept.remote_address),
          static_cast<std::uint32_t>(kept.remote_address >> 32),
          kept.imm,
          static_cast<std::uint32_t>(kept.compare_add),
          static_cast<std::uint8_t>(kept.compare_add >> 32),
          (kept.compare_add & kPlain) != 0,
          kept.opcode == IBV_WR_SEND_WITH_IMM,
          (kept.flags & IBV_SEND_SOLICITED) != 0};
}

void begin_turn(Context& c, Peer& peer, const Qp& qp, std::uint64_t now) noexcept {
  const std::uint64_t most = c.datagram_timeout;
  const std::uint64_t consumed =
      std::min<std::uint64_t>(peer.out.head - peer.turns.budget_head, kLaneLines);
  peer.turns.budget = std::min(most, peer.turns.budget + consumed * (most / kLaneLines));
  peer.turns.budget_head = peer.out.head;
  peer.turns.began = now;
  peer.turns.current = &qp;
}

/// Passes the turn to the next queue pair. Without turns, queue pairs with short datagrams would
/// always find room first.
void end_turn(Peer& peer, std::uint64_t now) noexcept {
  peer.turns.budget -= std::min(peer.turns.budget, now - peer.turns.began);
  const Qp* next = std::exchange(peer.turns.next, nullptr);
  peer.turns.current = nullptr;
  if (next != nullptr) begin_turn(*peer.context, peer, *next, now);
}

/// Unlists a datagram that was sent, dropped or flushed.
void release_waiting(Qp& qp, SendWr& kept, std::uint64_t now) noexcept {
  Peer& peer = *kept.receiver;
  if (peer.turns.next == &qp) peer.turns.next = nullptr;
  if (peer.turns.current == &qp) end_turn(peer, now);
  --peer.datagrams_waiting;
  --peer.users;
  kept.receiver = nullptr;
}

ibv_wc_status check(Qp& qp, const SendWr& kept) noexcept {
  return check_datagram(qp, elements(qp, kept), kept.sge_count, kept.length,
                        (kept.flags & IBV_SEND_INLINE) != 0);
}

/// Sends or drops a waiting datagram; false if it still has to wait.
bool send_or_drop(Context& c, Qp& qp, SendWr& kept, std::uint64_t now) noexcept {
  Peer& peer = *kept.receiver;
  if (peer.turns.current != nullptr && peer.turns.current != &qp) {
    if (peer.turns.next == nullptr) peer.turns.next = &qp;
    return false;
  }
  // A datagram that has become invalid is reported in order, when all earlier ones are done.
  if (check(qp, kept) != IBV_WC_SUCCESS) return false;
  if (transmit_datagram(qp, outgoing(qp, kept))) {
    qp.next_psn = psn_add(qp.next_psn, 1);
  } else {
    if (peer.turns.current == nullptr) begin_turn(c, peer, qp, now);
    if (now - peer.turns.began < peer.turns.budget) return false;
    count_drop(c, Drop::no_room);
  }
  release_waiting(qp, kept, now);
  return true;
}

/// Fails the oldest work request and flushes those behind it.
void fail_oldest_datagram(Qp& qp, ibv_wc_status status) noexcept {
  drop_waiting(qp);
  const std::uint32_t first = qp.sq_tail;
  const std::uint32_t end = qp.sq_head;
  fail_datagram(qp, qp.sq[first & qp.sq_mask].wr_id, status);
  for (std::uint32_t i = first + 1; i != end; ++i) {
    push_error(*static_cast<Cq*>(qp.send_cq), qp, qp.sq[i & qp.sq_mask].wr_id, IBV_WC_WR_FLUSH_ERR,
               IBV_WC_SEND);
  }
}

/// Tries all waiting datagrams, oldest first; skips receivers that had no room for an earlier one
/// in this pass. False if the queue pair failed.
bool send_waiting(Context& c, Qp& qp) noexcept {
  const std::uint64_t now = c.clock.now();
  ++c.datagram_pass;
  for (std::uint32_t i = qp.sq_tail; i != qp.sq_head; ++i) {
    SendWr& kept = qp.sq[i & qp.sq_mask];
    if (kept.receiver != nullptr && i == qp.sq_tail) {
      if (const ibv_wc_status status = check(qp, kept); status != IBV_WC_SUCCESS) {
        fail_oldest_datagram(qp, status);
        return false;
      }
    }
    if (kept.receiver != nullptr && kept.receiver->turns.full_in_pass != c.datagram_pass) {
      Peer& peer = *kept.receiver;
      if (!send_or_drop(c, qp, kept, now)) peer.turns.full_in_pass = c.datagram_pass;
    }
    if (kept.receiver == nullptr && i == qp.sq_tail) complete_oldest(qp);
  }
  return true;
}

}  // namespace

void send_waiting_datagrams(Qp& qp) noexcept {
  if (!send_waiting(context_of(qp.context), qp)) return;
  qp.sq_next = qp.sq_tail;
  qp.sends_at_once = qp.sq_tail == qp.sq_head;
  if (qp.sends_at_once) {
    stop_waiting(qp);
  } else {
    wait_until(qp, kRoomRetryDelay);
  }
}

void queue_datagram(Qp& qp, const ibv_send_wr& wr, std::uint64_t length) noexcept {
  SendWr& kept = qp.sq[qp.sq_head & qp.sq_mask];
  const bool alone = qp.sends_at_once;
  if (alone) qp.sq_next = qp.sq_tail = qp.sq_head;
  ++qp.sq_head;
  if (qp.state != IBV_QPS_RTS) {
    qp.sq_reclaimed = qp.sq_next = qp.sq_tail = qp.sq_head;
    push_error(*static_cast<Cq*>(qp.send_cq), qp, wr.wr_id, IBV_WC_WR_FLUSH_ERR, IBV_WC_SEND);
    return;
  }
  qp.sends_at_once = false;
  kept.wr_id = wr.wr_id;
  kept.set_kind(static_cast<std::uint32_t>(std::min<std::uint64_t>(length, UINT32_MAX)), wr.opcode,
                wr.send_flags | qp.signal_all, 0);
  (wr.send_flags & IBV_SEND_INLINE) != 0 ? keep_inline(qp, kept, wr) : keep_elements(qp, kept, wr);
  keep_address(qp, kept, wr);
  Peer& peer = *kept.receiver;
  ++peer.users;
  const bool nobody_waits = peer.datagrams_waiting++ == 0;
  peer.out.direct_limit = 0;
  if (alone) {
    send_waiting_datagrams(qp);
  } else if (nobody_waits) {
    Context& c = context_of(qp.context);
    (void)send_or_drop(c, qp, kept, c.clock.now());
  }
}

void drop_waiting(Qp& qp) noexcept {
  qp.sends_at_once = false;
  if (qp.qp_type != IBV_QPT_UD || qp.sq_tail == qp.sq_head) return;
  stop_waiting(qp);
  const std::uint64_t now = context_of(qp.context).clock.now();
  for (std::uint32_t i = qp.sq_tail; i != qp.sq_head; ++i) {
    SendWr& kept = qp.sq[i & qp.sq_mask];
    if (kept.receiver != nullptr) release_waiting(qp, kept, now);
  }
}

}  // namespace spinwire::softverbs
