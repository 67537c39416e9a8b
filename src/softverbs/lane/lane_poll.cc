// Polling: taking packets out of the lanes that are awake, and acknowledgements. Hot.
#include <errno.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "softverbs/device_control.h"
#include "softverbs/lane/lane_cursor.h"
#include "softverbs/memory/memory_region.h"
#include "softverbs/memory/memory_window.h"
#include "softverbs/objects.h"
#include "softverbs/queues.h"
#include "softverbs/ud/ud_datagram.h"

namespace spinwire::softverbs {
namespace {

/// Most packets received from one lane in one poll, so that no lane starves the others.
constexpr std::uint32_t kPacketsPerTurn = 64;

/// Whether a receive is for one element that may be written and has room for `length` bytes.
inline bool fits(const Context& c, Qp& qp, const ReceiveWr& wr, std::uint32_t length) noexcept {
  return wr.sge_count == 1 && length <= wr.capacity &&
         allows_again(c, *static_cast<Pd*>(qp.pd), qp.writable, wr.first, IBV_ACCESS_LOCAL_WRITE);
}

/// Receives one SEND of one line into a receive of one element, completing to the polled queue.
/// False if the packet is of another kind.
inline bool receive_one(const Context& c, InLane& lane, Cq& cq, std::uint64_t word) noexcept {
  Qp* const qp = c.queue_pairs[queue_pair_index(word_qpn(word))];
  if (qp == nullptr || qp->peer != lane.peer || qp->recv_cq != &cq) [[unlikely]]
    return false;
  const Line& line = *lane.next;
  const std::uint32_t length = line.length;
  if (word != (lane.mark << 56 | packet_kind(Packet::send, 0) << 48 | qp->expected) ||
      length > kFirstLineBytes) {
    return false;
  }
  ReceiveQueue& receives = *qp->receives;
  if (receives.count() == 0 || cq.room == 0) [[unlikely]]
    return false;
  const ReceiveWr& wr = receives.ring[receives.head & receives.mask];
  if (!fits(c, *qp, wr, length)) [[unlikely]]
    return false;
  copy_small(pointer(wr.first.addr), line.payload, length);
  CompletionHead{IBV_WC_RECV, qp->qp_num, qp->dest_qpn}.fill(*cq.out++, wr.wr_id, length);
  --cq.room;
  ++receives.head;
  qp->nak_given = false;
  expect(*qp, next_word(word));
  advance(lane, 1);
  return true;
}

/// Receives a run of SENDs of one queue pair, each of one line, into receives of one element with
/// room, completing to the polled queue. The queue's state stays in registers, and one compare
/// checks a line; the line that ends the lane's array never matches. Returns how many it received,
/// up to `limit`; 0 if the packet is of another kind.
[[gnu::noinline]] std::uint32_t receive_run(Context& c, InLane& lane, Cq& cq, std::uint64_t word,
                                            std::uint32_t limit) noexcept {
  Qp* qp = c.queue_pairs[queue_pair_index(word_qpn(word))];
  if (qp == nullptr || qp->peer != lane.peer || qp->recv_cq != &cq ||
      qp->expected == kNeverExpected) [[unlikely]] {
    return 0;
  }
  ReceiveQueue& receives = *qp->receives;
  const ReceiveWr* const ring = receives.ring.get();
  const std::uint32_t ring_mask = receives.mask;
  const CompletionHead success{IBV_WC_RECV, qp->qp_num, qp->dest_qpn};
  const std::uint32_t most = std::min(limit, std::min(cq.room, receives.count()));
  std::uint32_t left = most;
  ibv_wc* out = cq.out;
  const Line* line = lane.next;
  const std::uint64_t kind = lane.mark << 56 | packet_kind(Packet::send, 0) << 48;
  std::uint64_t expected = qp->expected;
  std::uint32_t head = receives.head;
  for (; left != 0 && line->word.load(std::memory_order_acquire) == (kind | expected); --left) {
    const std::uint32_t length = line->length;
    const ReceiveWr& wr = ring[head & ring_mask];
    if (length > kFirstLineBytes || !fits(c, *qp, wr, length)) [[unlikely]]
      break;
    copy_small(pointer(wr.first.addr), line->payload, length);
    success.fill(*out++, wr.wr_id, length);
    ++head;
    ++line;
    expected = next_word(expected);
  }
  const std::uint32_t taken = most - left;
  if (taken == 0) return 0;
  qp->nak_given = false;
  expect(*qp, expected);
  receives.head = head;
  cq.out = out;
  cq.room -= taken;
  advance(lane, taken);
  return taken;
}

/// Receives the packets in a lane, up to kPacketsPerTurn or the room of `cq`. It always receives
/// one, into the ring if need be: completions of sends that fill every array would starve it
/// otherwise. False: the lane has to wait until others were read.
inline bool drain(Context& c, InLane& lane, Cq& cq, std::uint64_t word) noexcept {
  if (lane.run_reported) [[unlikely]]
    return true;
  std::uint32_t left = kPacketsPerTurn;
  DirectOutcome direct = DirectOutcome::none;
  do {
    std::uint32_t taken = 0;
    if (word_packet(word) >= Packet::datagram) {
      taken = receive_datagrams(c, lane, cq, word, left, direct);
      if (direct != DirectOutcome::none) break;
      advance(lane, taken);
    } else if (left == kPacketsPerTurn && receive_one(c, lane, cq, word)) {
      taken = 1;
    } else {
      taken = receive_run(c, lane, cq, word, left);
    }
    if (taken == 0) [[unlikely]] {
      receive_packet(c, lane, word);
      taken = 1;
    }
    left -= std::min(left, taken);
    word = lane.next->word.load(std::memory_order_acquire);
  } while (word_mark(word) == lane.mark && left != 0 && cq.room != 0);
  publish_head(lane);
  return direct != DirectOutcome::full;
}

/// Moves older completions from the ring into the caller's array.
int pop(Context& c, Cq& cq, int entries, ibv_wc* wc) noexcept {
  int n = 0;
  for (; n < entries && cq.head != cq.tail; ++n) wc[n] = cq.ring[cq.head++ & cq.mask];
  c.pending.attention -= static_cast<std::uint32_t>(n);
  return n;
}

}  // namespace

/// Completes the packets of a record, of which only the last can be signaled. Skips packets that
/// apply_naks acknowledged already or that are to be transmitted again.
static inline void complete_run(Qp& qp, const InFlight& run) noexcept {
  if (qp.qp_num != run.qpn || qp.epoch != run.epoch ||
      static_cast<std::int32_t>(run.sq_end - qp.sq_tail) <= 0) [[unlikely]] {
    return;
  }
  qp.sq_tail = run.sq_end - 1;
  complete_oldest(qp);
}

/// Applies an acknowledgement of our lane up to `head`.
static void acknowledge_until(Peer& peer, std::uint64_t head, bool refused) noexcept {
  OutLane& out = peer.out;
  out.head = head;
  out.acked = std::max(out.acked, head);
  out.limit = head + kLaneLines;
  if (refused) [[unlikely]]
    apply_naks(peer, head);
  if (peer.stalled != nullptr) [[unlikely]]
    resume_stalled(peer);
  Context& c = *peer.context;
  while (out.in_flight_head != out.in_flight_tail) {
    const InFlight& run = out.in_flight[out.in_flight_head & (kInFlight - 1)];
    if (run.end > head) return;
    Qp* qp = c.queue_pairs[queue_pair_index(run.qpn)];
    if (++out.in_flight_head == out.in_flight_tail) peer.in_flight_owner = nullptr;
    if (qp == nullptr) [[unlikely]]
      continue;
    complete_run(*qp, run);
    // It appends behind all records, so this one may be overwritten. The index may belong to
    // another queue pair by now.
    if (qp->sq_next != qp->sq_head && !qp->stalled && qp->qp_num == run.qpn) [[unlikely]]
      pump(*qp);
  }
}

void acknowledge(Peer& peer) noexcept {
  OutLane& out = peer.out;
  const std::uint64_t head = out.control->head.load(std::memory_order_acquire);
  if (head == out.head) return;
  // A negative answer beyond `out.head` may concern packets up to `head`, or later ones.
  acknowledge_until(peer, head, out.control->last_nak.load(std::memory_order_acquire) > out.head);
}

/// Records the acknowledgement that the next packet in the lane carries. The next poll applies it,
/// so that an answer to this packet leaves first.
static inline void record_ack(Peer& peer, const Line& line, std::uint64_t word) noexcept {
  OutLane& out = peer.out;
  if ((word_flags(word) & line_flag::kNoAck) != 0) [[unlikely]]
    return acknowledge(peer);
  const auto news = static_cast<std::uint16_t>(line.ack - static_cast<std::uint16_t>(out.acked));
  // Ahead of `tail`: it is older than what was read from the lane itself.
  if (news == 0 || out.acked + news > out.tail) return;
  out.acked += news;
  if (peer.ack_due) return;
  peer.ack_due = true;
  Context& c = *peer.context;
  c.acks_due[c.pending.acks_due++] = &peer;
}

/// Applies the acknowledgements that the previous poll recorded.
static inline void apply_acks(Context& c) noexcept {
  do {
    Peer& peer = *c.acks_due[--c.pending.acks_due];
    peer.ack_due = false;
    if (peer.out.acked > peer.out.head) acknowledge_until(peer, peer.out.acked, false);
  } while (c.pending.acks_due != 0);
}

/// Reads acknowledgements from the lanes, and unlists the peers that owe none.
__attribute__((noinline)) static void check_acknowledgements(Context& c) noexcept {
  c.ack_countdown = kAckInterval;
  for (std::uint32_t i = 0; i < c.pending.unacked;) {
    Peer& peer = *c.unacked[i];
    acknowledge(peer);
    if (peer.stalled != nullptr) c.ack_countdown = 1;  // the next poll looks again
    // Acknowledgements of datagrams matter only while somebody waits for room.
    const bool awaited =
        peer.out.in_flight_head != peer.out.in_flight_tail || peer.stalled != nullptr;
    if (!awaited || peer.out.head == peer.out.tail || peer.gone) {
      peer.unacked = false;
      c.unacked[i] = c.unacked[--c.pending.unacked];
    } else {
      ++i;
    }
  }
}

/// A poll that may find something.
__attribute__((noinline)) static int poll_busy(ibv_cq* base, int entries, ibv_wc* wc) noexcept {
  Cq& cq = *static_cast<Cq*>(base);
  Context& c = context_of(base->context);
  int got = 0;
  if (cq.head != cq.tail) [[unlikely]] {
    got = pop(c, cq, entries, wc);
    if (got == entries) return got;
  }
  cq.out = wc + got;
  cq.room = static_cast<std::uint32_t>(entries - got);
  if (c.pending.acks_due != 0) apply_acks(c);
  if (c.pending.unacked != 0 && --c.ack_countdown <= 0) [[unlikely]]
    check_acknowledgements(c);
  // Starts after the lane that filled the caller's array last time, so that no lane starves.
  const std::uint32_t awake = c.awake_count;
  std::uint32_t turn = c.turn;
  for (std::uint32_t i = awake; i != 0; --i) {
    if (turn >= awake) turn = 0;
    InLane& lane = *c.awake[turn++];
    const std::uint64_t word = lane.next->word.load(std::memory_order_acquire);
    if (word_mark(word) == lane.mark) {
      if (lane.peer != nullptr && lane.peer->unacked) record_ack(*lane.peer, *lane.next, word);
      if (!drain(c, lane, cq, word)) [[unlikely]] {
        --turn;
        break;
      }
      if (cq.room == 0) break;
    }
  }
  c.turn = turn;
  if (c.segment->doorbell.load(std::memory_order_relaxed) != 0) [[unlikely]]
    wake_lanes(c);
  if (c.pending.attention != 0) [[unlikely]]
    run_timers(c);
  got = static_cast<int>(cq.out - wc);
  cq.room = 0;
  return got;
}

/// Whether a packet lies in a lane that is awake.
static inline bool any_packet(const Context& c) noexcept {
  const InLane* const* lane = c.awake.get();
  const InLane* const* const end = lane + c.awake_count;
  for (; lane != end; ++lane) {
    if (word_mark((*lane)->next->word.load(std::memory_order_relaxed)) == (*lane)->mark)
      return true;
  }
  return false;
}

int poll_cq(ibv_cq* base, int entries, ibv_wc* wc) noexcept {
  Context& c = context_of(base->context);
  // A poll that finds nothing ends here, after it read one word of each lane that is awake.
  if (c.segment->doorbell.load(std::memory_order_relaxed) == 0) [[likely]] {
    if (std::bit_cast<std::uint64_t>(c.pending) == 0) {
      if (!any_packet(c)) return 0;
    } else if (c.pending.attention == 0 && c.pending.acks_due == 0 && c.ack_countdown > 1 &&
               !any_packet(c)) {
      --c.ack_countdown;
      return 0;
    }
  }
  return poll_busy(base, entries, wc);
}

}  // namespace spinwire::softverbs
