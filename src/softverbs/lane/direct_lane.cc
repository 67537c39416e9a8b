// The limit of direct senders, and lines whose publication waits for more.
#include "softverbs/lane/direct_lane.h"

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

void hold_line(Peer& peer, Line& line, std::uint64_t word) noexcept {
  peer.out.held = &line;
  peer.out.held_word = word;
  if (!std::exchange(peer.has_held_line, true)) peer.context->held.push_front(peer);
}

}  // namespace spinwire::softverbs
