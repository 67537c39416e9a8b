// Steps of the send and receive queues that several files share. Hot, unless marked cold.
#pragma once

#include <infiniband/verbs.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "softverbs/objects.h"

namespace spinwire::softverbs {

int post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad) noexcept;
int post_recv(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad) noexcept;
int post_srq_recv(ibv_srq* srq, ibv_recv_wr* wr, ibv_recv_wr** bad) noexcept;
int poll_cq(ibv_cq* cq, int entries, ibv_wc* wc) noexcept;

/// Runs a work request on the peer's memory. False if it failed, or has to wait.
bool run_one_sided(Qp& qp, const SendWr& wr, const ibv_sge* sges) noexcept;
/// Runs a READ while earlier work requests are in flight. False, and nothing failed: it has to run
/// in its turn.
bool read_ahead(Qp& qp, const SendWr& wr, const ibv_sge* sges) noexcept;
/// Runs the READs and WRITEs at the head of a list. See DirectMessages::run.
ibv_send_wr* run_at_once(Qp& qp, ibv_send_wr* wr) noexcept;
/// Stores a word into the peer's memory, with the checks of a WRITE. See
/// DirectMessages::write_word.
bool write_word(Qp& qp, std::uint64_t address, std::uint32_t rkey, std::uint64_t word) noexcept;
/// Runs and transmits queued work requests, as far as order, room and retry timers allow.
void run_send_queue(Qp& qp) noexcept;
/// Reads and applies the peer's acknowledgement of the lane to it, and its negative answers.
void apply_peer_acks(Peer& peer) noexcept;

/// Number of polls after which acknowledgements that no packet carried are read from the lane.
/// Reading takes the cache line from the peer, which writes it in each poll that receives. In a
/// ping-pong that costs both ends more than a later send completion.
inline constexpr std::int32_t kAckInterval = 48;

/// Whether a connection's work request does not involve the peer.
constexpr bool is_local(std::uint8_t opcode) noexcept {
  return opcode == IBV_WR_BIND_MW || opcode == IBV_WR_LOCAL_INV;
}
/// Whether a connection's work request consumes one of the peer's receives.
constexpr bool is_packet(std::uint8_t opcode) noexcept {
  constexpr std::uint32_t kPackets = 1u << IBV_WR_SEND | 1u << IBV_WR_SEND_WITH_IMM |
                                     1u << IBV_WR_SEND_WITH_INV | 1u << IBV_WR_RDMA_WRITE_WITH_IMM;
  return (kPackets >> opcode & 1) != 0;
}

/// PSN and queue pair of the packet after the one with this word; the PSN wraps at 24 bits.
inline std::uint64_t next_word(std::uint64_t word) noexcept {
  return (word + (std::uint64_t{1} << 24)) & kExpectedMask;
}
/// Shows the peer which packets the queue pair has received. Before a packet is refused, and before
/// the queue pair stops responding: until then it has received all packets that were consumed.
/// Cold.
inline void show_expected(Qp& qp) noexcept {
  if (qp.expected == kNeverExpected) return;
  qp.entry->expected_psn.store(word_psn(qp.expected), std::memory_order_release);
}

/// The queue pair expects no packet any more. Cold.
inline void expect_nothing(Qp& qp) noexcept {
  if (qp.expected == kNeverExpected) return;
  show_expected(qp);
  qp.attr.rq_psn = static_cast<std::uint32_t>(qp.expected >> 24) & 0xffffff;
  qp.expected = kNeverExpected;
}
/// Sets the ident that peers see, and its private copy. Cold.
inline void set_ident(Qp& qp, std::uint64_t ident) noexcept {
  qp.rights->ident.store(ident, std::memory_order_release);
  qp.entry->rights.ident.store(ident, std::memory_order_release);
}
/// Sets the nonce of the peer that the queue pair serves, likewise. Cold.
inline void set_remote(Qp& qp, std::uint64_t nonce) noexcept {
  qp.rights->remote.store(nonce, std::memory_order_release);
  qp.entry->rights.remote.store(nonce, std::memory_order_release);
}

/// The peer's part of the connection, as peers see it.
inline QueuePairEntry& remote_entry(const Qp& qp) noexcept {
  return qp.peer->segment->queue_pairs[queue_pair_index(qp.dest_qpn)];
}
/// What the peer's queue pair allows: by the segment, or the private table of a peer in this
/// process, whose memory other processes must not open to us.
inline const QueuePairRights& rights_of_remote(const Qp& qp) noexcept {
  return qp.peer->same_process ? qp.peer->local.queue_pairs[queue_pair_index(qp.dest_qpn)]
                               : remote_entry(qp).rights;
}
/// Whether the peer's queue pair is connected to ours, `number`, and responds. It does until it
/// fails.
inline bool is_served(const Qp& qp, const QueuePairRights& remote, std::uint32_t number) noexcept {
  return remote.ident.load(std::memory_order_acquire) == queue_pair_ident(qp.dest_qpn, number) &&
         remote.remote.load(std::memory_order_relaxed) == qp.peer->context->nonce;
}
inline bool is_served(const Qp& qp, const QueuePairRights& remote) noexcept {
  return is_served(qp, remote, qp.qp_num);
}
/// Whether polls have not yet received all packets in a lane.
inline bool has_packet(const InLane& lane) noexcept {
  return word_mark(lane.next->word.load(std::memory_order_acquire)) == lane.mark;
}

// Cold.
/// Hides as many receives from the hot paths as the limit of a shared queue.
void hide_reserve(ReceiveQueue& queue) noexcept;
/// Shows the hot paths all receives.
void expose_reserve(ReceiveQueue& queue) noexcept;
/// Called when a packet finds no receive: raises the limit event and shows the hidden receives.
/// False if none are hidden.
bool claim_reserve(Qp& qp) noexcept;
/// Appends a queue pair to the list of those that wait for room in their peer's lane.
void stall(Qp& qp) noexcept;
/// Removes a queue pair from the list.
void unstall(Qp& qp) noexcept;
/// Sends for the waiting queue pairs, in turn, until the lane is full again.
void resume_stalled(Peer& peer) noexcept;
/// Fails the oldest work request: the queue pair goes to ERR and the rest is flushed.
void fail_oldest(Qp& qp, ibv_wc_status status) noexcept;
/// Stops responding to one-sided requests. Peers can still read earlier answers.
void stop_serving(Qp& qp) noexcept;
/// Enters ERR: stops responding and flushes both queues.
void enter_error(Qp& qp) noexcept;
/// Goes back to the oldest work request and retries it after the delay for `reason`.
void retry(Qp& qp, Nak reason, std::uint32_t rnr_timer) noexcept;
/// Fails the oldest work request of a queue pair whose peer is gone. With Driving::by_poll it fails
/// when the retries run out, as on a network, so that two programs that end at the same time do not
/// disturb each other.
void handle_unreachable(Qp& qp) noexcept;
/// Runs the queue pair's next work request again after `delay`.
void wait_until(Qp& qp, Nanoseconds delay) noexcept;
/// Applies the negative answers of a peer's queue pairs to the packets in lines `acked` to `head`.
void apply_naks(Peer& peer, std::uint64_t acked, std::uint64_t head) noexcept;
/// Runs expired timers, and with Driving::by_poll control().
void run_timers(Context& c) noexcept;
/// Consumes all packets in a lane as if they were lost. Returns the number of datagrams among them.
std::uint32_t discard_lane(const Context& c, InLane& lane) noexcept;
void ring_doorbell(Peer& peer) noexcept;
/// Wakes the owner of a segment if it sleeps. Call it after the store that it is woken for, which
/// must be sequentially consistent.
void wake_sleeper(Peer& peer) noexcept;
/// Tells a peer that this context has closed, after the store to Segment::closed: wakes it, or has
/// it look before its next sleep.
void announce_end(Peer& peer) noexcept;
/// Receives the next packet in a lane, of any kind. False: it waits for the next control step, or
/// it ends the turn of the lane.
bool receive_packet(Context& c, InLane& lane, std::uint64_t word) noexcept;
/// Adds a completion with an error; only status, wr_id and qp_num are defined for the user.
void push_error(Cq& cq, const Qp& qp, std::uint64_t wr_id, ibv_wc_status status,
                ibv_wc_opcode opcode) noexcept;

constexpr ibv_wc_opcode completion_opcode(std::uint8_t opcode) noexcept {
  switch (opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
      return IBV_WC_RDMA_WRITE;
    case IBV_WR_RDMA_READ:
      return IBV_WC_RDMA_READ;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
      return IBV_WC_COMP_SWAP;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
      return IBV_WC_FETCH_ADD;
    case IBV_WR_LOCAL_INV:
      return IBV_WC_LOCAL_INV;
    case IBV_WR_BIND_MW:
      return IBV_WC_BIND_MW;
    default:
      return IBV_WC_SEND;
  }
}

/// Takes a slot in the queue's ring. Null if the queue is overrun, which raises an event.
ibv_wc* ring_slot(Cq& cq) noexcept;
/// Takes a slot for a completion; null if the queue is overrun.
inline ibv_wc* completion_slot(Cq& cq) noexcept {
  if (cq.room == 0) return ring_slot(cq);
  --cq.room;
  return cq.out++;
}

/// The fields that the successful completions of a run share. Filling in a completion takes six
/// stores.
class CompletionHead {
 public:
  CompletionHead(ibv_wc_opcode opcode, std::uint32_t qp_num, std::uint32_t src_qp,
                 std::uint32_t imm = 0, unsigned flags = 0, std::uint64_t rest = 0) noexcept
      : kind_(IBV_WC_SUCCESS | std::uint64_t{opcode} << 32),
        numbers_(imm | std::uint64_t{qp_num} << 32),
        source_(src_qp | std::uint64_t{flags} << 32),
        rest_(rest) {}
  /// `byte_len` is below 2^32.
  void fill(ibv_wc& wc, std::uint64_t wr_id, std::uint64_t byte_len) const noexcept {
    static_assert(sizeof wc == 48 && offsetof(ibv_wc, opcode) == 12 &&
                  offsetof(ibv_wc, byte_len) == 20 && offsetof(ibv_wc, imm_data) == 24 &&
                  offsetof(ibv_wc, qp_num) == 28 && offsetof(ibv_wc, src_qp) == 32 &&
                  offsetof(ibv_wc, wc_flags) == 36);
    put(wc, 0, wr_id);
    put(wc, 8, kind_);
    // The analyzer mistakes this for a 32-bit shift.
    put(wc, 16, byte_len << 32);  // NOLINT(clang-analyzer-core.*)
    put(wc, 24, numbers_);
    put(wc, 32, source_);
    put(wc, 40, rest_);
  }

 private:
  static void put(ibv_wc& wc, std::size_t offset, std::uint64_t word) noexcept {
    std::memcpy(reinterpret_cast<std::byte*>(&wc) + offset, &word, sizeof word);
  }
  std::uint64_t kind_;
  std::uint64_t numbers_;
  std::uint64_t source_;
  std::uint64_t rest_;  ///< pkey_index and what follows
};

/// The flag and the bits with which a packet acknowledges packets of the opposite lane.
inline std::uint64_t ack_flag(const Peer& peer) noexcept {
  return peer.in == nullptr || peer.in->head < peer.in->no_ack_until ? line_flag::kNoAck : 0;
}
inline std::uint16_t ack_bits(const Peer& peer) noexcept {
  return peer.in == nullptr ? std::uint16_t{0} : static_cast<std::uint16_t>(peer.in->head);
}

/// Makes polls read acknowledgements until there are some: earlier work requests must be
/// acknowledged before the next one runs.
inline void watch_next_poll(Peer& peer) noexcept {
  peer.waits_for_acks = true;
  peer.context->ack_countdown = 1;
}

/// Makes polls check for the peer's acknowledgements.
inline void watch_answers(Peer& peer) noexcept {
  if (peer.unacked) return;
  peer.unacked = true;
  Context& c = *peer.context;
  if (c.pending.unacked == 0) c.ack_countdown = kAckInterval;
  c.unacked[c.pending.unacked++] = &peer;
}

/// Lists a queue pair whose peer refused a direct message, or ended without having taken the last
/// one. It sends nothing more: its next work request fails. Cold.
void fail_direct_messages(Qp& qp) noexcept;
/// Before a queue pair is reset or destroyed. Cold.
void forget_direct_messages(Qp& qp) noexcept;

/// Publishes the held line, and so all lines behind it.
inline void publish_line(Peer& peer) noexcept {
  std::exchange(peer.out.held, nullptr)->word.store(peer.out.held_word, std::memory_order_release);
}

inline void wake_if_asleep(Peer& peer) noexcept {
  std::atomic_signal_fence(std::memory_order_seq_cst);  // pairs with the membarrier of the receiver
  if (peer.out.control->asleep.load(std::memory_order_relaxed) != 0) [[unlikely]]
    ring_doorbell(peer);
}

/// Opens the part of the lane to a peer that direct senders use. False: they have to use the verbs.
/// Cold.
bool open_direct_limit(Peer& peer) noexcept;
/// Begins a group with the line at `position`; no line may be held. Holds back the line's word, and
/// with it all lines behind it, until the group is complete, publish_held(), or a packet of the
/// verbs.
void begin_group(Peer& peer, Line& line, std::uint64_t position, std::uint64_t word) noexcept;
/// Publishes a complete group: the line at DirectLane::last is written.
inline void publish_group(Peer& peer) noexcept {
  publish_line(peer);
  wake_if_asleep(peer);
  peer.out.group = std::min(2 * peer.out.group, kLargestGroup);
}
// What queue_line() answers where more is to do. It calls them last, so that senders save no
// registers.
/// Wakes the peer, which has a new line.
[[gnu::cold, gnu::noinline]] Sent wake_after_send(Peer& peer) noexcept;
/// Begins a group: begin_group().
[[gnu::noinline]] Sent hold_line(Peer& peer, Line& line, std::uint64_t position,
                                 std::uint64_t word) noexcept;
/// Publishes a complete group.
[[gnu::noinline]] Sent end_group(Peer& peer) noexcept;

/// Publishes the line at `position`, whose bytes and trailer are written, if it is the first of its
/// round. Else queues it until its group is complete, or the next publish_held(). `find_peer`
/// answers the peer of the lane.
template <typename FindPeer>
[[nodiscard, gnu::always_inline]] inline Sent queue_line(OutLane& out, const DirectRound& round,
                                                         Line& line, std::uint64_t position,
                                                         std::uint64_t word,
                                                         FindPeer&& find_peer) noexcept {
  if (out.held != nullptr) {
    line.word.store(word, std::memory_order_release);
    return position == out.last ? end_group(find_peer()) : Sent::queued;
  }
  const std::uint32_t number = round.number;
  if (out.round == number) return hold_line(find_peer(), line, position, word);
  return publish_first(out, line, word, number) ? wake_after_send(find_peer()) : Sent::published;
}

/// Publishes all held lines of a context, and begins a new round.
inline void publish_held(Context& c) noexcept {
  ++c.round.number;
  c.round.has_held_lines = false;
  while (!c.held.empty()) {
    Peer& peer = c.held.pop_front();
    peer.has_held_line = false;
    if (peer.out.held == nullptr) continue;
    publish_line(peer);
    wake_if_asleep(peer);
  }
}

/// Call it after publishing lines: makes polls check for acknowledgements, and wakes a sleeping
/// lane.
inline void after_publishing(Peer& peer) noexcept {
  if (peer.out.held != nullptr) [[unlikely]]
    publish_line(peer);
  watch_answers(peer);
  wake_if_asleep(peer);
}

/// Number of the oldest packet in flight, after complete_what_ran_ahead().
inline std::uint32_t oldest_psn(const Qp& qp) noexcept {
  return qp.sq[qp.sq_tail & qp.sq_mask].psn;
}

/// The scatter/gather elements of a work request in the send queue.
inline const ibv_sge* elements(const Qp& qp, const SendWr& wr) noexcept {
  return wr.sge_count == 1 ? &wr.first
                           : &qp.sq_sges[static_cast<std::size_t>(&wr - qp.sq.get()) * qp.max_sge];
}

/// Consumes the next receive with an error.
inline void fail_receive(Qp& qp, const ReceiveWr& wr, ibv_wc_status status) noexcept {
  const std::uint64_t wr_id = wr.wr_id;
  ++qp.receives->head;
  push_error(*static_cast<Cq*>(qp.recv_cq), qp, wr_id, status, IBV_WC_RECV);
}

/// Completes the oldest work request with success.
inline void complete_oldest(Qp& qp) noexcept {
  const SendWr& wr = qp.sq[qp.sq_tail & qp.sq_mask];
  ++qp.sq_tail;
  qp.retries = qp.rnr_retries = 0;
  if ((wr.flags & IBV_SEND_SIGNALED) == 0) return;
  qp.sq_reclaimed = qp.sq_tail;
  if (ibv_wc* wc = completion_slot(*static_cast<Cq*>(qp.send_cq)); wc != nullptr) [[likely]]
    CompletionHead{completion_opcode(wr.opcode), qp.qp_num, 0}.fill(*wc, wr.wr_id, wr.length);
}

/// Completes the oldest work requests that ran before earlier messages were acknowledged: the
/// oldest one that is left, if any is in flight, is a packet. Cold.
inline void complete_what_ran_ahead(Qp& qp) noexcept {
  while (qp.sq_tail != qp.sq_next && (qp.sq[qp.sq_tail & qp.sq_mask].flags & kHasRun) != 0)
    complete_oldest(qp);
}

}  // namespace spinwire::softverbs
