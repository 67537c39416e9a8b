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

/// Polls after which acknowledgements that did not come along with a packet are looked for in the
/// lane. Looking takes the cacheline from the peer, which writes it at every step: in an exchange
/// of messages that costs both ends more than a send completion that comes this much later.
inline constexpr std::int32_t kAckPatience = 48;

/// Whether a work request of a connection needs nothing of the peer.
constexpr bool is_local(std::uint8_t opcode) noexcept {
  return opcode == IBV_WR_BIND_MW || opcode == IBV_WR_LOCAL_INV;
}
/// Whether it takes one of the peer's receives.
constexpr bool is_packet(std::uint8_t opcode) noexcept {
  constexpr std::uint32_t kPackets = 1u << IBV_WR_SEND | 1u << IBV_WR_SEND_WITH_IMM |
                                     1u << IBV_WR_SEND_WITH_INV | 1u << IBV_WR_RDMA_WRITE_WITH_IMM;
  return (kPackets >> opcode & 1) != 0;
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

/// Null if the queue is overrun, which is reported.
ibv_wc* ring_slot(Cq& cq) noexcept;

// Cold.
/// Puts as many receives out of sight as the limit of a shared queue asks for.
void withhold(ReceiveQueue& queue) noexcept;
/// Puts them all in sight.
void reveal(ReceiveQueue& queue) noexcept;
/// For a packet that finds no receive: if the limit keeps some, it is reached, which is told, and
/// they are in sight now. False if there are none.
bool take_from_limit(Qp& qp) noexcept;
/// Puts a queue pair at the end of those that wait for room in their peer's lane.
void stall(Qp& qp) noexcept;
/// Takes it out of there.
void unstall(Qp& qp) noexcept;
/// Lets those that wait for room go on, in turn, until the lane is full again.
void resume_stalled(Peer& peer) noexcept;
/// Ends the oldest work request with an error: the queue pair goes to ERR and the rest is flushed.
void fail_oldest(Qp& qp, ibv_wc_status status) noexcept;
/// Peers can still read what it answered, but get nothing from it any more.
void no_longer_served(Qp& qp) noexcept;
/// ERR: stop answering, flush both queues.
void enter_error(Qp& qp) noexcept;
/// Goes back to the oldest work request, to try again when the negative answer allows.
void retry(Qp& qp, Nak reason, std::uint32_t rnr_timer) noexcept;
/// The peer is gone. Programs that know nothing of this device, whose polls drive it, are told when
/// the retries are over, as on a network: two that end at the same time must not disturb each
/// other. Others want to know at once.
void no_answer(Qp& qp) noexcept;
/// Has the queue pair's next work request run again when `delay` is over.
void wait_until(Qp& qp, Nanoseconds delay) noexcept;
/// Takes the negative answers of a peer's queue pairs.
void take_naks(Peer& peer, std::uint64_t head) noexcept;
/// Timers, and control() for a context that its polls drive.
void attend(Context& c) noexcept;
/// Consumes what lies in a lane without taking it, as if it had been lost on the way. Answers how
/// many datagrams were among it.
std::uint32_t refuse_lane(InLane& lane) noexcept;
void ring_doorbell(Peer& peer) noexcept;
/// Receives the packet that is next in a lane, whatever it is.
void take_packet(Context& c, InLane& lane, std::uint64_t word) noexcept;
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

/// What the successful completions of a run share; the rest of each is two fields. Six stores.
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

/// The flag and the bits by which a packet acknowledges what came the other way.
inline std::uint64_t ack_flag(const Peer& peer) noexcept {
  return peer.in == nullptr || peer.in->head < peer.in->silent_until ? line_flag::kNoAck : 0;
}
inline std::uint16_t ack_bits(const Peer& peer) noexcept {
  return peer.in == nullptr ? std::uint16_t{0} : static_cast<std::uint16_t>(peer.in->head);
}

/// Has polls look for the peer's answers.
inline void watch_answers(Peer& peer) noexcept {
  if (peer.unacked) return;
  peer.unacked = true;
  Context& c = *peer.context;
  if (c.pending.unacked == 0) c.ack_patience = kAckPatience;
  c.unacked[c.pending.unacked++] = &peer;
}

/// Consumes so many lines.
inline void advance(InLane& lane, std::uint32_t lines) noexcept {
  lane.head += lines;
  lane.next += lines;
  if (lane.next >= lane.end) [[unlikely]] {
    lane.next -= kLaneLines;
    lane.mark = (lane.mark + 1) & 0xff;
  }
}

/// Tells the sender how many there were.
inline void tell_head(InLane& lane) noexcept {
  lane.control->head.store(lane.head, std::memory_order_release);
  if (lane.peer != nullptr) lane.peer->out.ack_on_top = lane.head << 48;
}

/// A line that stayed back, and with it all that lies behind it.
inline void publish_line(Peer& peer) noexcept {
  std::exchange(peer.out.held, nullptr)->word.store(peer.out.held_word, std::memory_order_release);
}

inline void wake_if_asleep(Peer& peer) noexcept {
  std::atomic_signal_fence(std::memory_order_seq_cst);  // the sleeper's membarrier does the rest
  if (peer.out.control->asleep.load(std::memory_order_relaxed) != 0) [[unlikely]]
    ring_doorbell(peer);
}

/// After lines were published: has the peer's answers watched, and wakes the lane if it sleeps.
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

/// The receive that is next fails, and is used up.
inline void fail_receive(Qp& qp, const ReceiveWr& wr, ibv_wc_status status) noexcept {
  const std::uint64_t wr_id = wr.wr_id;
  ++qp.receives->head;
  push_error(*static_cast<Cq*>(qp.recv_cq), qp, wr_id, status, IBV_WC_RECV);
}

/// The oldest work request succeeded.
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
