// Short datagrams without work requests, see base/direct_datagrams.h. Hot.
#include <algorithm>
#include <cstring>
#include <utility>

#include "softverbs/datagram.h"
#include "softverbs/lane_io.h"
#include "softverbs/queue.h"

namespace spinwire::softverbs {

using base::copy_head;
using base::DirectReceive;
using base::DirectReceives;

static_assert(base::kDirectHeader + base::kDirectPayload == kFirstLineBytes);

namespace {

/// In DirectReceive::source; below it is the number of the sender's queue pair.
constexpr unsigned kSerialShift = 24;

/// The first line of several stays back: as long as it does the peer sees none of them, and does
/// not come for each alone.
inline void hold(Peer& peer, Line& line, std::uint64_t word) noexcept {
  Context& c = *peer.context;
  peer.out.held = &line;
  peer.out.held_word = word;
  if (peer.holds) return;
  peer.holds = true;
  peer.next_held = c.held_first;
  c.held_first = &peer;
}

void publish(ibv_qp* base) noexcept { publish_held(context_of(base->context)); }

[[gnu::cold, gnu::noinline]] bool send_after_looking(ibv_qp* base, const base::DatagramAddress& to,
                                                     std::uint64_t low, std::uint64_t high,
                                                     const std::byte* payload,
                                                     std::uint32_t length) noexcept;

bool send(ibv_qp* base, const base::DatagramAddress& to, std::uint64_t low, std::uint64_t high,
          const std::byte* payload, std::uint32_t length) noexcept {
  const Qp& qp = *static_cast<Qp*>(base);
  const Ah& ah = *static_cast<const Ah*>(to.ah);
  Peer& peer = *ah.peer;
  OutLane& out = peer.out;
  const std::uint64_t position = out.tail;
  if (position >= out.direct_limit || !qp.straight || !ah.plain) [[unlikely]]
    return send_after_looking(base, to, low, high, payload, length);
  Line& line = out.lines[position & (kLaneLines - 1)];
  std::memcpy(line.payload, &low, sizeof low);
  std::memcpy(line.payload + sizeof low, &high, sizeof high);
  copy_head(line.payload + base::kDirectHeader, payload);
  std::memcpy(line.payload + base::kDirectHeader + 16, payload + 16, base::kDirectPayload - 16);
  const InLane& in = *peer.in;
  line.set_trailer(static_cast<std::uint32_t>(base::kDirectHeader) + length, in.head << 48,
                   to.qkey);
  const std::uint64_t no_ack = in.head < in.silent_until ? line_flag::kNoAck << 48 : 0;
  out.tail = position + 1;
  const std::uint64_t word =
      lane_mark(position) << 56 | no_ack | qp.datagram_word | (to.qp_num & 0xffffff);
  // Nobody waits for the peer's answer: it is looked for when room is short.
  if (out.held != nullptr) {
    line.word.store(word, std::memory_order_release);
  } else {
    hold(peer, line, word);
  }
  return true;
}

/// Sets OutLane::direct_limit, if nothing stands in the way.
bool send_after_looking(ibv_qp* base, const base::DatagramAddress& to, std::uint64_t low,
                        std::uint64_t high, const std::byte* payload,
                        std::uint32_t length) noexcept {
  const Qp& qp = *static_cast<Qp*>(base);
  const Ah& ah = *static_cast<const Ah*>(to.ah);
  Peer& peer = *ah.peer;
  OutLane& out = peer.out;
  if (!qp.straight || !ah.plain || peer.gone || peer.in == nullptr || peer.datagrams_waiting != 0 ||
      peer.context->faults != nullptr) {
    return false;
  }
  acknowledge(peer);
  if (out.tail + kConnectedLines >= out.limit) return false;
  out.direct_limit = out.limit - kConnectedLines;
  return send(base, to, low, high, payload, length);
}

void receive_by(ibv_qp* base, DirectReceives& receives) noexcept {
  static_cast<Qp*>(base)->direct = &receives;
}

void write_route(ibv_qp* base, const DirectReceive& receive, std::byte* to) noexcept {
  const InLane* const lane = context_of(base->context).lanes[receive.lane].get();
  ibv_grh grh{};
  if (lane != nullptr && lane->serial == receive.source >> kSerialShift)
    grh = route_header(*lane, receive.length);
  std::memcpy(to, &grh, sizeof grh);
}

/// What a run of datagrams has in common.
inline std::uint64_t source_of(const InLane& lane, std::uint64_t word) noexcept {
  return lane.serial << kSerialShift | word_psn(word);
}

/// False: the completion queue is overrun.
bool complete(const Qp& qp, std::uint32_t count) noexcept {
  ibv_wc* const wc = completion_slot(*static_cast<Cq*>(qp.recv_cq));
  if (wc == nullptr) [[unlikely]]
    return false;
  CompletionHead{IBV_WC_RECV, qp.qp_num, 0}.fill(*wc, qp.direct->wr_id, count);
  return true;
}

}  // namespace

const base::DirectDatagrams& direct_datagrams() noexcept {
  static constexpr base::DirectDatagrams calls{send, publish, receive_by, write_route};
  return calls;
}

void publish_held(Context& c) noexcept {
  while (c.held_first != nullptr) {
    Peer& peer = *std::exchange(c.held_first, c.held_first->next_held);
    peer.holds = false;
    if (peer.out.held == nullptr) continue;
    publish_line(peer);
    wake_if_asleep(peer);
  }
}

std::byte* next_direct(Context& c, const InLane& lane, Qp& qp, std::uint64_t word,
                       std::uint32_t length) noexcept {
  DirectReceives& receives = *qp.direct;
  if (receives.posted_count == 0) [[unlikely]]
    return drop_datagram(c, Drop::no_receive), nullptr;
  if (length > receives.room) [[unlikely]]
    return drop_datagram(c, Drop::too_long), nullptr;
  // What has arrived and has no completion would never be taken away: the list would be full.
  if (!complete(qp, 1)) [[unlikely]]
    return drop_datagram(c, Drop::no_receive), nullptr;
  DirectReceive& receive = *receives.posted[--receives.posted_count];
  receive.source = source_of(lane, word);
  receive.length = length;
  receive.lane = lane.index;
  receives.arrived[receives.arrived_count++] = &receive;
  return receive.to;
}

std::uint32_t take_direct_run(const InLane& lane, Qp& qp, Cq& cq, std::uint64_t word,
                              std::uint32_t limit) noexcept {
  DirectReceives& receives = *qp.direct;
  const std::uint64_t source = source_of(lane, word);
  const std::uint64_t index = std::uint64_t{lane.index} << 32;
  const std::uint32_t key = qp.attr.qkey;
  const std::uint32_t most = std::min(
      {limit, cq.room, receives.posted_count, static_cast<std::uint32_t>(lane.end - lane.next)});
  DirectReceive** from = receives.posted + receives.posted_count;
  DirectReceive** to = receives.arrived + receives.arrived_count;
  const Line* line = lane.next;
  const Line* const end = line + most;
  for (; line != end && line->word.load(std::memory_order_acquire) == word; ++line) {
    const std::uint64_t trailer = line->trailer();
    const std::uint64_t bytes = trailer >> 32 & 0xffff;
    if (static_cast<std::uint32_t>(trailer) != key || bytes > kFirstLineBytes) [[unlikely]]
      break;
    DirectReceive& receive = **--from;
    *to++ = &receive;
    // All of the line: a fixed number is quicker.
    copy_head(receive.to, line->payload);
    std::memcpy(receive.to + 16, line->payload + 16, kFirstLineBytes - 16);
    receive.source = source;
    const std::uint64_t rest = bytes | index;
    static_assert(offsetof(DirectReceive, length) == 24 && offsetof(DirectReceive, lane) == 28);
    std::memcpy(reinterpret_cast<std::byte*>(&receive) + 24, &rest, sizeof rest);
  }
  const auto taken = static_cast<std::uint32_t>(line - lane.next);
  if (taken == 0) return 0;
  receives.posted_count -= taken;
  receives.arrived_count += taken;
  (void)complete(qp, taken);  // there is room for one each
  cq.room -= taken - 1;  // a poll takes no more than by the verbs: what is posted may have to last
  return taken;
}

}  // namespace spinwire::softverbs
