// The send queue of connections: posts work requests and transmits them into lanes. Hot.
#include <errno.h>

#include <algorithm>
#include <cstring>

#include "softverbs/lane/lane_data.h"
#include "softverbs/memory/memory_region.h"
#include "softverbs/memory/memory_window.h"
#include "softverbs/objects.h"
#include "softverbs/queues.h"
#include "softverbs/rc/rc_direct.h"
#include "softverbs/softverbs_device.h"
#include "softverbs/ud/ud_datagram.h"

namespace spinwire::softverbs {
namespace {

// Limit of messages copied through the lane; the receiver fetches longer ones. Below it, two copies
// cost less than the cache misses and key checks of a reference.
constexpr std::uint32_t kMaxCopiedMessage = 1024 + 64;  // 1 KiB and a header
/// A WRITE with immediate carries {address, length, rkey} of its target before the data.
constexpr std::uint32_t kTargetBytes = sizeof(ibv_sge);

/// Whether work requests of this kind may be inline: those that only send bytes.
constexpr bool inline_allowed(ibv_wr_opcode opcode) noexcept {
  return opcode < IBV_WR_RDMA_READ || opcode == IBV_WR_SEND_WITH_INV;
}

/// Stores the operands of less common work requests. Returns 0 or an errno value.
[[gnu::noinline]] int keep_operands(const Qp& qp, SendWr& kept, const ibv_send_wr& wr) noexcept {
  switch (wr.opcode) {
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
      kept.rkey = wr.wr.atomic.rkey;
      kept.compare_add = wr.wr.atomic.compare_add;
      kept.swap = wr.wr.atomic.swap;
      return 0;
    case IBV_WR_BIND_MW:
    case IBV_WR_LOCAL_INV:
      kept.length = 0;
      kept.sge_count = 0;
      return wr.opcode == IBV_WR_BIND_MW ? keep_bind(qp, kept, wr) : 0;
    case IBV_WR_SEND_WITH_INV:
      return 0;
    default:
      return EINVAL;
  }
}

/// Checks a work request and appends it to the queue. Returns 0 or an errno value.
int append(Qp& qp, const ibv_send_wr& wr) noexcept {
  if (qp.sq_head - qp.sq_reclaimed >= qp.sq_depth) [[unlikely]]
    return ENOMEM;
  if (wr.num_sge < 0 || static_cast<std::uint32_t>(wr.num_sge) > qp.max_sge) [[unlikely]]
    return EINVAL;
  std::uint64_t length = 0;
  for (int i = 0; i < wr.num_sge; ++i) length += wr.sg_list[i].length;
  if (length > kMaxMessage) [[unlikely]]
    return EINVAL;

  SendWr& kept = qp.sq[qp.sq_head & qp.sq_mask];
  kept.wr_id = wr.wr_id;
  kept.opcode = static_cast<std::uint8_t>(wr.opcode);
  kept.flags = static_cast<std::uint8_t>((wr.send_flags | qp.signal_all) & ~unsigned{kHasRun});
  kept.imm = wr.imm_data;
  kept.length = static_cast<std::uint32_t>(length);
  kept.remote_address = wr.wr.rdma.remote_addr;
  kept.rkey = wr.wr.rdma.rkey;
  if ((wr.send_flags & IBV_SEND_INLINE) != 0) {
    if (length > qp.max_inline || !inline_allowed(wr.opcode)) [[unlikely]]
      return EINVAL;
    keep_inline(qp, kept, wr);
  } else {
    keep_elements(qp, kept, wr);
  }
  if (wr.opcode > IBV_WR_RDMA_READ) [[unlikely]] {
    if (const int error = keep_operands(qp, kept, wr); error != 0) return error;
  }
  ++qp.sq_head;
  return 0;
}

/// Records that the queue pair's packets up to `sq_end` lie in the lane up to `end`. A run of
/// unsignaled packets shares a record, which the first signaled one closes.
inline void note_in_flight(Qp& qp, Peer& peer, std::uint64_t end, std::uint32_t sq_end,
                           bool signaled) noexcept {
  OutLane& out = peer.out;
  if (peer.in_flight_owner != &qp) ++out.in_flight_tail;
  out.in_flight[(out.in_flight_tail - 1) & (kInFlight - 1)] = {end, qp.qp_num, sq_end, qp.epoch};
  peer.in_flight_owner = signaled ? nullptr : &qp;
}

/// Writes the rest of a packet's line. The word comes last and publishes the packet.
void publish(Qp& qp, SendWr& wr, Line& first, std::uint64_t kind,
             std::uint32_t lane_bytes) noexcept {
  Peer& peer = *qp.peer;
  OutLane& out = peer.out;
  const std::uint64_t position = out.tail;
  first.imm = wr.opcode == IBV_WR_SEND ? 0 : wr.imm;
  first.length = static_cast<std::uint16_t>(lane_bytes);
  first.ack = ack_bits(peer);
  out.tail = position + 1;
  wr.lane_end = out.tail;
  wr.psn = qp.next_psn;
  note_in_flight(qp, peer, out.tail, qp.sq_next + 1, (wr.flags & IBV_SEND_SIGNALED) != 0);
  first.word.store(lane_mark(position) << 56 | (kind | ack_flag(peer)) << 48 |
                       std::uint64_t{qp.next_psn} << 24 | qp.dest_qpn,
                   std::memory_order_release);
  qp.next_psn = psn_add(qp.next_psn, 1);
  after_publishing(peer);
}

bool has_room_or_stall(Qp& qp, std::uint32_t bytes) noexcept {
  OutLane& out = qp.peer->out;
  if (out.tail < out.limit && has_data_room(out, bytes, Acks::all)) [[likely]]
    return true;
  out.limit = out.tail;
  out.direct_limit = 0;
  watch_answers(*qp.peer);              // not yet listed if only datagrams fill the lane
  qp.peer->context->ack_countdown = 1;  // the next poll reads
  stall(qp);
  return false;
}

/// Writes a packet into the lane. False if the work request has to wait for room.
bool transmit(Qp& qp, SendWr& wr, const ibv_sge* sges) noexcept {
  const bool targeted = wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
  const Packet packet = targeted                            ? Packet::write_imm
                        : wr.opcode == IBV_WR_SEND_WITH_IMM ? Packet::send_imm
                        : wr.opcode == IBV_WR_SEND_WITH_INV ? Packet::send_inv
                                                            : Packet::send;
  const bool reference = wr.length > kMaxCopiedMessage && (wr.flags & IBV_SEND_INLINE) == 0;
  const std::uint32_t body =
      reference ? wr.sge_count * static_cast<std::uint32_t>(sizeof(Reference)) : wr.length;
  const std::uint32_t bytes = body + (targeted ? kTargetBytes : 0);
  if (!has_room_or_stall(qp, bytes)) return false;

  OutLane& out = qp.peer->out;
  Line& line = out.lines[out.tail & (kLaneLines - 1)];
  std::byte* to = place_packet(out, line, out.tail, bytes);
  const auto write = [&to](const void* from, std::size_t n) {
    if (n != 0) std::memcpy(to, from, n);
    to += n;
  };
  if (targeted) {
    const ibv_sge target{wr.remote_address, wr.length, wr.rkey};
    write(&target, sizeof target);
  }
  for (std::uint32_t i = 0; i < wr.sge_count; ++i) {
    if (reference) {
      const Reference part{sges[i].addr, sges[i].length, sges[i].lkey};
      write(&part, sizeof part);
    } else {
      write(pointer(sges[i].addr), sges[i].length);
    }
  }
  const std::uint64_t flags = (reference ? line_flag::kReference : 0) |
                              ((wr.flags & IBV_SEND_SOLICITED) != 0 ? line_flag::kSolicited : 0);
  publish(qp, wr, line, packet_kind(packet, flags), bytes);
  return true;
}

/// Whether a work request is a SEND of one element that needs no flags in its line.
template <Sizes sizes>
bool is_simple(const ibv_send_wr& wr) noexcept {
  constexpr unsigned kFlags = IBV_SEND_SIGNALED | IBV_SEND_INLINE | IBV_SEND_FENCE;
  return wr.num_sge == 1 && wr.opcode == IBV_WR_SEND && (wr.send_flags & ~kFlags) == 0 &&
         (sizes == Sizes::any || wr.sg_list->length <= kLinePayload);
}

/// Whether a work request is a simple message that does not fit into its line.
inline bool is_simple_and_long(const ibv_send_wr& wr) noexcept {
  return is_simple<Sizes::any>(wr) && wr.sg_list->length > kLinePayload;
}

/// Copies a message that does not fit into its line to the lane's data, and an inline one also
/// beside the queue. False if the general path has to send it.
inline bool copy_to_data(Qp& qp, OutLane& out, Line& line, std::uint64_t position, SendWr& kept,
                         const ibv_send_wr& wr) noexcept {
  const ibv_sge& sge = *wr.sg_list;
  if (sge.length > kMaxCopiedMessage || !has_data_room(out, sge.length, Acks::all)) return false;
  std::memcpy(place_packet(out, line, position, sge.length), pointer(sge.addr), sge.length);
  if ((wr.send_flags & IBV_SEND_INLINE) == 0) return true;
  kept.length = sge.length;
  keep_inline(qp, kept, wr);
  return true;
}

/// Sends simple messages through the lane up to the end of the lane's array; no earlier work
/// request may be queued. The queue's state stays in registers. Returns the first work request that
/// it did not send.
template <Sizes sizes>
[[gnu::always_inline]] inline ibv_send_wr* send_until_lane_wraps(Qp& qp, Peer& peer,
                                                                 ibv_send_wr* wr) noexcept {
  OutLane& out = peer.out;
  const Context& c = *peer.context;
  const Pd& pd = *static_cast<Pd*>(qp.pd);
  SendWr* const sq = qp.sq.get();
  const std::uint32_t sq_mask = qp.sq_mask;
  std::uint32_t sq_head = qp.sq_head;
  std::uint32_t recorded = sq_head;
  const std::uint64_t begin = out.tail;
  const std::uint64_t room = qp.sq_depth - (sq_head - qp.sq_reclaimed);
  const std::uint64_t end =
      std::min(std::min(out.limit, (begin | (kLaneLines - 1)) + 1), begin + room);
  const std::uint64_t head = lane_mark(begin) << 56 | packet_kind(Packet::send, ack_flag(peer))
                                                          << 48;
  const std::uint64_t ack = std::uint64_t{ack_bits(peer)} << 48;
  std::uint64_t position = begin;
  std::uint64_t name = std::uint64_t{qp.next_psn} << 24 | qp.dest_qpn;
  Line* line = &out.lines[begin & (kLaneLines - 1)];
  for (; wr != nullptr && position < end && is_simple<sizes>(*wr); wr = wr->next) {
    const ibv_sge& sge = *wr->sg_list;
    const std::uint32_t length = sge.length;
    const unsigned flags = wr->send_flags | qp.signal_all;
    SendWr& kept = sq[sq_head & sq_mask];
    std::uint16_t elements = kInLane;
    if ((flags & IBV_SEND_INLINE) != 0) {
      if (length > qp.max_inline) [[unlikely]]
        break;
    } else {
      if (!allows_again(c, pd, qp.readable, sge, 0) && length != 0) [[unlikely]]
        break;
      elements = 1;
      kept.first = sge;
    }
    if (sizes == Sizes::line || length <= kLinePayload) {
      copy_small(line->payload, pointer(sge.addr), length);
    } else if (copy_to_data(qp, out, *line, position, kept, *wr)) {
      elements = 1;
    } else {
      break;
    }
    line->set_trailer(length, ack);
    kept.wr_id = wr->wr_id;
    kept.lane_end = ++position;
    kept.psn = static_cast<std::uint32_t>(name >> 24);
    kept.set_kind(length, IBV_WR_SEND, flags, elements);
    ++sq_head;
    line->word.store(head | name, std::memory_order_release);
    ++line;
    name = (name + (std::uint64_t{1} << 24)) & kExpectedMask;  // the PSN wraps within 24 bits
    if ((flags & IBV_SEND_SIGNALED) != 0) {
      note_in_flight(qp, peer, position, sq_head, true);
      recorded = sq_head;
    }
  }
  if (position == begin) return wr;
  if (recorded != sq_head) note_in_flight(qp, peer, position, sq_head, false);
  out.tail = position;
  qp.next_psn = static_cast<std::uint32_t>(name >> 24);
  qp.sq_head = qp.sq_next = sq_head;
  return wr;
}

/// Sends one short inline message, the case of a ping-pong: writes the lane before any bookkeeping.
/// False if the work request is of another kind.
inline bool send_single_inline(Qp& qp, const ibv_send_wr& wr) noexcept {
  Peer& peer = *qp.peer;
  OutLane& out = peer.out;
  const std::uint64_t position = out.tail;
  const std::uint32_t sq_head = qp.sq_head;
  if (!is_simple<Sizes::line>(wr) || (wr.send_flags & IBV_SEND_INLINE) == 0 ||
      wr.sg_list->length > qp.max_inline || position >= out.limit ||
      sq_head - qp.sq_reclaimed >= qp.sq_depth) [[unlikely]] {
    return false;
  }
  const std::uint32_t length = wr.sg_list->length;
  Line& line = out.lines[position & (kLaneLines - 1)];
  copy_small(line.payload, pointer(wr.sg_list->addr), length);
  line.set_trailer(length, std::uint64_t{ack_bits(peer)} << 48);
  line.word.store(lane_mark(position) << 56 | packet_kind(Packet::send, ack_flag(peer)) << 48 |
                      std::uint64_t{qp.next_psn} << 24 | qp.dest_qpn,
                  std::memory_order_release);
  const unsigned flags = wr.send_flags | qp.signal_all;
  SendWr& kept = qp.sq[sq_head & qp.sq_mask];
  kept.wr_id = wr.wr_id;
  kept.lane_end = out.tail = position + 1;
  kept.psn = qp.next_psn;
  kept.set_kind(length, IBV_WR_SEND, flags, kInLane);
  qp.next_psn = psn_add(qp.next_psn, 1);
  qp.sq_head = qp.sq_next = sq_head + 1;
  note_in_flight(qp, peer, position + 1, sq_head + 1, (flags & IBV_SEND_SIGNALED) != 0);
  after_publishing(peer);
  return true;
}

/// Sends simple messages straight into the lane. Returns the first work request that it did not
/// send.
template <Sizes sizes>
[[gnu::noinline]] ibv_send_wr* send_plain_list(Qp& qp, ibv_send_wr* wr) noexcept {
  Peer& peer = *qp.peer;
  const std::uint64_t begin = peer.out.tail;
  bool wrapped = false;
  do {
    const std::uint64_t tail = peer.out.tail;
    wr = send_until_lane_wraps<sizes>(qp, peer, wr);
    wrapped = peer.out.tail != tail && peer.out.tail % kLaneLines == 0;
  } while (wrapped && wr != nullptr);
  if (peer.out.tail != begin) [[likely]]
    after_publishing(peer);
  return wr;
}

/// Whether a READ may run before earlier messages are acknowledged: its user says so, and no WRITE
/// with immediate among them has yet to change what it reads.
bool may_read_ahead(const Qp& qp, const SendWr& read) noexcept {
  // Programs know no such flag.
  if ((read.flags & kMayRunAhead) == 0 || context_of(qp.context).driving == Driving::by_poll)
    return false;
  for (std::uint32_t at = qp.sq_tail; at != qp.sq_next; ++at) {
    const SendWr& earlier = qp.sq[at & qp.sq_mask];
    if (earlier.opcode == IBV_WR_RDMA_WRITE_WITH_IMM &&
        earlier.remote_address < read.remote_address + read.length &&
        read.remote_address < earlier.remote_address + earlier.length)
      return false;
  }
  return true;
}

/// Runs a work request that sends no packet while earlier ones are not acknowledged: then the peer,
/// which may be copying, and this end need not wait for each other. It completes after them. False:
/// it has to wait for them. Two contexts of one process that share a thread would only have more
/// memory in use at a time.
[[gnu::noinline]] bool run_ahead(Qp& qp, SendWr& wr, const ibv_sge* sges) noexcept {
  OutLane& out = qp.peer->out;
  if (qp.peer->same_process || qp.has_faults ||
      out.in_flight_tail - out.in_flight_head >= kLaneLines)
    return false;
  if ((wr.flags & kHasRun) == 0) {
    if (is_local(wr.opcode)) {
      if (!run_local_ahead(qp, wr)) return false;
    } else if (wr.opcode != IBV_WR_RDMA_READ || !may_read_ahead(qp, wr)) {
      return false;
    } else if (!read_ahead(qp, wr, sges)) {
      wr.flags &= static_cast<std::uint8_t>(~kMayRunAhead);  // once: the copy may be long
      return false;
    }
    wr.flags |= kHasRun;
  }
  // Behind the last record, one of which is of its own packets. Direct messages have none.
  const bool none = out.in_flight_head == out.in_flight_tail;
  const std::uint64_t end =
      none ? out.tail : out.in_flight[(out.in_flight_tail - 1) & (kInFlight - 1)].end;
  ++qp.sq_next;
  note_in_flight(qp, *qp.peer, end, qp.sq_next, true);
  return true;
}

}  // namespace

void run_send_queue(Qp& qp) noexcept {
  while (qp.sq_next != qp.sq_head && !qp.waiting) {
    const std::uint32_t slot = qp.sq_next & qp.sq_mask;
    SendWr& wr = qp.sq[slot];
    const ibv_sge* sges = elements(qp, wr);
    if ((qp.peer->gone || qp.direct_lost) && !is_local(wr.opcode)) [[unlikely]] {
      if (qp.sq_next == qp.sq_tail) handle_unreachable(qp);
      return;
    }
    if (is_packet(wr.opcode)) {
      if (!elements_allowed(qp, wr, sges, 0)) [[unlikely]] {
        // Errors are reported in order: after all earlier work requests are acknowledged.
        if (qp.sq_next == qp.sq_tail) fail_oldest(qp, IBV_WC_LOC_PROT_ERR);
        return;
      }
      if (!transmit(qp, wr, sges)) return;
      ++qp.sq_next;
    } else {
      if (qp.sq_next != qp.sq_tail) {
        if (run_ahead(qp, wr, sges)) continue;
        return watch_next_poll(*qp.peer);  // and waits for acknowledgements
      }
      if ((wr.flags & kHasRun) == 0 &&
          !(is_local(wr.opcode) ? run_local(qp, wr) : run_one_sided(qp, wr, sges)))
        return;
      ++qp.sq_next;
      complete_oldest(qp);
    }
  }
}

namespace {

/// Posts work requests that are not simple messages, or cannot be sent at once.
[[gnu::noinline]] int post_any(Qp& qp, ibv_send_wr* wr, ibv_send_wr** bad) noexcept {
  if (qp.qp_type == IBV_QPT_UD) return post_datagrams(qp, wr, bad);
  if (qp.state != IBV_QPS_RTS && qp.state != IBV_QPS_ERR) {
    *bad = wr;
    return EINVAL;
  }
  int error = 0;
  for (; wr != nullptr; wr = wr->next) {
    error = append(qp, *wr);
    if (error != 0) [[unlikely]] {
      *bad = wr;
      break;
    }
  }
  if (qp.state == IBV_QPS_ERR) {
    enter_error(qp);  // flushes the appended work requests
  } else if (qp.sq_next != qp.sq_head) {
    run_send_queue(qp);
  }
  return error;
}

}  // namespace

int post_send(ibv_qp* base, ibv_send_wr* wr, ibv_send_wr** bad) noexcept {
  Qp& qp = *static_cast<Qp*>(base);
  if (qp.open && qp.sq_next == qp.sq_head && wr != nullptr) [[likely]] {
    if (wr->next == nullptr && send_single_inline(qp, *wr)) return 0;
    if (wr->opcode != IBV_WR_SEND) return post_any(qp, wr, bad);
    wr = send_plain_list<Sizes::line>(qp, wr);
    if (wr == nullptr) [[likely]]
      return 0;
    if (is_simple_and_long(*wr)) {
      wr = send_plain_list<Sizes::any>(qp, wr);
      if (wr == nullptr) return 0;
    }
  }
  return post_any(qp, wr, bad);
}

}  // namespace spinwire::softverbs
