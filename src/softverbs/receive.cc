// The receive side: consuming lanes, and ibv_poll_cq, which drives it all. Hot.
#include <errno.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "softverbs/control.h"
#include "softverbs/datagram.h"
#include "softverbs/lane_io.h"
#include "softverbs/objects.h"
#include "softverbs/queue.h"
#include "softverbs/region.h"
#include "softverbs/window.h"

namespace spinwire::softverbs {
namespace {

/// Most packets taken from one lane in one poll, so that no lane starves the others.
constexpr std::uint32_t kPacketsPerTurn = 64;

/// Tells the sender that a packet was not taken. The answer lies beside the queue pair's state; the
/// lane's count tells that there is one. Cold.
void answer_nak(InLane& lane, Qp* qp, Nak reason) noexcept {
  if (qp != nullptr) {
    QueuePairEntry& entry = *qp->entry;
    entry.nak.store(reason, std::memory_order_relaxed);
    entry.nak_serial.store(entry.nak_serial.load(std::memory_order_relaxed) + 1,
                           std::memory_order_release);
    qp->nak_given = true;
  }
  lane.control->last_nak.store(lane.head + 1, std::memory_order_release);
  // The sender knows of all that is more than a lane behind. Direct datagrams always tell how far.
  lane.silent_until = lane.head + 1 + kLaneLines;
  if (lane.peer != nullptr) lane.peer->out.direct_limit = 0;
}

struct Arrival {
  Line* line;
  std::uint64_t position;
  Packet packet;
  std::uint64_t flags;
  std::uint32_t bytes;  ///< in the lane
  std::uint32_t lines;
};

enum class Fetched : std::uint8_t {
  all,
  nothing,  ///< the sender's queue pair, or its process, is no more: the message was never sent
  failed,
};

/// Fetches a message that the sender left in its own memory.
Fetched fetch_references(Qp& qp, LaneCursor& from, std::uint32_t count,
                         ScatterCursor& to) noexcept {
  Peer& peer = *qp.peer;
  const QueuePairEntry& sender = peer.segment->queue_pairs[queue_pair_index(qp.dest_qpn)];
  const std::uint64_t alive = queue_pair_ident(qp.dest_qpn, qp.qp_num);
  begin_access(peer);
  bool there = sender.ident.load(std::memory_order_acquire) == alive;
  bool ok = there;
  for (; ok && count != 0; --count) {
    Reference part{};
    from.read(reinterpret_cast<std::byte*>(&part), sizeof part);
    if (part.length == 0) continue;
    RemoteBytes bytes = resolve(peer, sender.pd.load(std::memory_order_relaxed), part.address,
                                part.length, part.key, 0, 0);
    ok = bytes.kind != RemoteBytes::Kind::refused;
    while (ok && part.length != 0) {
      const ScatterCursor::Piece piece = to.take(part.length);
      const ibv_sge here{reinterpret_cast<std::uint64_t>(piece.data),
                         static_cast<std::uint32_t>(piece.length), 0};
      ok = piece.length != 0 && copy_remote(peer, bytes, &here, 1, piece.length, Copy::from_peer);
      there = ok || piece.length == 0 || errno != ESRCH;
      if (bytes.data != nullptr) bytes.data += piece.length;
      bytes.address += piece.length;
      part.length -= static_cast<std::uint32_t>(piece.length);
    }
  }
  end_access(peer);
  // Had the sender's queue pair failed meanwhile, its memory might be in other use already.
  if (!there || sender.ident.load(std::memory_order_acquire) != alive) return Fetched::nothing;
  return ok ? Fetched::all : Fetched::failed;
}

/// Length of the message that a packet announces, without its target descriptor.
std::uint32_t message_length(const Arrival& a, LaneCursor cursor, std::uint32_t body) noexcept {
  if ((a.flags & line_flag::kReference) == 0) return body;
  std::uint64_t length = 0;
  for (std::uint32_t n = body / sizeof(Reference); n != 0; --n) {
    Reference part{};
    cursor.read(reinterpret_cast<std::byte*>(&part), sizeof part);
    length += part.length;
  }
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(length, UINT32_MAX));
}

bool elements_writable(Qp& qp, const ibv_sge* sges, std::uint32_t count) noexcept {
  const Context& c = context_of(qp.context);
  // Receives belong to the SRQ's domain, which create_qp demands to be the queue pair's.
  const std::uint64_t pd = static_cast<Pd*>(qp.pd)->id;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (sges[i].length != 0 && !local_allows(*c.segment, pd, sges[i], IBV_ACCESS_LOCAL_WRITE))
      return false;
  }
  return true;
}

/// A request that ends the connection: the sender learns why, our queue pair goes to ERR.
void refuse(InLane& lane, Qp& qp, Nak reason, ibv_event_type event) noexcept {
  answer_nak(lane, &qp, reason);
  acknowledge(*qp.peer);  // what the peer has taken is not flushed
  enter_error(qp);
  if (reason == Nak::access) raise_event(context_of(qp.context), event, &qp);
}

inline void complete_receive(Qp& qp, std::uint64_t wr_id, Packet packet, std::uint32_t imm,
                             std::uint32_t length, ibv_wc_opcode opcode) noexcept {
  ++qp.receives->head;
  const unsigned flags = packet == Packet::send       ? 0u
                         : packet == Packet::send_inv ? unsigned{IBV_WC_WITH_INV}
                                                      : unsigned{IBV_WC_WITH_IMM};
  if (ibv_wc* wc = completion_slot(*static_cast<Cq*>(qp.recv_cq)); wc != nullptr) [[likely]]
    CompletionHead{opcode, qp.qp_num, qp.dest_qpn, imm, flags}.fill(*wc, wr_id, length);
}

/// Whether a message was fetched whole. If not, one whose sender let go of it is as if it was lost
/// on its way; else the connection ends.
bool fetched(InLane& lane, Qp& qp, LaneCursor& from, std::uint32_t bytes,
             ScatterCursor& to) noexcept {
  const std::uint32_t parts = bytes / static_cast<std::uint32_t>(sizeof(Reference));
  const Fetched result = fetch_references(qp, from, parts, to);
  if (result == Fetched::all) [[likely]]
    return true;
  if (result == Fetched::failed) {
    refuse(lane, qp, Nak::operational, IBV_EVENT_QP_FATAL);
  } else {
    answer_nak(lane, &qp, Nak::not_ready);
  }
  return false;
}

/// SEND into the next posted receive. False if it was not taken.
bool take_send(InLane& lane, Qp& qp, const Arrival& a) noexcept {
  const std::uint32_t slot = qp.receives->head & qp.receives->mask;
  const ReceiveWr& wr = qp.receives->ring[slot];
  const ibv_sge* sges = qp.receives->elements(wr);
  LaneCursor cursor(lane.lines, a.position);
  const bool reference = (a.flags & line_flag::kReference) != 0;
  const std::uint32_t length = reference ? message_length(a, cursor, a.bytes) : a.bytes;
  if (length > wr.capacity) [[unlikely]] {
    fail_receive(qp, wr, IBV_WC_LOC_LEN_ERR);
    refuse(lane, qp, Nak::invalid_request, IBV_EVENT_QP_REQ_ERR);
    return false;
  }
  if (!elements_writable(qp, sges, wr.sge_count)) [[unlikely]] {
    fail_receive(qp, wr, IBV_WC_LOC_PROT_ERR);
    refuse(lane, qp, Nak::operational, IBV_EVENT_QP_FATAL);
    return false;
  }
  ScatterCursor to(sges, wr.sge_count);
  if (reference) {
    if (!fetched(lane, qp, cursor, a.bytes, to)) return false;
  } else {
    for (std::uint32_t left = length; left != 0;) {
      const ScatterCursor::Piece piece = to.take(left);
      cursor.read(piece.data, piece.length);
      left -= static_cast<std::uint32_t>(piece.length);
    }
  }
  if (a.packet == Packet::send_inv && !invalidate_for_peer(qp, a.line->imm)) [[unlikely]] {
    fail_receive(qp, wr, IBV_WC_REM_INV_REQ_ERR);
    refuse(lane, qp, Nak::invalid_request, IBV_EVENT_QP_REQ_ERR);
    return false;
  }
  complete_receive(qp, wr.wr_id, a.packet, a.line->imm, length, IBV_WC_RECV);
  return true;
}

/// WRITE with immediate: the data goes where the sender said, a posted receive tells of it. It runs
/// here, in order with the messages before it. False if it was not taken.
bool take_write(InLane& lane, Qp& qp, const Arrival& a) noexcept {
  const Context& c = context_of(qp.context);
  LaneCursor cursor(lane.lines, a.position);
  if (a.bytes < sizeof(ibv_sge)) [[unlikely]] {
    refuse(lane, qp, Nak::invalid_request, IBV_EVENT_QP_REQ_ERR);
    return false;
  }
  ibv_sge target{};
  cursor.read(reinterpret_cast<std::byte*>(&target), sizeof target);
  const std::uint32_t body = a.bytes - static_cast<std::uint32_t>(sizeof target);
  const std::uint32_t length = message_length(a, cursor, body);
  const auto allows = [&](std::uint64_t scope) {
    return local_allows(*c.segment, scope, target, IBV_ACCESS_REMOTE_WRITE);
  };
  const bool allowed =
      (qp.entry->access.load(std::memory_order_relaxed) & IBV_ACCESS_REMOTE_WRITE) != 0 &&
      (length == 0 || allows(static_cast<Pd*>(qp.pd)->id) || allows(window_scope(qp.qp_num)));
  if (length != target.length || !allowed) [[unlikely]] {
    refuse(lane, qp, Nak::access, IBV_EVENT_QP_ACCESS_ERR);
    return false;
  }
  if ((a.flags & line_flag::kReference) != 0) {
    ScatterCursor to(&target, 1);
    if (!fetched(lane, qp, cursor, body, to)) return false;
  } else {
    cursor.read(pointer(target.addr), length);
  }
  const ReceiveWr& wr = qp.receives->ring[qp.receives->head & qp.receives->mask];
  complete_receive(qp, wr.wr_id, a.packet, a.line->imm, length, IBV_WC_RECV_RDMA_WITH_IMM);
  return true;
}

/// The PSN and the number of the packet behind the one that such a word announces; the PSN wraps
/// within its 24 bits.
inline std::uint64_t next_word(std::uint64_t word) noexcept {
  return (word + (std::uint64_t{1} << 24)) & kExpectedMask;
}
inline void expect(Qp& qp, std::uint64_t expected) noexcept {
  qp.expected = expected;
  qp.entry->expected_psn.store(static_cast<std::uint32_t>(expected >> 24),
                               std::memory_order_release);
}

/// Any packet that take_run left alone.
[[gnu::noinline]] void take_packet(Context& c, InLane& lane, std::uint64_t word) noexcept {
  Line* line = lane.next;
  const std::uint32_t qpn = word_qpn(word);
  const std::uint32_t bytes = line->length;
  // Whatever the sender says, the next packet lies within the lane.
  const std::uint32_t lines = std::min(lines_for(bytes), kLaneLines);
  if (word_packet(word) >= Packet::datagram) {
    take_datagram(c, lane, word, bytes);
    return advance(lane, lines);
  }
  Qp* qp = c.queue_pairs[queue_pair_index(qpn)];
  if (qp == nullptr || qp->qp_num != qpn || qp->expected == kNeverExpected || qp->peer != lane.peer)
      [[unlikely]] {
    answer_nak(lane, nullptr, Nak::not_ready);
  } else if ((word & kExpectedMask) != qp->expected) [[unlikely]] {
    // Behind a packet that was not taken: the sender comes back to that one first.
    if (!qp->nak_given) answer_nak(lane, qp, Nak::not_ready);
  } else if (qp->receives->count() == 0 && !take_from_limit(*qp)) [[unlikely]] {
    answer_nak(lane, qp, Nak::rnr);
  } else {
    qp->nak_given = false;
    const Arrival a{line, lane.head, word_packet(word), word_flags(word), bytes, lines};
    const bool taken =
        a.packet == Packet::write_imm ? take_write(lane, *qp, a) : take_send(lane, *qp, a);
    if (taken) {
      expect(*qp, next_word(word));
      if ((a.flags & line_flag::kSolicited) != 0) ++static_cast<Cq*>(qp->recv_cq)->solicited;
    }
  }
  advance(lane, lines);
}

}  // namespace

std::uint32_t refuse_lane(InLane& lane) noexcept {
  std::uint32_t datagrams = 0;
  if (lane.told) return 0;
  for (std::uint32_t left = kLaneLines; left != 0; --left) {
    const std::uint64_t word = lane.next->word.load(std::memory_order_acquire);
    if (word_mark(word) != lane.mark) break;
    const std::uint32_t lines = std::min(lines_for(lane.next->length), kLaneLines);
    if (word_packet(word) >= Packet::datagram) {
      ++datagrams;
    } else {
      answer_nak(lane, nullptr, Nak::not_ready);
    }
    advance(lane, lines);
  }
  tell_head(lane);
  return datagrams;
}

namespace {

/// Whether a receive is for one element that may be written and has room for `length` bytes.
inline bool fits(const Context& c, Qp& qp, const ReceiveWr& wr, std::uint32_t length) noexcept {
  return wr.sge_count == 1 && length <= wr.capacity &&
         allows_again(c, *static_cast<Pd*>(qp.pd), qp.writable, wr.first, IBV_ACCESS_LOCAL_WRITE);
}

/// One SEND in one line, for a receive of one element, completing to the polled queue. False if it
/// is not that case.
inline bool take_alone(const Context& c, InLane& lane, Cq& cq, std::uint64_t word) noexcept {
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

/// The common case: a run of SENDs of one queue pair, each in one line, for receives of one element
/// with room, completing to the polled queue. The queue's state stays in registers meanwhile, and
/// one compare tells that a line is the one expected; none is at the end of the lane's array.
/// Answers how many were taken, up to `limit`; 0: not that case.
[[gnu::noinline]] std::uint32_t take_run(Context& c, InLane& lane, Cq& cq, std::uint64_t word,
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

/// Consumes what lies in a lane, up to a turn's worth or the room that `cq` has. One packet it
/// takes in any case, into the ring: else completions of sends that fill every array would starve
/// it. False: the lane has to wait for others to be read.
inline bool drain(Context& c, InLane& lane, Cq& cq, std::uint64_t word) noexcept {
  if (lane.told) [[unlikely]]
    return true;
  std::uint32_t left = kPacketsPerTurn;
  Direct direct = Direct::none;
  do {
    std::uint32_t taken = 0;
    if (word_packet(word) >= Packet::datagram) {
      taken = take_datagrams(c, lane, cq, word, left, direct);
      if (direct != Direct::none) break;
      advance(lane, taken);
    } else if (left == kPacketsPerTurn && take_alone(c, lane, cq, word)) {
      taken = 1;
    } else {
      taken = take_run(c, lane, cq, word, left);
    }
    if (taken == 0) [[unlikely]] {
      take_packet(c, lane, word);
      taken = 1;
    }
    left -= std::min(left, taken);
    word = lane.next->word.load(std::memory_order_acquire);
  } while (word_mark(word) == lane.mark && left != 0 && cq.room != 0);
  tell_head(lane);
  return direct != Direct::later;
}

/// Moves older completions from the ring into the caller's array.
int pop(Context& c, Cq& cq, int entries, ibv_wc* wc) noexcept {
  int n = 0;
  for (; n < entries && cq.head != cq.tail; ++n) wc[n] = cq.ring[cq.head++ & cq.mask];
  c.pending.attention -= static_cast<std::uint32_t>(n);
  return n;
}

}  // namespace

/// Completes the packets of a record, the last of which is the only one that can be signaled. Not
/// what was acknowledged already by take_naks, nor what is to be transmitted again.
static inline void complete_run(Qp& qp, const InFlight& run) noexcept {
  if (qp.qp_num != run.qpn || qp.epoch != run.epoch ||
      static_cast<std::int32_t>(run.sq_end - qp.sq_tail) <= 0) [[unlikely]] {
    return;
  }
  qp.sq_tail = run.sq_end - 1;
  complete_oldest(qp);
}

/// Applies that the peer has consumed our lane up to `head`.
static void acknowledge_until(Peer& peer, std::uint64_t head, bool refused) noexcept {
  OutLane& out = peer.out;
  out.head = head;
  out.acked = std::max(out.acked, head);
  out.limit = head + kLaneLines;
  if (refused) [[unlikely]]
    take_naks(peer, head);
  if (peer.stalled != nullptr) [[unlikely]]
    resume_stalled(peer);
  Context& c = *peer.context;
  while (out.in_flight_head != out.in_flight_tail) {
    const InFlight& run = out.in_flight[out.in_flight_head & (kInFlight - 1)];
    if (run.end > head) return;
    Qp* qp = c.queue_pairs[queue_pair_index(run.qpn)];
    if (++out.in_flight_head == out.in_flight_tail) peer.run_of = nullptr;
    if (qp == nullptr) [[unlikely]]
      continue;
    complete_run(*qp, run);
    // What it appends lies behind all records there are, not where this one is. Another's index
    // may be the same by now.
    if (qp->sq_next != qp->sq_head && !qp->stalled && qp->qp_num == run.qpn) [[unlikely]]
      pump(*qp);
  }
}

void acknowledge(Peer& peer) noexcept {
  OutLane& out = peer.out;
  const std::uint64_t head = out.control->head.load(std::memory_order_acquire);
  if (head == out.head) return;
  // Beyond what was seen before: it may concern packets up to `head`, and be later than that.
  acknowledge_until(peer, head, out.control->last_nak.load(std::memory_order_acquire) > out.head);
}

/// Notes the acknowledgement that comes along with the packet that is next in the lane. The next
/// poll applies it: an answer to this packet goes out first.
static inline void note_ack(Peer& peer, const Line& line, std::uint64_t word) noexcept {
  OutLane& out = peer.out;
  if ((word_flags(word) & line_flag::kNoAck) != 0) [[unlikely]]
    return acknowledge(peer);
  const auto news = static_cast<std::uint16_t>(line.ack - static_cast<std::uint16_t>(out.acked));
  // Older than what was found in the lane itself, if it is ahead of all that was sent.
  if (news == 0 || out.acked + news > out.tail) return;
  out.acked += news;
  if (peer.noted) return;
  peer.noted = true;
  Context& c = *peer.context;
  c.noted[c.pending.noted++] = &peer;
}

/// Applies what the packets of the poll before told.
static inline void apply_noted(Context& c) noexcept {
  do {
    Peer& peer = *c.noted[--c.pending.noted];
    peer.noted = false;
    if (peer.out.acked > peer.out.head) acknowledge_until(peer, peer.out.acked, false);
  } while (c.pending.noted != 0);
}

/// Looks for acknowledgements in the lanes, and forgets the peers that owe none.
__attribute__((noinline)) static void look_at_answers(Context& c) noexcept {
  c.ack_patience = kAckPatience;
  for (std::uint32_t i = 0; i < c.pending.unacked;) {
    Peer& peer = *c.unacked[i];
    acknowledge(peer);
    if (peer.stalled != nullptr) c.ack_patience = 1;  // the next poll looks again
    // Nobody waits for an answer to a datagram, unless for the room that it takes.
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
  if (c.pending.noted != 0) apply_noted(c);
  if (c.pending.unacked != 0 && --c.ack_patience <= 0) [[unlikely]]
    look_at_answers(c);
  // Begins behind the lane that filled the caller's array last time, so that none starves.
  const std::uint32_t awake = c.awake_count;
  std::uint32_t turn = c.turn;
  for (std::uint32_t i = awake; i != 0; --i) {
    if (turn >= awake) turn = 0;
    InLane& lane = *c.awake[turn++];
    const std::uint64_t word = lane.next->word.load(std::memory_order_acquire);
    if (word_mark(word) == lane.mark) {
      if (lane.peer != nullptr && lane.peer->unacked) note_ack(*lane.peer, *lane.next, word);
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
    attend(c);
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
  // A poll that finds nothing ends here, after a look at each lane that is awake.
  if (c.segment->doorbell.load(std::memory_order_relaxed) == 0) [[likely]] {
    if (std::bit_cast<std::uint64_t>(c.pending) == 0) {
      if (!any_packet(c)) return 0;
    } else if (c.pending.attention == 0 && c.pending.noted == 0 && c.ack_patience > 1 &&
               !any_packet(c)) {
      --c.ack_patience;
      return 0;
    }
  }
  return poll_busy(base, entries, wc);
}

}  // namespace spinwire::softverbs
