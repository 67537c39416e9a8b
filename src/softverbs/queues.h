// Steps of the send and receive queues that several files share. Hot unless marked.
#pragma once

#include <infiniband/verbs.h>

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

/// Runs a work request on the peer's memory; false if it did not succeed (yet).
bool run_one_sided(Qp& qp, const SendWr& wr, const ibv_sge* sges) noexcept;
/// Runs and transmits what is queued, as far as order, room and retry timers allow.
void pump(Qp& qp) noexcept;
/// Looks at what the peer consumed of our lane, and at its negative answers, and applies both.
void acknowledge(Peer& peer) noexcept;

/// Number of polls after which acknowledgements that no packet carried are read from the lane.
/// Reading takes the cacheline from the peer, which writes it at every step. In an exchange of
/// messages that costs both ends more than a later send completion.
inline constexpr std::int32_t kAckInterval = 48;

/// Whether a work request of a connection needs nothing of the peer.
constexpr bool is_local(std::uint8_t opcode) noexcept {
  return opcode == IBV_WR_BIND_MW || opcode == IBV_WR_LOCAL_INV;
}
/// Whether it consumes one of the peer's receives.
constexpr bool is_packet(std::uint8_t opcode) noexcept {
  constexpr std::uint32_t kPackets = 1u << IBV_WR_SEND | 1u << IBV_WR_SEND_WITH_IMM |
                                     1u << IBV_WR_SEND_WITH_INV | 1u << IBV_WR_RDMA_WRITE_WITH_IMM;
  return (kPackets >> opcode & 1) != 0;
}

/// PSN and queue pair of the packet after the one with this word; the PSN wraps at 24 bits.
inline std::uint64_t next_word(std::uint64_t word) noexcept {
  return (word + (std::uint64_t{1} << 24)) & kExpectedMask;
}
inline void expect(Qp& qp, std::uint64_t expected) noexcept {
  qp.expected = expected;
  qp.entry->expected_psn.store(static_cast<std::uint32_t>(expected >> 24),
                               std::memory_order_release);
}

/// A slot in the queue's ring. Null if the queue is overrun, which raises an event.
ibv_wc* ring_slot(Cq& cq) noexcept;

// Cold.
/// Hides as many receives from the hot paths as the limit of a shared queue says.
void hide_reserve(ReceiveQueue& queue) noexcept;
/// Shows the hot paths all receives.
void expose_reserve(ReceiveQueue& queue) noexcept;
/// For a packet that finds no receive: if the limit hides some, raises the event and shows them.
/// False if it hides none.
bool claim_reserve(Qp& qp) noexcept;
/// Appends a queue pair to those that wait for room in their peer's lane.
void stall(Qp& qp) noexcept;
/// Removes it from that list.
void unstall(Qp& qp) noexcept;
/// Sends for the waiting queue pairs, in turn, until the lane is full again.
void resume_stalled(Peer& peer) noexcept;
/// Ends the oldest work request with an error: the queue pair goes to ERR and the rest is flushed.
void fail_oldest(Qp& qp, ibv_wc_status status) noexcept;
/// Stops answering one-sided requests. Peers can still read its earlier answers.
void stop_serving(Qp& qp) noexcept;
/// ERR: stop answering, flush both queues.
void enter_error(Qp& qp) noexcept;
/// Goes back to the oldest work request and retries it after the time that `reason` demands.
void retry(Qp& qp, Nak reason, std::uint32_t rnr_timer) noexcept;
/// The peer is gone: fails the oldest work request. With Driving::by_poll it fails when the retries
/// are over, as on a network, so that two programs that end at the same time do not disturb each
/// other.
void handle_unreachable(Qp& qp) noexcept;
/// Runs the queue pair's next work request again after `delay`.
void wait_until(Qp& qp, Nanoseconds delay) noexcept;
/// Applies the negative answers of a peer's queue pairs.
void apply_naks(Peer& peer, std::uint64_t head) noexcept;
/// Runs expired timers, and control() with Driving::by_poll.
void run_timers(Context& c) noexcept;
/// Consumes all packets in a lane as if they had been lost. Returns the number of datagrams among
/// them.
std::uint32_t discard_lane(InLane& lane) noexcept;
void ring_doorbell(Peer& peer) noexcept;
/// Receives the next packet in a lane, of any kind.
void receive_packet(Context& c, InLane& lane, std::uint64_t word) noexcept;
/// A completion with an error; every field but status, wr_id and qp_num is undefined to the user.
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

/// A slot for a completion; null if the queue is overrun.
inline ibv_wc* completion_slot(Cq& cq) noexcept {
  if (cq.room == 0) return ring_slot(cq);
  --cq.room;
  return cq.out++;
}

/// The fields that the successful completions of a run share. Filling one in takes six stores.
class CompletionHead {
 public:
  CompletionHead(ibv_wc_opcode opcode, std::uint32_t qp_num, std::uint32_t src_qp,
                 std::uint32_t imm = 0, unsigned flags = 0) noexcept
      : kind_(IBV_WC_SUCCESS | std::uint64_t{opcode} << 32),
        numbers_(imm | std::uint64_t{qp_num} << 32),
        source_(src_qp | std::uint64_t{flags} << 32) {}
  void fill(ibv_wc& wc, std::uint64_t wr_id, std::uint32_t byte_len) const noexcept {
    static_assert(sizeof wc == 48 && offsetof(ibv_wc, opcode) == 12 &&
                  offsetof(ibv_wc, byte_len) == 20 && offsetof(ibv_wc, imm_data) == 24 &&
                  offsetof(ibv_wc, qp_num) == 28 && offsetof(ibv_wc, src_qp) == 32 &&
                  offsetof(ibv_wc, wc_flags) == 36);
    put(wc, 0, wr_id);
    put(wc, 8, kind_);
    // The analyzer takes the shift for one of 32 bits.
    put(wc, 16, std::uint64_t{byte_len} << 32);  // NOLINT(clang-analyzer-core.*)
    put(wc, 24, numbers_);
    put(wc, 32, source_);
    put(wc, 40, 0);
  }

 private:
  static void put(ibv_wc& wc, std::size_t offset, std::uint64_t word) noexcept {
    std::memcpy(reinterpret_cast<std::byte*>(&wc) + offset, &word, sizeof word);
  }
  std::uint64_t kind_;
  std::uint64_t numbers_;
  std::uint64_t source_;
};

/// The flag and the bits by which a packet acknowledges packets of the opposite direction.
inline std::uint64_t ack_flag(const Peer& peer) noexcept {
  return peer.in == nullptr || peer.in->head < peer.in->no_ack_until ? line_flag::kNoAck : 0;
}
inline std::uint16_t ack_bits(const Peer& peer) noexcept {
  return peer.in == nullptr ? std::uint16_t{0} : static_cast<std::uint16_t>(peer.in->head);
}

/// Makes polls look for the peer's acknowledgements.
inline void watch_answers(Peer& peer) noexcept {
  if (peer.unacked) return;
  peer.unacked = true;
  Context& c = *peer.context;
  if (c.pending.unacked == 0) c.ack_countdown = kAckInterval;
  c.unacked[c.pending.unacked++] = &peer;
}

/// Consumes `lines` lines.
inline void advance(InLane& lane, std::uint32_t lines) noexcept {
  lane.head += lines;
  lane.next += lines;
  if (lane.next >= lane.end) [[unlikely]] {
    lane.next -= kLaneLines;
    lane.mark = (lane.mark + 1) & 0xff;
  }
}

/// Publishes how many lines were consumed.
inline void publish_head(InLane& lane) noexcept {
  lane.control->head.store(lane.head, std::memory_order_release);
  if (lane.peer != nullptr) lane.peer->out.ack_on_top = lane.head << 48;
}

/// Publishes the held line, and with it all lines behind it.
inline void publish_line(Peer& peer) noexcept {
  std::exchange(peer.out.held, nullptr)->word.store(peer.out.held_word, std::memory_order_release);
}

inline void wake_if_asleep(Peer& peer) noexcept {
  std::atomic_signal_fence(std::memory_order_seq_cst);  // the sleeper's membarrier does the rest
  if (peer.out.control->asleep.load(std::memory_order_relaxed) != 0) [[unlikely]]
    ring_doorbell(peer);
}

/// To be called after lines were published: watches for the answers, and wakes a sleeping lane.
inline void after_publishing(Peer& peer) noexcept {
  if (peer.out.held != nullptr) [[unlikely]]
    publish_line(peer);
  watch_answers(peer);
  wake_if_asleep(peer);
}

/// Number of the oldest packet in flight. Between sq_tail and sq_next there are only packets.
inline std::uint32_t oldest_psn(const Qp& qp) noexcept {
  return psn_add(qp.next_psn, qp.sq_tail - qp.sq_next);
}

/// The elements of a work request in the send queue.
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

}  // namespace spinwire::softverbs
