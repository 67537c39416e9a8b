// The limit of direct senders, and lines whose publication waits for more.
#include "softverbs/lane/direct_lane.h"

#include <utility>

#include "softverbs/queues.h"
#include "softverbs/ud/ud_datagram.h"

namespace spinwire::softverbs {

bool open_direct_limit(Peer& peer) noexcept {
  OutLane& out = peer.out;
  const InLane* const in = peer.in;
  if (peer.gone || peer.datagrams_waiting != 0 || in == nullptr || in->head < in->no_ack_until ||
      peer.context->faults != nullptr) {
    return false;
  }
  apply_peer_acks(peer);
  if (out.tail + kConnectedLines >= out.limit) return false;
  out.direct_limit = out.limit - kConnectedLines;
  out.ack_on_top = in->head << 48;
  return true;
}

void begin_group(Peer& peer, Line& line, std::uint64_t position, std::uint64_t word) noexcept {
  OutLane& out = peer.out;
  if (!std::exchange(peer.has_held_line, true)) peer.context->held.push_front(peer);
  peer.context->round.has_held_lines = true;
  out.held = &line;
  out.held_word = word;
  out.last = position + out.group - 1;
}

Sent wake_after_send(Peer& peer) noexcept {
  ring_doorbell(peer);
  return Sent::published;
}

Sent hold_line(Peer& peer, Line& line, std::uint64_t position, std::uint64_t word) noexcept {
  begin_group(peer, line, position, word);
  return Sent::held;
}

Sent end_group(Peer& peer) noexcept {
  publish_group(peer);
  return Sent::queued;
}

}  // namespace spinwire::softverbs
