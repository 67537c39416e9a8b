#include "softverbs/rc/rc_direct.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/prefetch.h"
#include "softverbs/lane/lane_data.h"
#include "softverbs/queues.h"
#include "softverbs/ud/ud_datagram.h"

namespace spinwire::softverbs {
namespace {

/// A lane's data holds eight messages of this length.
constexpr std::uint32_t kLongest = (32 << 10) + kDirectMessageHeader;

/// Sets DirectLane::direct_limit, if the queue pair can send direct messages.
[[gnu::cold, gnu::noinline]] bool open_limit(Qp& qp) noexcept {
  if (!qp.open || !is_served(qp, *qp.remote_rights) || !open_direct_limit(*qp.peer)) return false;
  qp.direct_open = true;
  return true;
}

/// Whether the queue pair sends and no work request waits: those come first.
inline bool may_send(const Qp& qp) noexcept { return qp.open && qp.sq_next == qp.sq_head; }

inline bool is_below_limit(const Qp& qp) noexcept {
  return qp.peer->out.tail < qp.peer->out.direct_limit && qp.direct_open;
}

/// Whether the lane has room for a message's bytes. All of the data may be used: a message that
/// finds none goes by a slower way, while datagrams wait.
inline bool has_message_room(OutLane& out, std::uint32_t bytes, Acks acks) noexcept {
  return has_data_room(out, bytes, acks, out.data_capacity);
}

/// Whether the lane takes a message of so many bytes now. Acknowledgements, which polls do not
/// watch for, may make room, but may also refuse a work request, which then comes first.
inline bool has_room(Qp& qp, std::uint32_t bytes) noexcept {
  if (!may_send(qp)) [[unlikely]]
    return false;
  if (!is_below_limit(qp)) [[unlikely]] {
    if (!open_limit(qp) || !may_send(qp)) return false;
  }
  if (has_message_room(qp.peer->out, bytes, Acks::known)) [[likely]]
    return true;
  apply_peer_acks(*qp.peer);
  return may_send(qp) && is_below_limit(qp) && has_message_room(qp.peer->out, bytes, Acks::all);
}

/// Queues the completion of a message. False: the queue has no room, or completions of earlier work
/// requests are missing, which must come first.
[[gnu::noinline]] bool complete(Qp& qp, std::uint64_t wr_id, std::uint32_t length) noexcept {
  Cq& cq = *static_cast<Cq*>(qp.send_cq);
  if (qp.sq_tail != qp.sq_head || cq.tail - cq.head > cq.mask) return false;
  CompletionHead{IBV_WC_SEND, qp.qp_num, 0}.fill(*ring_slot(cq), wr_id, length);
  return true;
}

/// Lines behind a message's own that are taken from the peer early. It has read them a lap ago, so
/// the first store to each would wait.
constexpr std::uint64_t kLinesAhead = 8;

/// Sends the message whose bytes are at their place.
[[gnu::always_inline]] inline Sent finish_send(Qp& qp, Peer& peer, Line& line,
                                               std::uint64_t position,
                                               std::uint32_t bytes) noexcept {
  OutLane& out = peer.out;
  line.set_trailer(bytes, out.ack_on_top);
  out.tail = out.message_end = qp.direct_end = position + 1;
  const std::uint64_t word = lane_mark(position) << 56 | packet_kind(Packet::send, 0) << 48 |
                             std::uint64_t{qp.next_psn} << 24 | qp.dest_qpn;
  qp.next_psn = psn_add(qp.next_psn, 1);
  base::prefetch_to_write(&out.lines[(position + kLinesAhead) % kLaneLines]);
  return queue_line(out, peer.context->round, line, position, word,
                    [&peer]() -> Peer& { return peer; });
}

/// Sends a message whose payload `copy(to)` writes, if there is room or can be.
template <typename Copy>
[[gnu::always_inline]] inline Sent send_copied(Qp& qp, std::uint64_t header, std::uint32_t length,
                                               std::uint64_t wr_id, Copy&& copy) noexcept {
  const std::uint32_t bytes = kDirectMessageHeader + length;
  if (!has_room(qp, bytes)) return Sent::refused;
  if (wr_id != kNoCompletion && !complete(qp, wr_id, length)) return Sent::refused;
  Peer& peer = *qp.peer;
  const std::uint64_t position = peer.out.tail;
  Line& line = peer.out.lines[position % kLaneLines];
  std::byte* const to = place_packet(peer.out, line, position, bytes);
  std::memcpy(to, &header, sizeof header);
  copy(to + kDirectMessageHeader);
  return finish_send(qp, peer, line, position, bytes);
}

/// Sends a message of any length, with or without a completion.
[[gnu::noinline]] Sent send_any(Qp& qp, std::uint64_t header, const std::byte* payload,
                                std::uint32_t length, std::uint64_t wr_id) noexcept {
  return send_copied(qp, header, length, wr_id, [payload, length](std::byte* to) {
    if (length != 0) std::memcpy(to, payload, length);  // may be null then
  });
}

Sent send_parts(ibv_qp* qp, std::uint64_t header, std::span<const ibv_sge> parts,
                std::uint32_t length, std::uint64_t wr_id) noexcept {
  return send_copied(*static_cast<Qp*>(qp), header, length, wr_id, [parts](std::byte* to) {
    gather_bytes(to, parts.data(), static_cast<std::uint32_t>(parts.size()));
  });
}

/// Sends a message whose bytes go beside the line, if there is room now. `short_one`: a payload of
/// up to base::kLongestLine bytes, for which no function is called.
template <bool short_one>
[[gnu::noinline]] Sent send_beside(Qp& qp, std::uint64_t header, const std::byte* payload,
                                   std::uint32_t length) noexcept {
  Peer& peer = *qp.peer;
  const std::uint32_t bytes = kDirectMessageHeader + length;
  if (peer.out.data_next + bytes > peer.out.data_bound) [[unlikely]]
    return send_any(qp, header, payload, length, kNoCompletion);
  std::byte* const to = next_in_data(peer.out);
  std::memcpy(to, &header, sizeof header);
  if constexpr (short_one) {
    base::copy_line(to + kDirectMessageHeader, payload, length);
  } else {
    std::memcpy(to + kDirectMessageHeader, payload, length);
  }
  const std::uint64_t position = peer.out.tail;
  Line& line = peer.out.lines[position % kLaneLines];
  (void)place_in_data(peer.out, line, position, bytes);
  return finish_send(qp, peer, line, position, bytes);
}

Sent send(ibv_qp* base, std::uint64_t header, const std::byte* payload, std::uint32_t length,
          std::uint64_t wr_id) noexcept {
  Qp& qp = *static_cast<Qp*>(base);
  const std::uint32_t bytes = kDirectMessageHeader + length;
  if (!may_send(qp) || !is_below_limit(qp) || wr_id != kNoCompletion)
    return send_any(qp, header, payload, length, wr_id);
  if (bytes > kLinePayload) {
    return length <= base::kLongestLine ? send_beside<true>(qp, header, payload, length)
                                        : send_beside<false>(qp, header, payload, length);
  }
  Peer& peer = *qp.peer;
  const std::uint64_t position = peer.out.tail;
  Line& line = peer.out.lines[position % kLaneLines];
  std::memcpy(line.payload, &header, sizeof header);
  copy_small(line.payload + kDirectMessageHeader, payload, length);
  return finish_send(qp, peer, line, position, bytes);
}

DirectRound& round(ibv_context* base) noexcept { return context_of(base).round; }

void publish(ibv_context* base) noexcept { publish_held(context_of(base)); }

bool write_word(ibv_qp* base, std::uint64_t address, std::uint32_t rkey,
                std::uint64_t word) noexcept {
  return softverbs::write_word(*static_cast<Qp*>(base), address, rkey, word);
}

ibv_send_wr* run(ibv_qp* base, ibv_send_wr* list) noexcept {
  return run_at_once(*static_cast<Qp*>(base), list);
}

std::atomic<std::uint64_t>* word(ibv_qp* base) noexcept {
  return &static_cast<Qp*>(base)->entry->word;
}

void prefetch(ibv_context* base, const ibv_qp* qp) noexcept {
  const Context& c = context_of(base);
  const Qp* const at = static_cast<const Qp*>(qp);
  __builtin_prefetch(static_cast<const MessageState*>(at));
  __builtin_prefetch(&c.segment->queue_pairs[at - c.queue_pairs]);
}

void prefetch_word(const ibv_qp* base) noexcept {
  const Qp& qp = *static_cast<const Qp*>(base);
  if (qp.peer != nullptr) __builtin_prefetch(&remote_entry(qp), 1);
}

void receive_in_place(ibv_qp* base, const void* record, std::uint32_t longest_received,
                      std::uint32_t longest) noexcept {
  Qp& qp = *static_cast<Qp*>(base);
  qp.in_place = true;
  qp.record = record;
  qp.longest_received = longest_received;
  for (QueuePairRights* const table : {qp.rights, &qp.entry->rights})
    table->in_place.store(static_cast<std::uint16_t>(std::min(longest, kLongest)),
                          std::memory_order_relaxed);
}

std::uint32_t longest_in_place(ibv_qp* base) noexcept {
  const Qp& qp = *static_cast<Qp*>(base);
  if (qp.remote_rights == nullptr) return 0;
  return std::min<std::uint32_t>(qp.remote_rights->in_place.load(std::memory_order_relaxed),
                                 kLongest);
}

bool is_between_processes(ibv_qp* base) noexcept {
  const Peer* const peer = static_cast<Qp*>(base)->peer;
  return peer != nullptr && !peer->same_process;
}

DirectReads& reads(ibv_context* base) noexcept { return context_of(base).reads; }

/// Finds refusals, for polls do not watch for acknowledgements of direct messages. A bounded number
/// of peers per call.
void find_refusals(Context& c) noexcept {
  constexpr std::size_t kPeersPerCall = 64;
  for (std::size_t i = std::min(kPeersPerCall, c.peers.size()); i != 0; --i) {
    Peer& peer = *c.peers[c.direct_scan++ % c.peers.size()];
    if (peer.out.message_end > peer.out.head && !peer.gone) apply_peer_acks(peer);
  }
}

std::uint32_t take_lost(ibv_context* base) noexcept {
  Context& c = context_of(base);
  find_refusals(c);
  for (Qp& qp : c.lost) {
    const Cq& cq = *static_cast<const Cq*>(qp.recv_cq);
    // A goodbye may be among what the peer has sent.
    if (cq.head != cq.tail) continue;
    if (qp.peer->in != nullptr && has_packet(*qp.peer->in)) continue;
    c.lost.erase(qp);
    qp.lost = false;
    return qp.qp_num;
  }
  return 0;
}

}  // namespace

const DirectMessages& direct_messages() noexcept {
  static constexpr DirectMessages calls{send,
                                        round,
                                        publish,
                                        write_word,
                                        run,
                                        word,
                                        prefetch,
                                        prefetch_word,
                                        kLongest,
                                        receive_in_place,
                                        longest_in_place,
                                        is_between_processes,
                                        reads,
                                        take_lost,
                                        send_parts};
  return calls;
}

void fail_direct_messages(Qp& qp) noexcept {
  qp.direct_end = 0;
  qp.direct_lost = true;
  qp.open = false;
  if (!std::exchange(qp.lost, true)) context_of(qp.context).lost.push_front(qp);
}

void forget_direct_messages(Qp& qp) noexcept {
  qp.direct_open = qp.direct_lost = false;
  qp.direct_end = 0;
  if (std::exchange(qp.lost, false)) context_of(qp.context).lost.erase(qp);
}

}  // namespace spinwire::softverbs
