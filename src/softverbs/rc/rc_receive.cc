// Receiving messages of connections that the short paths of lane/lane_poll.cc do not handle.
#include <errno.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "softverbs/device_control.h"
#include "softverbs/lane/lane_cursor.h"
#include "softverbs/memory/memory_region.h"
#include "softverbs/memory/memory_window.h"
#include "softverbs/memory/remote_access.h"
#include "softverbs/objects.h"
#include "softverbs/queues.h"
#include "softverbs/ud/ud_datagram.h"

namespace spinwire::softverbs {
namespace {

/// Answers a packet negatively. The answer lies beside the queue pair's state; the lane's
/// `last_nak` tells the sender to read it. Cold.
void answer_nak(InLane& lane, Qp* qp, Nak reason) noexcept {
  if (qp != nullptr) {
    QueuePairEntry& entry = *qp->entry;
    entry.nak.store(reason, std::memory_order_relaxed);
    entry.nak_serial.store(entry.nak_serial.load(std::memory_order_relaxed) + 1,
                           std::memory_order_release);
    qp->nak_given = true;
  }
  lane.control->last_nak.store(lane.head + 1, std::memory_order_release);
  // The sender knows of everything more than a lane back. Direct datagrams always carry an
  // acknowledgement, so they are stopped.
  lane.no_ack_until = lane.head + 1 + kLaneLines;
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
  nothing,  ///< the sender's queue pair or process is gone: as if the message was never sent
  failed,
};

/// Copies a message out of the sender's memory.
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
      const ScatterCursor::Piece piece = to.next(part.length);
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
  // If the sender's queue pair failed meanwhile, its memory may be in other use already.
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
    if (sges[i].length != 0 && !local_allows(c, pd, sges[i], IBV_ACCESS_LOCAL_WRITE)) return false;
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

/// Fetches a message; false if that failed. A message whose sender is gone counts as lost; any
/// other failure ends the connection.
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

/// Receives a SEND into the next posted receive. False if it was refused.
bool receive_send(InLane& lane, Qp& qp, const Arrival& a) noexcept {
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
      const ScatterCursor::Piece piece = to.next(left);
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

/// Executes a WRITE with immediate: writes the data to its target and completes a posted receive,
/// in order with the messages before it. False if it was refused.
bool receive_write(InLane& lane, Qp& qp, const Arrival& a) noexcept {
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
    return local_allows(c, scope, target, IBV_ACCESS_REMOTE_WRITE);
  };
  const bool allowed =
      (qp.attr.qp_access_flags & IBV_ACCESS_REMOTE_WRITE) != 0 &&
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

}  // namespace

/// Receives any packet that the short paths did not.
[[gnu::noinline]] void receive_packet(Context& c, InLane& lane, std::uint64_t word) noexcept {
  Line* line = lane.next;
  const std::uint32_t qpn = word_qpn(word);
  const std::uint32_t bytes = line->length;
  // Whatever the sender says, the next packet lies within the lane.
  const std::uint32_t lines = std::min(lines_for(bytes), kLaneLines);
  if (word_packet(word) >= Packet::datagram) {
    receive_datagram(c, lane, word, bytes);
    return advance(lane, lines);
  }
  Qp* qp = c.queue_pairs[queue_pair_index(qpn)];
  if (qp == nullptr || qp->qp_num != qpn || qp->expected == kNeverExpected || qp->peer != lane.peer)
      [[unlikely]] {
    answer_nak(lane, nullptr, Nak::not_ready);
  } else if ((word & kExpectedMask) != qp->expected) [[unlikely]] {
    // It follows a refused packet: the sender retransmits that one first.
    if (!qp->nak_given) answer_nak(lane, qp, Nak::not_ready);
  } else if (qp->receives->count() == 0 && !claim_reserve(*qp)) [[unlikely]] {
    answer_nak(lane, qp, Nak::rnr);
  } else {
    qp->nak_given = false;
    const Arrival a{line, lane.head, word_packet(word), word_flags(word), bytes, lines};
    const bool taken =
        a.packet == Packet::write_imm ? receive_write(lane, *qp, a) : receive_send(lane, *qp, a);
    if (taken) {
      expect(*qp, next_word(word));
      if ((a.flags & line_flag::kSolicited) != 0) ++static_cast<Cq*>(qp->recv_cq)->solicited;
    }
  }
  advance(lane, lines);
}

std::uint32_t discard_lane(InLane& lane) noexcept {
  std::uint32_t datagrams = 0;
  if (lane.run_reported) return 0;
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
  publish_head(lane);
  return datagrams;
}

}  // namespace spinwire::softverbs
