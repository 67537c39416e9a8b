// Sends datagrams. Hot.
#include <arpa/inet.h>
#include <errno.h>

#include <algorithm>
#include <cstring>

#include "softverbs/faults/fault_layer.h"
#include "softverbs/lane/lane_data.h"
#include "softverbs/memory/memory_region.h"
#include "softverbs/queues.h"
#include "softverbs/ud/ud_datagram.h"

namespace spinwire::softverbs {
namespace {

/// Whether the lane has room beside the lines reserved for connected messages. Never waits.
bool has_room(Peer& peer, std::uint32_t bytes) noexcept {
  OutLane& out = peer.out;
  const auto has = [&](Acks acks) {
    return out.tail + kConnectedLines < out.limit && has_data_room(out, bytes, acks);
  };
  if (has(Acks::known)) [[likely]]
    return true;
  // The acknowledgement must be applied, not only read: consumed lines may hold the only copy of a
  // short message that the peer refused.
  apply_peer_acks(peer);
  return has(Acks::all);
}

/// Copies a datagram's bytes into the lane; nothing is visible yet.
void write_bytes(std::byte* to, const Outgoing& d, const DatagramPrefix* prefix) noexcept {
  if (prefix != nullptr) {
    std::memcpy(to, prefix, sizeof *prefix);
    to += sizeof *prefix;
  }
  gather_bytes(to, d.sges, d.count);
}

/// Writes a datagram into the lane; false if there is no room. Drops it if the peer is gone.
[[gnu::always_inline]] inline bool transmit(Qp& qp, const Outgoing& d) noexcept {
  Peer& peer = *d.peer;
  const bool prefixed = d.has_imm || !d.plain;
  const std::uint32_t bytes =
      d.length + (prefixed ? static_cast<std::uint32_t>(sizeof(DatagramPrefix)) : 0);
  if (peer.gone) [[unlikely]]
    return count_drop(*peer.context, Drop::peer_gone), true;
  if (!has_room(peer, bytes)) [[unlikely]]
    return false;

  OutLane& out = peer.out;
  const std::uint64_t position = out.tail;
  Line& first = out.lines[position & (kLaneLines - 1)];
  if (d.count == 1 && bytes == d.length && bytes <= kLinePayload) [[likely]] {
    copy_small(first.payload, pointer(d.sges->addr), d.length);
  } else {
    const DatagramPrefix prefix{d.has_imm ? d.imm : 0, d.version_class_flow, d.hop_limit, {}};
    std::byte* const at = place_packet(out, first, position, bytes);
    write_bytes(at, d, prefixed ? &prefix : nullptr);
    // The receiver may read a plain one like a direct one.
    if (!prefixed && bytes > kLinePayload) std::memcpy(first.payload, at, kDirectHeader);
  }
  first.imm = d.qkey;
  first.length = static_cast<std::uint16_t>(bytes);
  first.ack = ack_bits(peer);
  const std::uint64_t flags =
      (prefixed ? line_flag::kPrefixed : 0) | (d.solicited ? line_flag::kSolicited : 0);
  const std::uint64_t kind =
      packet_kind(d.has_imm ? Packet::datagram_imm : Packet::datagram, flags | ack_flag(peer));
  out.tail = position + 1;
  first.word.store(lane_mark(position) << 56 | kind << 48 | std::uint64_t{qp.qp_num} << 24 |
                       (d.remote_qpn & 0xffffff),
                   std::memory_order_release);
  after_publishing(peer);
  return true;
}

constexpr int kOfProcess = -1;

/// Checks a work request. Returns 0, an errno value, or kOfProcess if the address handle names a
/// process.
[[gnu::always_inline]] inline int check(const Qp& qp, const ibv_send_wr& wr,
                                        std::uint64_t& length) noexcept {
  if (qp.sq_head - qp.sq_reclaimed >= qp.sq_depth) [[unlikely]]
    return ENOMEM;
  if ((wr.opcode != IBV_WR_SEND && wr.opcode != IBV_WR_SEND_WITH_IMM) ||
      static_cast<std::uint32_t>(wr.num_sge) > qp.max_sge) [[unlikely]] {
    return EINVAL;
  }
  const auto* const ah = static_cast<const Ah*>(wr.wr.ud.ah);
  if (ah == nullptr) [[unlikely]]
    return EINVAL;
  if (ah->usable_in != qp.pd) [[unlikely]]
    return ah->usable_in == nullptr && ah->pd == qp.pd ? kOfProcess : EINVAL;
  length = 0;
  for (int i = 0; i < wr.num_sge; ++i) length += wr.sg_list[i].length;
  return (wr.send_flags & IBV_SEND_INLINE) != 0 && length > qp.max_inline ? EINVAL : 0;
}

[[gnu::always_inline]] inline ibv_wc_status check_contents(Qp& qp, const ibv_sge* sges,
                                                           std::uint32_t count,
                                                           std::uint64_t length,
                                                           bool in_line) noexcept {
  // The specification (C10-93.1.1) drops such a datagram silently, as Soft-RoCE does. Adapters
  // report an error for messages that are too long, and so does this device: programs should not
  // lose messages silently.
  if (length > kDatagramBytes) [[unlikely]]
    return IBV_WC_LOC_LEN_ERR;
  if (!in_line && !all_allowed_again(qp, qp.readable, sges, count, 0)) [[unlikely]]
    return IBV_WC_LOC_PROT_ERR;
  return IBV_WC_SUCCESS;
}

/// Sends a checked datagram. False if there is no room; sets `status` if the send fails. The two
/// variants are inlined into two copies of the posting code, so that the common one pays nothing
/// for faults.
using Carry = bool (*)(Qp& qp, const ibv_send_wr& wr, const Outgoing& datagram,
                       ibv_wc_status& status) noexcept;

[[gnu::always_inline]] inline bool carry_direct(Qp& qp, const ibv_send_wr&,
                                                const Outgoing& datagram, ibv_wc_status&) noexcept {
  // A datagram waits behind those that wait for room.
  return datagram.peer->datagrams_waiting == 0 && transmit(qp, datagram);
}

bool carry_with_faults(Qp& qp, const ibv_send_wr& wr, const Outgoing& datagram,
                       ibv_wc_status& status) noexcept {
  status = inject_datagram_faults(qp, wr, datagram.length);
  return true;
}

/// Whether a work request is an inline SEND of one element of at most `most` bytes.
inline bool is_short(const ibv_send_wr& wr, std::uint32_t most) noexcept {
  return wr.opcode == IBV_WR_SEND && wr.num_sge == 1 &&
         (wr.send_flags & ~unsigned{IBV_SEND_SIGNALED}) == IBV_SEND_INLINE &&
         wr.sg_list->length <= most;
}

/// Posts short plain datagrams with one address handle and with room, up to the end of the lane's
/// array. Returns the first work request that it did not post.
[[gnu::always_inline]] inline ibv_send_wr* post_run(Qp& qp, ibv_send_wr* wr) noexcept {
  const std::uint32_t most = std::min<std::uint32_t>(qp.max_inline, kLinePayload);
  if (!is_short(*wr, most)) return wr;  // other opcodes have no address handle
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
int post_to_process(Qp& qp, const ibv_send_wr& wr) noexcept;

template <Carry carry>
int post_one(Qp& qp, const ibv_send_wr& wr) noexcept {
  std::uint64_t length = 0;
  if (const int error = check(qp, wr, length); error != 0) [[unlikely]]
    return error == kOfProcess ? post_to_process<carry>(qp, wr) : error;
  const auto bytes = static_cast<std::uint32_t>(length);
  if (!qp.sends_at_once) [[unlikely]]
    return queue_datagram(qp, wr, length), 0;
  const auto count = static_cast<std::uint32_t>(wr.num_sge);
  ibv_wc_status status =
      check_contents(qp, wr.sg_list, count, length, (wr.send_flags & IBV_SEND_INLINE) != 0);
  if (status != IBV_WC_SUCCESS) [[unlikely]] {
    ++qp.sq_head;
    return fail_datagram(qp, wr.wr_id, status), 0;
  }
  if (!carry(qp, wr, outgoing(qp, wr, bytes), status)) [[unlikely]]
    return queue_datagram(qp, wr, length), 0;
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

/// Posts with the address handle of the receiver's context.
template <Carry carry>
[[gnu::noinline]] int post_to_process(Qp& qp, const ibv_send_wr& wr) noexcept {
  ibv_send_wr led = wr;
  led.wr.ud.ah = choose_context(wr.wr.ud.ah, led.wr.ud.remote_qpn);
  return led.wr.ud.ah != nullptr ? post_one<carry>(qp, led) : ENOMEM;
}

}  // namespace

ibv_wc_status check_datagram(Qp& qp, const ibv_sge* sges, std::uint32_t count, std::uint64_t length,
                             bool in_line) noexcept {
  return check_contents(qp, sges, count, length, in_line);
}

bool transmit_datagram(Qp& qp, const Outgoing& datagram) noexcept { return transmit(qp, datagram); }

void fail_datagram(Qp& qp, std::uint64_t wr_id, ibv_wc_status status) noexcept {
  push_error(*static_cast<Cq*>(qp.send_cq), qp, wr_id, status, IBV_WC_SEND);
  qp.state = IBV_QPS_SQE;
  qp.sends_at_once = false;
  qp.sq_reclaimed = qp.sq_next = qp.sq_tail = qp.sq_head;
}

template <Carry carry>
static int post_all(Qp& qp, ibv_send_wr* wr, ibv_send_wr** bad) noexcept {
  int error = qp.sends_at_once || qp.state == IBV_QPS_RTS || qp.state == IBV_QPS_SQE ||
                      qp.state == IBV_QPS_ERR
                  ? 0
                  : EINVAL;
  while (wr != nullptr && error == 0) {
    if constexpr (carry == carry_direct) {
      const ibv_send_wr* const first = wr;
      if (qp.sends_at_once) wr = post_run(qp, wr);
      if (wr != first) continue;
    }
    error = post_one<carry>(qp, *wr);
    if (error == 0) wr = wr->next;
  }
  if (error != 0) [[unlikely]]
    *bad = wr;
  if (qp.sends_at_once) [[likely]]
    qp.sq_next = qp.sq_tail = qp.sq_head;  // nothing is outstanding
  return error;
}

int post_datagrams(Qp& qp, ibv_send_wr* wr, ibv_send_wr** bad) noexcept {
  return post_all<carry_direct>(qp, wr, bad);
}

int post_datagrams_with_faults(Qp& qp, ibv_send_wr* wr, ibv_send_wr** bad) noexcept {
  return post_all<carry_with_faults>(qp, wr, bad);
}

}  // namespace spinwire::softverbs
