// Receives datagrams. Hot.
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

constexpr std::uint8_t kNextHeader = 0x1b;  ///< InfiniBand transport
/// Bytes beside the payload that a route header's length counts: base and datagram transport
/// headers and the invariant checksum. Immediate data adds kImmBytes.
constexpr std::uint32_t kTransportBytes = 12 + 8 + 4;
constexpr std::uint32_t kImmBytes = 4;

/// A decoded datagram.
struct Datagram {
  std::uint32_t length;  ///< length of the payload
  bool has_imm;
  DatagramPrefix prefix;
};

bool read_prefix(PacketBytes& from, std::uint64_t word, std::uint32_t bytes,
                 Datagram& datagram) noexcept {
  datagram.has_imm = word_packet(word) == Packet::datagram_imm;
  datagram.prefix = {0, htonl(kRouteVersion), kUsualHops, {}};
  datagram.length = bytes;
  if ((word_flags(word) & line_flag::kPrefixed) != 0) {
    if (bytes < sizeof datagram.prefix) return false;
    from.read(&datagram.prefix, sizeof datagram.prefix);
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

/// Writes route header and payload into the elements, which have room for both.
void scatter(const ibv_grh& grh, PacketBytes from, std::uint32_t length, const ibv_sge* sges,
             std::uint32_t count) noexcept {
  if (count == 1) [[likely]] {
    std::memcpy(pointer(sges->addr), &grh, sizeof grh);
    return from.read(pointer(sges->addr) + sizeof grh, length);
  }
  ScatterCursor to(sges, count);
  scatter_bytes(to, reinterpret_cast<const std::byte*>(&grh), sizeof grh);
  scatter_bytes(to, from.at, length);
}

/// Drops a datagram that is longer than the receive. As the specification demands, a queue pair's
/// own receive stays posted (responder error class D), and a shared receive completes with an error
/// (class E). The queue pair keeps working in both cases.
void too_long(Context& c, Qp& qp, const ReceiveWr& wr) noexcept {
  count_drop(c, Drop::too_long);
  if (qp.srq != nullptr) fail_receive(qp, wr, IBV_WC_LOC_LEN_ERR);
}

/// Writes the route headers of one lane's plain datagrams, which differ only in the length.
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
  std::uint64_t first_ = 0;  ///< first word of `route_`, without a length
  std::uint64_t length_ = 0;
  std::uint32_t bytes_ = ~0u;
};

void deliver(Context& c, const InLane& lane, Qp& qp, std::uint64_t word,
             std::uint32_t bytes) noexcept {
  Datagram datagram;
  PacketBytes from{packet_bytes(lane, *lane.next, bytes)};
  if (from.at == nullptr || !read_prefix(from, word, bytes, datagram)) [[unlikely]]
    return count_drop(c, Drop::malformed);
  ReceiveQueue& receives = *qp.receives;
  if (receives.count() == 0 && !claim_reserve(qp)) [[unlikely]]
    return count_drop(c, Drop::no_receive);
  const ReceiveWr& wr = receives.ring[receives.head & receives.mask];
  const ibv_sge* const sges = receives.elements(wr);
  const std::uint32_t length = datagram.length + static_cast<std::uint32_t>(sizeof(ibv_grh));
  if (length > wr.capacity) [[unlikely]]
    return too_long(c, qp, wr);
  if (!all_allowed_again(qp, qp.writable, sges, wr.sge_count, IBV_ACCESS_LOCAL_WRITE))
      [[unlikely]] {
    // A local error (class A) ends the queue pair.
    fail_receive(qp, wr, IBV_WC_LOC_PROT_ERR);
    return enter_error(qp);
  }
  scatter(route_header(lane, datagram), from, datagram.length, sges, wr.sge_count);
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

void count_drop(Context& c, Drop reason) noexcept { ++c.drops[static_cast<std::size_t>(reason)]; }

void receive_datagram(Context& c, const InLane& lane, std::uint64_t word,
                      std::uint32_t bytes) noexcept {
  const std::uint32_t qpn = word_qpn(word);
  Qp* const qp = find_queue_pair(c, queue_pair_index(qpn));
  if (qp == nullptr || qp->qp_num != qpn || qp->qp_type != IBV_QPT_UD || !receives_in(qp->state))
      [[unlikely]] {
    return count_drop(c, Drop::no_queue_pair);
  }
  if (lane.next->imm != qp->attr.qkey) [[unlikely]]
    return count_drop(c, Drop::wrong_key);
  deliver(c, lane, *qp, word, bytes);
}

std::uint32_t receive_datagrams(const Context& c, InLane& lane, Cq& cq, std::uint64_t word,
                                std::uint32_t limit, DirectOutcome& direct) noexcept {
  constexpr std::uint64_t kSpecial = line_flag::kPrefixed | line_flag::kSolicited;
  const std::uint32_t qpn = word_qpn(word);
  Qp* const qp = find_queue_pair(c, queue_pair_index(qpn));
  if (qp == nullptr || qp->qp_num != qpn || qp->qp_type != IBV_QPT_UD || !receives_in(qp->state) ||
      qp->recv_cq != &cq || word_packet(word) != Packet::datagram ||
      (word_flags(word) & kSpecial) != 0) [[unlikely]] {
    return 0;
  }
  if (qp->direct != nullptr) {
    direct = report_batch(lane, *qp, cq, word, limit);
    if (direct != DirectOutcome::none) return 0;
    limit = 1;  // the next datagram may begin a batch
  }
  ReceiveQueue& receives = *qp->receives;
  const CompletionHead success{IBV_WC_RECV, qpn, word_psn(word), 0, IBV_WC_GRH};
  const std::uint32_t most = std::min(
      {limit, cq.room, receives.count(), static_cast<std::uint32_t>(lane.end - lane.next)});
  const std::uint32_t key = qp->attr.qkey;
  const KnownRegion known = qp->writable;
  if (known.epoch != c.region_epoch) [[unlikely]]
    return 0;  // the general path looks the registration up again
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
    if (static_cast<std::uint32_t>(trailer) != key || bytes > kLinePayload || wr.sge_count != 1 ||
        length > wr.capacity || !is_within(known, wr.first)) [[unlikely]] {
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
