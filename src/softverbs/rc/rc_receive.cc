// Receives the packets of connections that the short paths of lane/lane_poll.cc do not handle.
#include <errno.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "softverbs/device_control.h"
#include "softverbs/lane/lane_data.h"
#include "softverbs/memory/memory_region.h"
#include "softverbs/memory/memory_window.h"
#include "softverbs/memory/remote_access.h"
#include "softverbs/objects.h"
#include "softverbs/queues.h"
#include "softverbs/ud/ud_datagram.h"

namespace spinwire::softverbs {
namespace {

/// Answers a packet negatively. The answer is stored beside the queue pair's state; the lane's
/// `last_nak` tells the sender to read it. Cold.
void answer_nak(InLane& lane, Qp* qp, Nak reason) noexcept {
  if (qp != nullptr) {
    QueuePairEntry& entry = *qp->entry;
    show_expected(*qp);
    entry.nak.store(reason, std::memory_order_relaxed);
    entry.nak_serial.store(entry.nak_serial.load(std::memory_order_relaxed) + 1,
                           std::memory_order_release);
    qp->nak_given = true;
  }
  lane.control->last_nak.store(lane.position + 1, std::memory_order_release);
  // A sender has seen the acknowledgement of lines more than a lane back. Direct datagrams always
  // carry an acknowledgement, so they are stopped.
  lane.no_ack_until = lane.position + 1 + kLaneLines;
  if (lane.peer != nullptr) lane.peer->out.direct_limit = 0;
}

/// The same for a packet whose queue pair does not receive from the lane now. If the queue pair is
/// the lane's, it answers once, like one that receives: its peer goes back to what it expects.
void answer_not_receiving(InLane& lane, Qp* qp, std::uint32_t qpn) noexcept {
  const bool is_of_lane =
      qp != nullptr && qp->qp_num == qpn && qp->peer == lane.peer && lane.peer != nullptr;
  answer_nak(lane, is_of_lane && !qp->nak_given ? qp : nullptr, Nak::not_ready);
}

/// A message of so many bytes that are copied from the sender's memory ends the turn of its lane.
/// So a turn copies this for each of its packets, 4 MiB, and one message beyond that.
constexpr std::uint32_t kEndsTurn = 64u << 10;

struct Arrival {
  std::uint32_t imm;
  Packet packet;
  std::uint64_t flags;
  std::uint32_t length;    ///< bytes in the lane; once received, of the message
  const std::byte* bytes;  ///< null: the line names bytes outside the lane
};

enum class Fetched : std::uint8_t {
  all,
  nothing,  ///< the sender's queue pair or process is gone: the message counts as never sent
  failed,
  later,  ///< an object must be mapped first: Context::waits_to_map
};

/// The references of a packet. The sender can change them in the lane at any time, so they are read
/// once.
struct References {
  std::array<Reference, kMaxSge> parts;
  std::uint32_t count = 0;
  std::uint32_t length = 0;  ///< bytes that they name
};

/// Returns false if the packet has a part of a reference, or more of them than a work request has
/// elements.
bool read_references(PacketBytes from, std::uint32_t bytes, References& to) noexcept {
  if (bytes % sizeof(Reference) != 0 || bytes > sizeof to.parts) return false;
  from.read(to.parts.data(), bytes);
  to.count = static_cast<std::uint32_t>(bytes / sizeof(Reference));
  std::uint64_t length = 0;
  for (std::uint32_t i = 0; i < to.count; ++i) length += to.parts[i].length;
  to.length = static_cast<std::uint32_t>(std::min<std::uint64_t>(length, UINT32_MAX));
  return true;
}

/// Copies a message out of the sender's memory.
Fetched fetch_references(Qp& qp, const References& from, ScatterCursor& to) noexcept {
  Peer& peer = *qp.peer;
  const QueuePairRights& sender = *qp.remote_rights;
  const std::uint64_t alive = queue_pair_ident(qp.dest_qpn, qp.qp_num);
  begin_access(peer);
  bool there = sender.ident.load(std::memory_order_acquire) == alive;
  bool ok = there;
  for (std::uint32_t i = 0; ok && i < from.count; ++i) {
    Reference part = from.parts[i];
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
  // If the sender's queue pair failed meanwhile, its memory may already be reused.
  if (!there || sender.ident.load(std::memory_order_acquire) != alive) return Fetched::nothing;
  if (ok) [[likely]]
    return Fetched::all;
  return peer.context->waits_to_map ? Fetched::later : Fetched::failed;
}

/// Whether a message that has waited may be copied now. Maps what it needs, as far as the step
/// allows, and copies nothing: a peer could have the same bytes copied by each poll. Cold.
[[gnu::noinline]] bool maps_references(const Context& c, const Qp& qp,
                                       const References& from) noexcept {
  if (c.maps_left == 0) return false;
  Peer& peer = *qp.peer;
  const std::uint64_t pd = qp.remote_rights->pd.load(std::memory_order_relaxed);
  begin_access(peer);
  for (std::uint32_t i = 0; i < from.count && !c.waits_to_map; ++i) {
    const Reference& part = from.parts[i];
    if (part.length != 0) (void)resolve(peer, pd, part.address, part.length, part.key, 0, 0);
  }
  end_access(peer);
  return !c.waits_to_map;
}

/// Refuses a request and ends the connection: the sender gets `reason`, the local queue pair goes
/// to ERR. Returns false.
bool refuse(InLane& lane, Qp& qp, Nak reason) noexcept {
  answer_nak(lane, &qp, reason);
  apply_peer_acks(*qp.peer);  // completes work that the peer received
  enter_error(qp);
  if (reason == Nak::access) raise_event(context_of(qp.context), IBV_EVENT_QP_ACCESS_ERR, &qp);
  return false;
}

/// refuse() of a request that has consumed a receive, which completes with an error.
bool refuse(InLane& lane, Qp& qp, Nak reason, const ReceiveWr& wr, ibv_wc_status status) noexcept {
  fail_receive(qp, wr, status);
  return refuse(lane, qp, reason);
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

/// Fetches a message; false on failure. A message whose sender is gone counts as lost, and one
/// may have to wait; any other failure ends the connection.
bool fetched(InLane& lane, Qp& qp, const References& from, ScatterCursor& to) noexcept {
  Context& c = *qp.peer->context;
  if (lane.waits_to_map) [[unlikely]] {
    if (!maps_references(c, qp, from)) return c.waits_to_map = true, false;
    lane.waits_to_map = false;
  }
  const Fetched result = fetch_references(qp, from, to);
  if (result == Fetched::all) [[likely]]
    return true;
  if (result == Fetched::later) return false;
  c.waits_to_map = false;
  if (result == Fetched::failed) return refuse(lane, qp, Nak::operational);
  answer_nak(lane, &qp, Nak::not_ready);
  return false;
}

/// Receives a SEND into the next posted receive. False if the packet was refused.
bool receive_send(InLane& lane, Qp& qp, Arrival& a) noexcept {
  const std::uint32_t slot = qp.receives->head & qp.receives->mask;
  const ReceiveWr& wr = qp.receives->ring[slot];
  const ibv_sge* sges = qp.receives->elements(wr);
  const PacketBytes from{a.bytes};
  const bool reference = (a.flags & line_flag::kReference) != 0;
  References parts;
  if (reference && !read_references(from, a.length, parts)) [[unlikely]]
    return refuse(lane, qp, Nak::invalid_request);
  const std::uint32_t length = reference ? parts.length : a.length;
  if (length > wr.capacity) [[unlikely]]
    return refuse(lane, qp, Nak::invalid_request, wr, IBV_WC_LOC_LEN_ERR);
  // Receives belong to the SRQ's domain; create_qp requires that it is the queue pair's.
  if (!all_allowed(context_of(qp.context), *static_cast<Pd*>(qp.pd), sges, wr.sge_count,
                   IBV_ACCESS_LOCAL_WRITE)) [[unlikely]]
    return refuse(lane, qp, Nak::operational, wr, IBV_WC_LOC_PROT_ERR);
  ScatterCursor to(sges, wr.sge_count);
  if (reference) {
    a.length = length;
    if (!fetched(lane, qp, parts, to)) return false;
  } else {
    scatter_bytes(to, from.at, length);
  }
  if (a.packet == Packet::send_inv && !invalidate_for_peer(qp, a.imm)) [[unlikely]]
    return refuse(lane, qp, Nak::invalid_request, wr, IBV_WC_REM_INV_REQ_ERR);
  complete_receive(qp, wr.wr_id, a.packet, a.imm, length, IBV_WC_RECV);
  return true;
}

/// Executes a WRITE with immediate: writes the data to its target and completes a posted receive,
/// in order with earlier messages. False if the packet was refused.
bool receive_write(InLane& lane, Qp& qp, Arrival& a) noexcept {
  const Context& c = context_of(qp.context);
  PacketBytes from{a.bytes};
  if (a.length < sizeof(ibv_sge)) [[unlikely]]
    return refuse(lane, qp, Nak::invalid_request);
  ibv_sge target{};
  from.read(&target, sizeof target);
  target.addr = read_once(target.addr);
  target.length = read_once(target.length);
  target.lkey = read_once(target.lkey);
  const std::uint32_t body = a.length - static_cast<std::uint32_t>(sizeof target);
  const bool reference = (a.flags & line_flag::kReference) != 0;
  References parts;
  if (reference && !read_references(from, body, parts)) [[unlikely]]
    return refuse(lane, qp, Nak::invalid_request);
  const std::uint32_t length = reference ? parts.length : body;
  const auto allows = [&](std::uint64_t scope) {
    return local_allows(c, scope, target, IBV_ACCESS_REMOTE_WRITE);
  };
  const bool allowed =
      (qp.attr.qp_access_flags & IBV_ACCESS_REMOTE_WRITE) != 0 &&
      (length == 0 || allows(static_cast<Pd*>(qp.pd)->id) || allows(window_scope(qp.qp_num)));
  if (length != target.length || !allowed) [[unlikely]]
    return refuse(lane, qp, Nak::access);
  if (reference) {
    ScatterCursor to(&target, 1);
    a.length = length;
    if (!fetched(lane, qp, parts, to)) return false;
  } else if (length != 0) {  // else the address may be null
    from.read(pointer(target.addr), length);
  }
  const ReceiveWr& wr = qp.receives->ring[qp.receives->head & qp.receives->mask];
  complete_receive(qp, wr.wr_id, a.packet, a.imm, length, IBV_WC_RECV_RDMA_WITH_IMM);
  return true;
}

/// Receives an expected packet. False if the packet was refused, or has to wait.
bool receive(InLane& lane, Qp& qp, Arrival& a) noexcept {
  if (a.bytes == nullptr) [[unlikely]]
    return refuse(lane, qp, Nak::invalid_request);
  return a.packet == Packet::write_imm ? receive_write(lane, qp, a) : receive_send(lane, qp, a);
}

}  // namespace

/// Receives any packet that the short paths leave. False: it waits, or the lane's turn ends.
[[gnu::noinline]] bool receive_packet(Context& c, InLane& lane, std::uint64_t word) noexcept {
  Line* line = lane.next;
  const std::uint32_t qpn = word_qpn(word);
  const auto length = static_cast<std::uint32_t>(line->read_length());
  if (word_packet(word) >= Packet::datagram) {
    receive_datagram(c, lane, word, length);
    advance(lane, 1);
    return true;
  }
  bool ends_turn = false;
  Qp* qp = find_queue_pair(c, queue_pair_index(qpn));
  if (qp == nullptr || qp->qp_num != qpn || qp->expected == kNeverExpected || qp->peer != lane.peer)
      [[unlikely]] {
    answer_not_receiving(lane, qp, qpn);
  } else if ((word & kExpectedMask) != qp->expected) [[unlikely]] {
    // The packet follows a refused one, which the sender retransmits first.
    if (!qp->nak_given) answer_nak(lane, qp, Nak::not_ready);
  } else if (qp->receives->count() == 0 && !claim_reserve(*qp)) [[unlikely]] {
    answer_nak(lane, qp, Nak::rnr);
  } else {
    qp->nak_given = false;
    Arrival a{line->read_imm(), word_packet(word), word_flags(word), length,
              packet_bytes(lane, *line, length)};
    if (receive(lane, *qp, a)) {
      qp->expected = next_word(word);
      if ((a.flags & line_flag::kSolicited) != 0) ++static_cast<Cq*>(qp->recv_cq)->solicited;
    } else {
      lane.waits_to_map = std::exchange(c.waits_to_map, false);
      if (lane.waits_to_map) [[unlikely]]
        return false;
    }
    // Also if the copy has failed: a peer could have that happen again and again.
    ends_turn = (a.flags & line_flag::kReference) != 0 && a.length >= kEndsTurn;
  }
  lane.waits_to_map = false;
  advance(lane, 1);
  return !ends_turn;
}

std::uint32_t discard_lane(const Context& c, InLane& lane) noexcept {
  std::uint32_t datagrams = 0;
  if (lane.batch_reported) return 0;
  for (std::uint32_t left = kLaneLines; left != 0; --left) {
    const std::uint64_t word = lane.next->word.load(std::memory_order_acquire);
    if (word_mark(word) != lane.mark) break;
    if (word_packet(word) >= Packet::datagram) {
      ++datagrams;
    } else {
      const std::uint32_t qpn = word_qpn(word);
      answer_not_receiving(lane, find_queue_pair(c, queue_pair_index(qpn)), qpn);
    }
    advance(lane, 1);
  }
  publish_head(lane);
  return datagrams;
}

}  // namespace spinwire::softverbs
