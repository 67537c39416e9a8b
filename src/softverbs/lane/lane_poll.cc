// poll_cq: receives packets from the lanes that are awake, and applies acknowledgements. Hot.
#include <errno.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "softverbs/device_control.h"
#include "softverbs/lane/lane_data.h"
#include "softverbs/memory/memory_region.h"
#include "softverbs/memory/memory_window.h"
#include "softverbs/objects.h"
#include "softverbs/queues.h"
#include "softverbs/rc/rc_direct.h"
#include "softverbs/ud/ud_datagram.h"

namespace spinwire::softverbs {
namespace {

/// Limit on the packets received from one lane in one poll, so that no lane starves the others.
constexpr std::uint32_t kPacketsPerTurn = 64;

/// Whether a receive has one writable element with room for `length` bytes, of a line.
inline bool fits_receive(const Context& c, Qp& qp, const ReceiveWr& wr,
                         std::uint64_t length) noexcept {
  return wr.sge_count == 1 && static_cast<std::uint32_t>(length) <= wr.capacity &&
         allows_again(c, *static_cast<Pd*>(qp.pd), qp.writable, wr.first, IBV_ACCESS_LOCAL_WRITE);
}

/// Receives one SEND whose bytes are in its line into a receive of one element, completing to the
/// polled queue. False if the packet is of another kind.
inline bool receive_one(const Context& c, InLane& lane, Cq& cq, Qp& qp,
                        std::uint64_t word) noexcept {
  const Line& line = *lane.next;
  const std::uint64_t length = line.read_length();
  if (word != (lane.mark << 56 | packet_kind(Packet::send, 0) << 48 | qp.expected) ||
      length > kLinePayload) {
    return false;
  }
  ReceiveQueue& receives = *qp.receives;
  if (receives.count() == 0 || cq.room == 0) [[unlikely]]
    return false;
  const ReceiveWr& wr = receives.ring[receives.head & receives.mask];
  if (!fits_receive(c, qp, wr, length)) [[unlikely]]
    return false;
  copy_small(pointer(wr.first.addr), line.payload, length);
  CompletionHead{IBV_WC_RECV, qp.qp_num, qp.dest_qpn}.fill(*cq.out++, wr.wr_id, length);
  --cq.room;
  ++receives.head;
  qp.nak_given = false;
  qp.expected = next_word(word);
  advance(lane, 1);
  return true;
}

/// Receives a run of SENDs of one queue pair, whose bytes are in the lane, into receives of one
/// element, completing to the polled queue. The queue's state stays in registers, and one
/// comparison checks a line; Lane::end never matches. Returns the number received, up to `limit`; 0
/// if the packet is of another kind.
template <Sizes sizes>
[[gnu::noinline]] std::uint32_t receive_run(const Context& c, InLane& lane, Cq& cq, Qp& qp,
                                            std::uint32_t limit) noexcept {
  ReceiveQueue& receives = *qp.receives;
  const ReceiveWr* const ring = receives.ring.get();
  const std::uint32_t ring_mask = receives.mask;
  const CompletionHead success{IBV_WC_RECV, qp.qp_num, qp.dest_qpn};
  const std::uint32_t most = std::min(limit, std::min(cq.room, receives.count()));
  std::uint32_t left = most;
  ibv_wc* out = cq.out;
  const Line* line = lane.next;
  const std::uint64_t kind = lane.mark << 56 | packet_kind(Packet::send, 0) << 48;
  std::uint64_t expected = qp.expected;
  std::uint32_t head = receives.head;
  for (; left != 0 && line->word.load(std::memory_order_acquire) == (kind | expected); --left) {
    const std::uint64_t length = line->read_length();
    const ReceiveWr& wr = ring[head & ring_mask];
    if ((sizes == Sizes::line && length > kLinePayload) || !fits_receive(c, qp, wr, length))
        [[unlikely]]
      break;
    if (sizes == Sizes::line || length <= kLinePayload) {
      copy_small(pointer(wr.first.addr), line->payload, length);
    } else {
      const std::byte* const from = packet_data(lane.data, *line, length);
      if (from == nullptr) [[unlikely]]
        break;
      std::memcpy(pointer(wr.first.addr), from, length);
    }
    success.fill(*out++, wr.wr_id, length);
    ++head;
    ++line;
    expected = next_word(expected);
  }
  const std::uint32_t taken = most - left;
  if (taken == 0) return 0;
  qp.nak_given = false;
  qp.expected = expected;
  receives.head = head;
  cq.out = out;
  cq.room -= taken;
  advance(lane, taken);
  return taken;
}

/// The connected queue pair that a packet of its peer is for; null if it does not receive with
/// `cq`.
inline Qp* receiver_of(const Context& c, const InLane& lane, const Cq& cq,
                       std::uint64_t word) noexcept {
  Qp* const qp = c.queue_pairs + queue_pair_index(word_qpn(word));
  const bool receives =
      qp->peer == lane.peer && qp->receives_with == &cq && qp->expected != kNeverExpected;
  return receives ? qp : nullptr;
}

/// Prefetches the queue pairs of the packets at the head of a lane. For packets of several queue
/// pairs, each of which is a miss if there are many. Never reads behind the lane's newest line.
[[gnu::noinline]] void prefetch_receivers(const Context& c, const InLane& lane) noexcept {
  const Line* const end = std::min<const Line*>(lane.next + kPacketsPerTurn, lane.end);
  for (const Line* line = lane.next; line != end; ++line) {
    const std::uint64_t word = line->word.load(std::memory_order_relaxed);
    if (word_mark(word) != lane.mark) return;
    __builtin_prefetch(
        static_cast<const MessageState*>(c.queue_pairs + queue_pair_index(word_qpn(word))));
  }
}

/// Messages in the lane are read in place until the next release.
inline void list_in_use(Context& c, InLane& lane) noexcept {
  if (std::exchange(lane.in_use, true)) return;
  c.reads.lanes.push_front(lane);
}

/// Prefetches what the user of a message that is read in place touches first.
inline void prefetch_record(const void* record) noexcept {
  const auto at = reinterpret_cast<std::uintptr_t>(record);  // may be null
  for (std::size_t line = 0; line < kRecordLines; ++line)
    __builtin_prefetch(reinterpret_cast<const void*>(at + 64 * line));
}

/// Reports a run of plain messages of a queue pair that reads in place, one completion each, from
/// `out` on. Returns how many, up to `limit`; 0 if the packet is of another kind.
inline std::uint32_t report_in_place(Context& c, InLane& lane, Qp& qp, ibv_wc* out,
                                     std::uint32_t limit) noexcept {
  // The number of the queue pair is part of what it expects; ibv_qp::qp_num is in another line.
  prefetch_record(qp.record);
  const CompletionHead success{IBV_WC_RECV, word_qpn(qp.expected),
                               qp.dest_qpn, 0,
                               0,           reinterpret_cast<std::uint64_t>(qp.record)};
  const std::uint64_t kind = lane.mark << 56 | packet_kind(Packet::send, 0) << 48;
  const std::uint32_t most = std::min(limit, c.reads.budget);
  std::uint32_t left = most;
  std::uint64_t expected = qp.expected;
  const Line* line = lane.next;
  for (; left != 0 && line->word.load(std::memory_order_acquire) == (kind | expected); --left) {
    const std::uint64_t length = line->read_length();
    const std::byte* const bytes = packet_bytes(lane, *line, length);
    if (bytes == nullptr) [[unlikely]]
      break;
    success.fill(*out++, reinterpret_cast<std::uint64_t>(bytes) | kInPlace, length);
    ++line;
    expected = next_word(expected);
  }
  const std::uint32_t taken = most - left;
  if (taken == 0) return 0;
  qp.nak_given = false;
  qp.expected = expected;
  c.reads.budget -= taken;
  advance(lane, taken);
  list_in_use(c, lane);
  return taken;
}

/// What receive_messages() returns when the lane has to wait for room in the caller's array.
constexpr std::uint32_t kLaneWaits = ~0u;

/// Reports a plain message in place that is too long for a receive. 0: the packet is of another
/// kind. The length is read once, because a peer can change it.
[[gnu::noinline]] std::uint32_t report_long_in_place(Context& c, InLane& lane, Cq& cq,
                                                     Qp& qp) noexcept {
  const Line& line = *lane.next;
  const std::uint64_t kind = lane.mark << 56 | packet_kind(Packet::send, 0) << 48;
  const std::uint64_t length = line.read_length();
  if (length <= qp.longest_received ||
      line.word.load(std::memory_order_acquire) != (kind | qp.expected))
    return 0;
  const std::byte* const bytes = packet_bytes(lane, line, length);
  if (bytes == nullptr) return 0;
  // Not into the ring: what is reported there may be polled after the message was released.
  if (cq.room == 0) return kLaneWaits;
  const auto record = reinterpret_cast<std::uint64_t>(qp.record);
  CompletionHead{IBV_WC_RECV, qp.qp_num, qp.dest_qpn, 0, 0, record}.fill(
      *cq.out++, reinterpret_cast<std::uint64_t>(bytes) | kInPlace, length);
  --cq.room;
  qp.nak_given = false;
  qp.expected = next_word(qp.expected);
  advance(lane, 1);
  list_in_use(c, lane);
  return 1;
}

/// Receives messages from the head of a lane. Returns the number received, up to `limit`; 0 if the
/// packet is of another kind; or kLaneWaits.
inline std::uint32_t receive_messages(Context& c, InLane& lane, Cq& cq, std::uint64_t word,
                                      std::uint32_t limit) noexcept {
  Qp* const qp = receiver_of(c, lane, cq, word);
  if (qp == nullptr) [[unlikely]]
    return 0;
  std::uint32_t taken = 0;
  if (qp->in_place) {
    taken = report_in_place(c, lane, *qp, cq.out, std::min(limit, cq.room));
    cq.out += taken;
    cq.room -= taken;
    if (taken != 0) return taken;
    taken = report_long_in_place(c, lane, cq, *qp);
    if (taken != 0) return taken;
  }
  if (limit == kPacketsPerTurn && receive_one(c, lane, cq, *qp, word)) return 1;
  taken = receive_run<Sizes::line>(c, lane, cq, *qp, limit);
  return taken != 0 ? taken : receive_run<Sizes::any>(c, lane, cq, *qp, limit);
}

/// Reports the datagrams at the head of a lane by one completion, if its last batch began with the
/// same word. The general path checks what is left out here.
[[gnu::always_inline]] inline bool report_known_batch(InLane& lane, const Cq& cq,
                                                      std::uint64_t word,
                                                      ibv_wc& completion) noexcept {
  if (word != lane.batch.word || lane.batch_cq != &cq || lane.batch_reported) [[unlikely]]
    return false;
  DirectBatches& batches = *lane.batch_qp->direct;
  std::uint64_t length = 0;
  if (batches.count != 0 || lane.batch.bytes(*lane.next, length, batches.longest) == nullptr)
      [[unlikely]]
    return false;
  lane.batch.first = lane.next;
  lane.batch.limit = std::min(lane.next + kPacketsPerTurn, lane.end);
  lane.batch_reported = true;
  batches.batches[0] = &lane.batch;
  batches.count = 1;
  completion = batches.completion;
  return true;
}

/// Receives the packets in a lane, up to kPacketsPerTurn or the room of `cq`. Receives at least
/// one, into the ring if necessary: send completions that fill every array would otherwise starve
/// the lane. False if the lane has to wait until the user has read the reported batches.
[[gnu::noinline]] bool receive_from_lane(Context& c, InLane& lane, Cq& cq,
                                         std::uint64_t word) noexcept {
  if (lane.batch_reported) [[unlikely]]
    return true;
  std::uint32_t left = kPacketsPerTurn;
  DirectOutcome direct = DirectOutcome::none;
  do {
    std::uint32_t taken = 0;
    if (word_packet(word) >= Packet::datagram) {
      taken = receive_datagrams(c, lane, cq, word, left, direct);
      if (direct != DirectOutcome::none) break;
      advance(lane, taken);
    } else {
      taken = receive_messages(c, lane, cq, word, left);
      if (taken == kLaneWaits) [[unlikely]]
        break;
    }
    if (taken == 0) [[unlikely]] {
      if (!receive_packet(c, lane, word)) [[unlikely]]
        break;
      taken = 1;
    }
    left -= std::min(left, taken);
    word = lane.next->word.load(std::memory_order_acquire);
  } while (word_mark(word) == lane.mark && left != 0 && cq.room != 0);
  publish_head(lane);
  return direct != DirectOutcome::full;
}

/// Moves older completions from the ring into the caller's array.
int take_from_ring(Context& c, Cq& cq, int entries, ibv_wc* wc) noexcept {
  int n = 0;
  for (; n < entries && cq.head != cq.tail; ++n) wc[n] = cq.ring[cq.head++ & cq.mask];
  c.pending.slow_work -= static_cast<std::uint32_t>(n);
  return n;
}

}  // namespace

/// Completes the packets of a record; only the last can be signaled. Skips packets that
/// apply_naks() has acknowledged already, or that are to be retransmitted.
static inline void complete_run(Qp& qp, const InFlight& run) noexcept {
  if (qp.qp_num != run.qpn || qp.epoch != run.epoch ||
      static_cast<std::int32_t>(run.sq_end - qp.sq_tail) <= 0) [[unlikely]] {
    return;
  }
  qp.sq_tail = run.sq_end - 1;
  complete_oldest(qp);
}

/// Applies the peer's acknowledgement of lines up to `head`.
[[gnu::always_inline]] static inline void apply_acks_until(Peer& peer, std::uint64_t head,
                                                           bool refused) noexcept {
  OutLane& out = peer.out;
  const std::uint64_t before = std::exchange(out.head, head);
  out.limit = head + kLaneLines;
  const bool waited = std::exchange(peer.waits_for_acks, false);  // run_send_queue() waits again
  if (refused) [[unlikely]]
    apply_naks(peer, before, head);
  if (!peer.stalled.empty()) [[unlikely]]
    resume_stalled(peer);
  Context& c = *peer.context;
  while (out.in_flight_head != out.in_flight_tail) {
    const InFlight& run = out.in_flight[out.in_flight_head & (kInFlight - 1)];
    if (run.end > head) {
      // The work request that waits may wait for this run.
      if (waited) [[unlikely]]
        watch_next_poll(peer);
      return;
    }
    Qp* qp = find_queue_pair(c, queue_pair_index(run.qpn));
    if (++out.in_flight_head == out.in_flight_tail) peer.in_flight_owner = nullptr;
    if (qp == nullptr) [[unlikely]]
      continue;
    complete_run(*qp, run);
    // run_send_queue() appends records, which may overwrite `run`. The index may belong to another
    // queue pair by now.
    if (qp->sq_next != qp->sq_head && !qp->stalled && qp->qp_num == run.qpn) [[unlikely]]
      run_send_queue(*qp);
  }
}

void apply_peer_acks(Peer& peer) noexcept {
  OutLane& out = peer.out;
  const std::uint64_t head = out.control->head.load(std::memory_order_acquire);
  // Nothing new, or a count that the peer cannot have reached.
  if (head - out.head - 1 >= out.tail - out.head) return;
  out.acked = std::max(out.acked, head);
  // A negative answer beyond `out.head` may concern packets up to `head`, or later ones.
  apply_acks_until(peer, head, out.control->last_nak.load(std::memory_order_acquire) > out.head);
}

/// Records the acknowledgement that the next packet in the lane carries. The next poll applies it,
/// so that a reply to this packet leaves first.
static inline void record_ack(Peer& peer, const Line& line, std::uint64_t word) noexcept {
  OutLane& out = peer.out;
  if ((word_flags(word) & line_flag::kNoAck) != 0) [[unlikely]]
    return apply_peer_acks(peer);
  const auto news =
      static_cast<std::uint16_t>(line.read_ack() - static_cast<std::uint16_t>(out.acked));
  // An acknowledgement ahead of `tail` is older than one that was read from the lane.
  if (news == 0 || out.acked + news > out.tail) return;
  out.acked += news;
  if (peer.ack_due) return;
  peer.ack_due = true;
  Context& c = *peer.context;
  c.acks_due[c.pending.acks_due++] = &peer;
}

/// Applies the acknowledgements that the previous poll recorded.
[[gnu::noinline]] static void apply_acks(Context& c) noexcept {
  do {
    Peer& peer = *c.acks_due[--c.pending.acks_due];
    peer.ack_due = false;
    if (peer.out.acked > peer.out.head) apply_acks_until(peer, peer.out.acked, false);
  } while (c.pending.acks_due != 0);
}

/// Reads acknowledgements from the lanes, and unlists the peers with none outstanding.
__attribute__((noinline)) static void check_acknowledgements(Context& c) noexcept {
  c.ack_countdown = kAckInterval;
  for (std::uint32_t i = 0; i < c.pending.unacked;) {
    Peer& peer = *c.unacked[i];
    apply_peer_acks(peer);
    if (!peer.stalled.empty() || peer.waits_for_acks)
      c.ack_countdown = 1;  // the next poll reads again
    // Acknowledgements of datagrams matter only while a queue pair waits for room.
    const bool awaited =
        peer.out.in_flight_head != peer.out.in_flight_tail || !peer.stalled.empty();
    if (!awaited || peer.out.head == peer.out.tail || peer.gone) {
      peer.unacked = false;
      c.unacked[i] = c.unacked[--c.pending.unacked];
    } else {
      ++i;
    }
  }
}

/// Receives the packets in a lane, which holds at least one. False if the lane has to wait.
[[gnu::always_inline]] static inline bool receive_from(Context& c, InLane& lane, Cq& cq,
                                                       std::uint64_t word) noexcept {
  if (lane.peer != nullptr && lane.peer->unacked) record_ack(*lane.peer, *lane.next, word);
  return receive_from_lane(c, lane, cq, word);
}

/// Receives from all lanes that are awake. Starts after the lane that filled the caller's array in
/// the last poll, so that no lane starves.
[[gnu::noinline]] static void receive_in_turns(Context& c, Cq& cq) noexcept {
  const std::uint32_t awake = c.awake_count;
  std::uint32_t turn = c.turn;
  for (std::uint32_t i = awake; i != 0; --i) {
    if (turn >= awake) turn = 0;
    InLane& lane = *c.awake[turn++];
    const std::uint64_t word = lane.next->word.load(std::memory_order_acquire);
    if (word_mark(word) != lane.mark) continue;
    if (!receive_from(c, lane, cq, word)) [[unlikely]] {
      --turn;
      break;
    }
    if (cq.room == 0) break;
  }
  c.turn = turn;
}

/// A poll that may find work.
__attribute__((noinline)) static int poll_busy(ibv_cq* base, int entries, ibv_wc* wc) noexcept {
  Cq& cq = *static_cast<Cq*>(base);
  Context& c = context_of(base->context);
  int got = 0;
  if (cq.head != cq.tail) [[unlikely]] {
    got = take_from_ring(c, cq, entries, wc);
    if (got == entries) return got;
  }
  cq.out = wc + got;
  cq.room = static_cast<std::uint32_t>(entries - got);
  if (c.pending.acks_due != 0) apply_acks(c);
  if (c.pending.unacked != 0 && --c.ack_countdown <= 0) [[unlikely]]
    check_acknowledgements(c);
  if (c.awake_count == 1) [[likely]] {
    InLane& lane = *c.awake[0];
    const std::uint64_t word = lane.next->word.load(std::memory_order_acquire);
    if (word_mark(word) == lane.mark) (void)receive_from(c, lane, cq, word);
  } else {
    receive_in_turns(c, cq);
  }
  if (c.segment->doorbell.load(std::memory_order_relaxed) != 0) [[unlikely]]
    wake_lanes(c);
  if (c.pending.slow_work != 0) [[unlikely]]
    run_timers(c);
  got = static_cast<int>(cq.out - wc);
  cq.room = 0;
  return got;
}

/// Reports the messages at the head of the only lane awake where they lie, without the general
/// path.
[[gnu::noinline]] static int poll_in_place(ibv_cq* base, int entries, ibv_wc* wc) noexcept {
  Context& c = context_of(base->context);
  InLane& lane = *c.awake[0];
  const std::uint64_t word = lane.next->word.load(std::memory_order_acquire);
  Qp* const qp = receiver_of(c, lane, *static_cast<Cq*>(base), word);
  if (qp != nullptr && qp->in_place && !lane.batch_reported) [[likely]] {
    const auto limit = std::min(static_cast<std::uint32_t>(entries), kPacketsPerTurn);
    const std::uint32_t taken = report_in_place(c, lane, *qp, wc, limit);
    // The run ends where the lane wraps around, or at a packet of another kind.
    const bool more = word_mark(lane.next->word.load(std::memory_order_acquire)) == lane.mark;
    const int reported = static_cast<int>(taken);
    if (!more || taken == limit) [[likely]]
      return reported;
    prefetch_receivers(c, lane);
    return reported + poll_busy(base, entries - reported, wc + reported);
  }
  return poll_busy(base, entries, wc);
}

/// Reports the message at the head of a lane where it lies, if no packet is behind it: as
/// report_in_place() would, without a loop.
[[gnu::always_inline]] static inline bool report_lone(Context& c, InLane& lane, const Cq& cq,
                                                      std::uint64_t word, ibv_wc& wc) noexcept {
  Qp* const qp = receiver_of(c, lane, cq, word);
  if (qp == nullptr || !qp->in_place || lane.batch_reported) [[unlikely]]
    return false;
  const std::uint64_t kind = lane.mark << 56 | packet_kind(Packet::send, 0) << 48;
  // Behind the last line of the lane the first one may hold the next packet.
  if (word != (kind | qp->expected) || c.reads.budget == 0 || lane.next + 1 == lane.end ||
      word_mark(lane.next[1].word.load(std::memory_order_relaxed)) == lane.mark) {
    return false;
  }
  const std::uint64_t length = lane.next->read_length();
  const std::byte* const bytes = packet_bytes(lane, *lane.next, length);
  if (bytes == nullptr) [[unlikely]]
    return false;
  prefetch_record(qp->record);
  const auto record = reinterpret_cast<std::uint64_t>(qp->record);
  CompletionHead{IBV_WC_RECV, word_qpn(word), qp->dest_qpn, 0, 0, record}.fill(
      wc, reinterpret_cast<std::uint64_t>(bytes) | kInPlace, length);
  qp->nak_given = false;
  qp->expected = next_word(qp->expected);
  --c.reads.budget;
  advance(lane, 1);
  list_in_use(c, lane);
  return true;
}

/// A poll with packets in the only lane awake, and nothing else to do. Three common kinds of
/// packets have short paths.
[[gnu::noinline]] static int poll_quiet(ibv_cq* base, int entries, ibv_wc* wc, InLane& lane,
                                        std::uint64_t word) noexcept {
  Context& c = context_of(base->context);
  if (entries <= 0) [[unlikely]]
    return poll_busy(base, entries, wc);
  const Cq& cq = *static_cast<const Cq*>(base);
  if (report_known_batch(lane, cq, word, *wc) || report_lone(c, lane, cq, word, *wc)) return 1;
  return poll_in_place(base, entries, wc);
}

/// Whether any awake lane holds a packet.
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
  // A poll without work ends here, after reading one word of each awake lane.
  if (c.segment->doorbell.load(std::memory_order_relaxed) == 0) [[likely]] {
    if (std::bit_cast<std::uint64_t>(c.pending) == 0) {
      if (c.awake_count != 1) return any_packet(c) ? poll_busy(base, entries, wc) : 0;
      InLane& lane = *c.awake[0];
      const std::uint64_t word = lane.next->word.load(std::memory_order_acquire);
      return word_mark(word) == lane.mark ? poll_quiet(base, entries, wc, lane, word) : 0;
    }
    if (c.pending.slow_work == 0 && c.pending.acks_due == 0 && c.ack_countdown > 1 &&
        !any_packet(c)) {
      --c.ack_countdown;
      return 0;
    }
  }
  return poll_busy(base, entries, wc);
}

}  // namespace spinwire::softverbs
