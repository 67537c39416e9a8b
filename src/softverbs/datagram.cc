#include "softverbs/datagram.h"

#include <arpa/inet.h>
#include <errno.h>

#include <algorithm>
#include <cstring>

#include "softverbs/faults_layer.h"
#include "softverbs/lane_io.h"
#include "softverbs/queue.h"
#include "softverbs/region.h"

namespace spinwire::softverbs {
namespace {

constexpr std::uint8_t kNextHeader = 0x1b;  ///< InfiniBand transport
/// What the lengths in a route header count besides payload: base and datagram transport headers,
/// immediate data, the invariant checksum.
constexpr std::uint32_t kTransportBytes = 12 + 8 + 4;
constexpr std::uint32_t kImmBytes = 4;

/// Whether the lane has room besides what belongs to connected messages. Never waits.
bool has_room(Peer& peer, std::uint32_t lines) noexcept {
  const OutLane& out = peer.out;
  if (out.tail + lines + kConnectedLines <= out.limit) [[likely]]
    return true;
  // Applied, not only looked at: lines that the peer has consumed may still hold the only copy of
  // a short message that it did not take.
  acknowledge(peer);
  return out.tail + lines + kConnectedLines <= out.limit;
}

/// Copies a datagram's bytes into the lane; nothing is visible yet.
void write_lines(OutLane& out, const Outgoing& d, const DatagramPrefix* prefix,
                 std::uint32_t lines) noexcept {
  LaneCursor cursor(out.lines, out.tail);
  if (prefix != nullptr) cursor.write(reinterpret_cast<const std::byte*>(prefix), sizeof *prefix);
  for (std::uint32_t i = 0; i < d.count; ++i)
    cursor.write(pointer(d.sges[i].addr), d.sges[i].length);
  for (std::uint32_t i = 1; i < lines; ++i) {
    out.lines[(out.tail + i) & (kLaneLines - 1)].word.store(lane_mark(out.tail + i) << 56,
                                                            std::memory_order_relaxed);
  }
}

/// Into the lane, whole; false if there is no room. To one that is gone: nowhere.
[[gnu::always_inline]] inline bool transmit(Qp& qp, const Outgoing& d) noexcept {
  Peer& peer = *d.peer;
  const bool prefixed = d.has_imm || !d.plain;
  const std::uint32_t bytes =
      d.length + (prefixed ? static_cast<std::uint32_t>(sizeof(DatagramPrefix)) : 0);
  const std::uint32_t lines = lines_for(bytes);
  if (peer.gone) [[unlikely]]
    return drop_datagram(*peer.context, Drop::peer_gone), true;
  if (!has_room(peer, lines)) [[unlikely]]
    return false;

  OutLane& out = peer.out;
  const std::uint64_t position = out.tail;
  Line& first = out.lines[position & (kLaneLines - 1)];
  if (d.count == 1 && bytes == d.length && lines == 1) [[likely]] {
    copy_small(first.payload, pointer(d.sges->addr), d.length);
  } else {
    const DatagramPrefix prefix{d.has_imm ? d.imm : 0, d.version_class_flow, d.hop_limit, {}};
    write_lines(out, d, prefixed ? &prefix : nullptr, lines);
  }
  first.imm = d.qkey;
  first.length = static_cast<std::uint16_t>(bytes);
  first.ack = ack_bits(peer);
  const std::uint64_t flags =
      (prefixed ? line_flag::kPrefixed : 0) | (d.solicited ? line_flag::kSolicited : 0);
  const std::uint64_t kind =
      packet_kind(d.has_imm ? Packet::datagram_imm : Packet::datagram, flags | ack_flag(peer));
  out.tail = position + lines;
  first.word.store(lane_mark(position) << 56 | kind << 48 | std::uint64_t{qp.qp_num} << 24 |
                       (d.remote_qpn & 0xffffff),
                   std::memory_order_release);
  after_publishing(peer);
  return true;
}

/// Whether the device may read all elements.
bool readable(Qp& qp, const ibv_sge* sges, std::uint32_t count) noexcept {
  const Context& c = context_of(qp.context);
  const Pd& pd = *static_cast<Pd*>(qp.pd);
  if (count == 1) [[likely]]
    return sges->length == 0 || allows_again(c, pd, qp.readable, *sges, 0);
  for (std::uint32_t i = 0; i < count; ++i) {
    if (sges[i].length != 0 && !local_allows(*c.segment, pd.id, sges[i], 0)) return false;
  }
  return true;
}

/// Errors that refuse a work request.
[[gnu::always_inline]] inline int check(const Qp& qp, const ibv_send_wr& wr,
                                        std::uint64_t& length) noexcept {
  if (qp.sq_head - qp.sq_reclaimed >= qp.sq_depth) [[unlikely]]
    return ENOMEM;
  if ((wr.opcode != IBV_WR_SEND && wr.opcode != IBV_WR_SEND_WITH_IMM) ||
      static_cast<std::uint32_t>(wr.num_sge) > qp.max_sge) [[unlikely]] {
    return EINVAL;
  }
  const ibv_ah* ah = wr.wr.ud.ah;
  if (ah == nullptr || ah->pd != qp.pd) [[unlikely]]
    return EINVAL;
  length = 0;
  for (int i = 0; i < wr.num_sge; ++i) length += wr.sg_list[i].length;
  return (wr.send_flags & IBV_SEND_INLINE) != 0 && length > qp.max_inline ? EINVAL : 0;
}

[[gnu::always_inline]] inline ibv_wc_status check_contents(Qp& qp, const ibv_sge* sges,
                                                           std::uint32_t count,
                                                           std::uint64_t length,
                                                           bool in_line) noexcept {
  // The specification (C10-93.1.1) wants nothing sent and no error told, which Soft-RoCE does.
  // Adapters tell the error that it has for a message longer than the port takes, and so do we: a
  // program that is tried here should not lose messages for a reason that nobody names.
  if (length > kDatagramBytes) [[unlikely]]
    return IBV_WC_LOC_LEN_ERR;
  if (!in_line && !readable(qp, sges, count)) [[unlikely]]
    return IBV_WC_LOC_PROT_ERR;
  return IBV_WC_SUCCESS;
}

/// Where a datagram that was found good goes: false if there is no room for it, a status other than
/// success if it fails after all. There are two ways to post by it, of which the common one shall
/// not pay for the other: all is in line.
using Carry = bool (*)(Qp& qp, const ibv_send_wr& wr, const Outgoing& datagram,
                       ibv_wc_status& status) noexcept;

[[gnu::always_inline]] inline bool carry_at_once(Qp& qp, const ibv_send_wr&,
                                                 const Outgoing& datagram,
                                                 ibv_wc_status&) noexcept {
  // Where others wait for room it waits behind them, however little it needs.
  return datagram.peer->datagrams_waiting == 0 && transmit(qp, datagram);
}

bool carry_with_faults(Qp& qp, const ibv_send_wr& wr, const Outgoing& datagram,
                       ibv_wc_status& status) noexcept {
  status = hold_datagram(qp, wr, datagram.length);
  return true;
}

/// A SEND of one element in line; one that fits into a line of a lane has up to `most` bytes.
inline bool is_short(const ibv_send_wr& wr, std::uint32_t most) noexcept {
  return wr.opcode == IBV_WR_SEND && wr.num_sge == 1 &&
         (wr.send_flags & ~unsigned{IBV_SEND_SIGNALED}) == IBV_SEND_INLINE &&
         wr.sg_list->length <= most;
}

/// The common case: short ones, plain, all by the same address handle and with room, up to the end
/// of the lane's array. Answers the first work request left.
[[gnu::always_inline]] inline ibv_send_wr* post_run(Qp& qp, ibv_send_wr* wr) noexcept {
  const std::uint32_t most = std::min<std::uint32_t>(qp.max_inline, kFirstLineBytes);
  if (!is_short(*wr, most)) return wr;  // other opcodes have no address handle in its place
  const auto* const ah = static_cast<const Ah*>(wr->wr.ud.ah);
  if (ah == nullptr || ah->pd != qp.pd || !ah->plain) [[unlikely]]
    return wr;
  Peer& peer = *ah->peer;
  OutLane& out = peer.out;
  const std::uint64_t begin = out.tail;
  if (peer.gone || peer.datagrams_waiting != 0 || begin + kConnectedLines >= out.limit) [[unlikely]]
    return wr;
  const std::uint64_t free = qp.sq_depth - (qp.sq_head - qp.sq_reclaimed);
  const std::uint64_t end =
      std::min(std::min(out.limit - kConnectedLines, (begin | (kLaneLines - 1)) + 1), begin + free);
  const std::uint64_t kind = packet_kind(Packet::datagram, ack_flag(peer));
  const std::uint64_t head = lane_mark(begin) << 56 | kind << 48 | std::uint64_t{qp.qp_num} << 24;
  const std::uint64_t ack = std::uint64_t{ack_bits(peer)} << 48;
  const unsigned signal_all = qp.signal_all;
  std::uint64_t position = begin;
  Line* line = &out.lines[begin & (kLaneLines - 1)];
  for (; wr != nullptr && position < end && is_short(*wr, most) && wr->wr.ud.ah == ah;
       wr = wr->next) {
    const ibv_sge& sge = *wr->sg_list;
    const std::uint32_t length = sge.length;
    const std::uint32_t key = wr->wr.ud.remote_qkey;
    copy_small(line->payload, pointer(sge.addr), length);
    line->set_trailer(length, ack, (key & kOwnKey) != 0 ? qp.attr.qkey : key);
    line->word.store(head | (wr->wr.ud.remote_qpn & 0xffffff), std::memory_order_release);
    ++line;
    ++position;
    if (((wr->send_flags | signal_all) & IBV_SEND_SIGNALED) != 0) [[unlikely]] {
      qp.sq_reclaimed = qp.sq_head + static_cast<std::uint32_t>(position - begin);
      if (ibv_wc* wc = completion_slot(*static_cast<Cq*>(qp.send_cq)); wc != nullptr)
        CompletionHead{IBV_WC_SEND, qp.qp_num, 0}.fill(*wc, wr->wr_id, length);
    }
  }
  if (position == begin) [[unlikely]]
    return wr;
  out.tail = position;
  const auto count = static_cast<std::uint32_t>(position - begin);
  qp.sq_head += count;
  qp.next_psn = psn_add(qp.next_psn, count);
  after_publishing(peer);
  return wr;
}

template <Carry carry>
int post_one(Qp& qp, const ibv_send_wr& wr) noexcept {
  std::uint64_t length = 0;
  if (const int error = check(qp, wr, length); error != 0) [[unlikely]]
    return error;
  const auto bytes = static_cast<std::uint32_t>(length);
  if (!qp.straight) [[unlikely]]
    return keep_datagram(qp, wr, length), 0;
  const auto count = static_cast<std::uint32_t>(wr.num_sge);
  ibv_wc_status status =
      check_contents(qp, wr.sg_list, count, length, (wr.send_flags & IBV_SEND_INLINE) != 0);
  if (status != IBV_WC_SUCCESS) [[unlikely]] {
    ++qp.sq_head;
    return fail_datagram(qp, wr.wr_id, status), 0;
  }
  if (!carry(qp, wr, outgoing(qp, wr, bytes), status)) [[unlikely]]
    return keep_datagram(qp, wr, length), 0;
  ++qp.sq_head;
  if (status != IBV_WC_SUCCESS) [[unlikely]]
    return fail_datagram(qp, wr.wr_id, status), 0;
  qp.next_psn = psn_add(qp.next_psn, 1);
  if (((wr.send_flags | qp.signal_all) & IBV_SEND_SIGNALED) == 0) return 0;
  qp.sq_reclaimed = qp.sq_head;
  if (ibv_wc* wc = completion_slot(*static_cast<Cq*>(qp.send_cq)); wc != nullptr) [[likely]]
    CompletionHead{IBV_WC_SEND, qp.qp_num, 0}.fill(*wc, wr.wr_id, bytes);
  return 0;
}

/// A datagram that was found good, as far as it says itself.
struct Datagram {
  std::uint32_t length;  ///< of the payload
  bool has_imm;
  DatagramPrefix prefix;
};

bool read_prefix(LaneCursor& cursor, std::uint64_t word, std::uint32_t bytes,
                 Datagram& datagram) noexcept {
  datagram.has_imm = word_packet(word) == Packet::datagram_imm;
  datagram.prefix = {0, htonl(kRouteVersion), kUsualHops, {}};
  datagram.length = bytes;
  if ((word_flags(word) & line_flag::kPrefixed) != 0) {
    if (bytes < sizeof datagram.prefix) return false;
    cursor.read(reinterpret_cast<std::byte*>(&datagram.prefix), sizeof datagram.prefix);
    datagram.length -= static_cast<std::uint32_t>(sizeof datagram.prefix);
  } else if (datagram.has_imm) {
    return false;
  }
  return datagram.length <= kDatagramBytes;
}

std::uint16_t route_length(std::uint32_t length, bool has_imm) noexcept {
  const std::uint32_t padded = (length + 3) & ~3u;
  return htons(static_cast<std::uint16_t>(padded + kTransportBytes + (has_imm ? kImmBytes : 0)));
}

ibv_grh route_header(const InLane& lane, const Datagram& datagram) noexcept {
  ibv_grh grh = lane.route;
  grh.version_tclass_flow = datagram.prefix.version_class_flow;
  grh.paylen = route_length(datagram.length, datagram.has_imm);
  grh.hop_limit = datagram.prefix.hop_limit;
  return grh;
}

bool receives_in(ibv_qp_state state) noexcept {
  return state == IBV_QPS_RTR || state == IBV_QPS_RTS || state == IBV_QPS_SQE;
}

bool writable(Qp& qp, const ibv_sge* sges, std::uint32_t count) noexcept {
  const Context& c = context_of(qp.context);
  const Pd& pd = *static_cast<Pd*>(qp.pd);
  if (count == 1) [[likely]]
    return allows_again(c, pd, qp.writable, *sges, IBV_ACCESS_LOCAL_WRITE);
  for (std::uint32_t i = 0; i < count; ++i) {
    if (sges[i].length != 0 && !local_allows(*c.segment, pd.id, sges[i], IBV_ACCESS_LOCAL_WRITE))
      return false;
  }
  return true;
}

/// Header and payload into the elements, which have room for both.
void scatter(const ibv_grh& grh, LaneCursor& from, std::uint32_t length, const ibv_sge* sges,
             std::uint32_t count) noexcept {
  if (count == 1) [[likely]] {
    std::memcpy(pointer(sges->addr), &grh, sizeof grh);
    return from.read(pointer(sges->addr) + sizeof grh, length);
  }
  ScatterCursor to(sges, count);
  const auto* header = reinterpret_cast<const std::byte*>(&grh);
  for (std::size_t left = sizeof grh; left != 0;) {
    const ScatterCursor::Piece piece = to.take(left);
    if (piece.data == nullptr) return;
    std::memcpy(piece.data, header, piece.length);
    header += piece.length;
    left -= piece.length;
  }
  for (std::size_t left = length; left != 0;) {
    const ScatterCursor::Piece piece = to.take(left);
    from.read(piece.data, piece.length);
    left -= piece.length;
  }
}

/// A receive without room. The specification has the datagram dropped silently and the receive kept
/// (responder error class D) on a queue of its own; a shared one has given the receive away by then
/// and completes it with an error (class E). The queue pair goes on either way.
void too_long(Context& c, Qp& qp, const ReceiveWr& wr) noexcept {
  drop_datagram(c, Drop::too_long);
  if (qp.srq != nullptr) fail_receive(qp, wr, IBV_WC_LOC_LEN_ERR);
}

/// What lies in front of the plain datagrams of a lane. Only the length changes, and seldom.
class RouteCopier {
 public:
  explicit RouteCopier(const ibv_grh& route) noexcept : route_(route) {
    std::memcpy(&first_, &route, sizeof first_);
  }
  void write(std::byte* to, std::uint32_t bytes) noexcept {
    static_assert(offsetof(ibv_grh, paylen) == 4 && sizeof(ibv_grh) == 40);
    if (bytes != bytes_) [[unlikely]] {
      bytes_ = bytes;
      length_ = std::uint64_t{route_length(bytes, false)} << 32;
    }
    const std::uint64_t first = first_ | length_;
    std::memcpy(to, &first, sizeof first);
    std::memcpy(to + sizeof first, reinterpret_cast<const std::byte*>(&route_) + sizeof first,
                sizeof route_ - sizeof first);
  }

 private:
  const ibv_grh& route_;
  std::uint64_t first_ = 0;  ///< its first word, without a length
  std::uint64_t length_ = 0;
  std::uint32_t bytes_ = ~0u;
};

void take(Context& c, const InLane& lane, Qp& qp, std::uint64_t word,
          std::uint32_t bytes) noexcept {
  Datagram datagram;
  LaneCursor cursor(lane.lines, lane.head);
  if (!read_prefix(cursor, word, bytes, datagram)) [[unlikely]]
    return drop_datagram(c, Drop::malformed);
  ReceiveQueue& receives = *qp.receives;
  if (receives.count() == 0 && !take_from_limit(qp)) [[unlikely]]
    return drop_datagram(c, Drop::no_receive);
  const ReceiveWr& wr = receives.ring[receives.head & receives.mask];
  const ibv_sge* const sges = receives.elements(wr);
  const std::uint32_t length = datagram.length + static_cast<std::uint32_t>(sizeof(ibv_grh));
  if (length > wr.capacity) [[unlikely]]
    return too_long(c, qp, wr);
  if (!writable(qp, sges, wr.sge_count)) [[unlikely]] {
    // Our own fault (class A): a work request that cannot be carried out ends the queue pair.
    fail_receive(qp, wr, IBV_WC_LOC_PROT_ERR);
    return enter_error(qp);
  }
  scatter(route_header(lane, datagram), cursor, datagram.length, sges, wr.sge_count);
  ++receives.head;
  if ((word_flags(word) & line_flag::kSolicited) != 0) [[unlikely]]
    ++static_cast<Cq*>(qp.recv_cq)->solicited;
  const unsigned flags = IBV_WC_GRH | (datagram.has_imm ? unsigned{IBV_WC_WITH_IMM} : 0u);
  if (ibv_wc* wc = completion_slot(*static_cast<Cq*>(qp.recv_cq)); wc != nullptr) [[likely]] {
    CompletionHead{IBV_WC_RECV, qp.qp_num, word_psn(word), datagram.prefix.imm, flags}.fill(
        *wc, wr.wr_id, length);
  }
}

}  // namespace

ibv_grh plain_route(const ibv_gid& from, const ibv_gid& to) noexcept {
  ibv_grh grh{};
  grh.version_tclass_flow = htonl(kRouteVersion);
  grh.next_hdr = kNextHeader;
  grh.hop_limit = kUsualHops;
  grh.sgid = from;
  grh.dgid = to;
  return grh;
}

ibv_grh route_header(const InLane& lane, std::uint32_t length) noexcept {
  ibv_grh grh = lane.route;
  grh.paylen = route_length(length, false);
  return grh;
}

ibv_wc_status check_datagram(Qp& qp, const ibv_sge* sges, std::uint32_t count, std::uint64_t length,
                             bool in_line) noexcept {
  return check_contents(qp, sges, count, length, in_line);
}

bool transmit_datagram(Qp& qp, const Outgoing& datagram) noexcept { return transmit(qp, datagram); }

void fail_datagram(Qp& qp, std::uint64_t wr_id, ibv_wc_status status) noexcept {
  push_error(*static_cast<Cq*>(qp.send_cq), qp, wr_id, status, IBV_WC_SEND);
  qp.state = IBV_QPS_SQE;
  qp.straight = false;
  qp.sq_reclaimed = qp.sq_next = qp.sq_tail = qp.sq_head;
}

void drop_datagram(Context& c, Drop reason) noexcept {
  ++c.drops[static_cast<std::size_t>(reason)];
}

template <Carry carry>
static int post_all(Qp& qp, ibv_send_wr* wr, ibv_send_wr** bad) noexcept {
  int error =
      qp.straight || qp.state == IBV_QPS_RTS || qp.state == IBV_QPS_SQE || qp.state == IBV_QPS_ERR
          ? 0
          : EINVAL;
  while (wr != nullptr && error == 0) {
    if constexpr (carry == carry_at_once) {
      const ibv_send_wr* const first = wr;
      if (qp.straight) wr = post_run(qp, wr);
      if (wr != first) continue;
    }
    error = post_one<carry>(qp, *wr);
    if (error == 0) wr = wr->next;
  }
  if (error != 0) [[unlikely]]
    *bad = wr;
  if (qp.straight) [[likely]]
    qp.sq_next = qp.sq_tail = qp.sq_head;  // nothing is outstanding
  return error;
}

int post_datagrams(Qp& qp, ibv_send_wr* wr, ibv_send_wr** bad) noexcept {
  return post_all<carry_at_once>(qp, wr, bad);
}

int post_datagrams_with_faults(Qp& qp, ibv_send_wr* wr, ibv_send_wr** bad) noexcept {
  return post_all<carry_with_faults>(qp, wr, bad);
}

void take_datagram(Context& c, const InLane& lane, std::uint64_t word,
                   std::uint32_t bytes) noexcept {
  const std::uint32_t qpn = word_qpn(word);
  Qp* const qp = c.queue_pairs[queue_pair_index(qpn)];
  if (qp == nullptr || qp->qp_num != qpn || qp->qp_type != IBV_QPT_UD || !receives_in(qp->state))
      [[unlikely]] {
    return drop_datagram(c, Drop::no_queue_pair);
  }
  if (lane.next->imm != qp->attr.qkey) [[unlikely]]
    return drop_datagram(c, Drop::wrong_key);
  take(c, lane, *qp, word, bytes);
}

std::uint32_t take_datagrams(const Context& c, InLane& lane, Cq& cq, std::uint64_t word,
                             std::uint32_t limit, Direct& direct) noexcept {
  constexpr std::uint64_t kSpecial = line_flag::kPrefixed | line_flag::kSolicited;
  const std::uint32_t qpn = word_qpn(word);
  Qp* const qp = c.queue_pairs[queue_pair_index(qpn)];
  if (qp == nullptr || qp->qp_num != qpn || qp->qp_type != IBV_QPT_UD || !receives_in(qp->state) ||
      qp->recv_cq != &cq || word_packet(word) != Packet::datagram ||
      (word_flags(word) & kSpecial) != 0) [[unlikely]] {
    return 0;
  }
  if (qp->direct != nullptr) {
    direct = tell_of_run(lane, *qp, cq, word, limit);
    if (direct != Direct::none) return 0;
  }
  ReceiveQueue& receives = *qp->receives;
  const CompletionHead success{IBV_WC_RECV, qpn, word_psn(word), 0, IBV_WC_GRH};
  const std::uint32_t most = std::min(
      {limit, cq.room, receives.count(), static_cast<std::uint32_t>(lane.end - lane.next)});
  const std::uint32_t key = qp->attr.qkey;
  const KnownRegion known = qp->writable;
  if (known.epoch != c.region_epoch) [[unlikely]]
    return 0;  // the slower way makes it known again
  const ReceiveWr* const ring = receives.ring.get();
  const std::uint32_t mask = receives.mask;
  RouteCopier route(lane.route);
  std::uint32_t head = receives.head;
  ibv_wc* out = cq.out;
  const Line* line = lane.next;
  std::uint32_t left = most;
  for (; left != 0 && line->word.load(std::memory_order_acquire) == word; --left) {
    const std::uint64_t trailer = line->trailer();
    const std::uint32_t bytes = trailer >> 32 & 0xffff;
    const std::uint32_t length = bytes + static_cast<std::uint32_t>(sizeof(ibv_grh));
    const ReceiveWr& wr = ring[head & mask];
    const std::uint64_t wr_id = wr.wr_id;
    if (static_cast<std::uint32_t>(trailer) != key || bytes > kFirstLineBytes ||
        wr.sge_count != 1 || length > wr.capacity || !lies_in(known, wr.first)) [[unlikely]] {
      break;
    }
    std::byte* const to = pointer(wr.first.addr);
    route.write(to, bytes);
    copy_small(to + sizeof(ibv_grh), line->payload, bytes);
    success.fill(*out++, wr_id, length);
    ++head;
    ++line;
  }
  receives.head = head;
  cq.out = out;
  cq.room -= most - left;
  return most - left;
}

}  // namespace spinwire::softverbs
