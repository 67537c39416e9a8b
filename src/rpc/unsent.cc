#include "rpc/unsent.h"

#include <bit>
#include <utility>

#include "rpc/client_session.h"
#include "rpc/server_call.h"
#include "rpc/slots.h"

namespace spinwire::rpc {
namespace {

/// Peers that one poll tries: one that does not poll takes none of its datagrams.
constexpr int kPeersPerPoll = 8;

bool waits(const PeerAddress& peer) noexcept {
  return !peer.unsent_requests.empty() || !peer.unsent_replies.empty();
}

template <typename List, typename Session>
void defer(Rpc& r, List& list, Session& s, std::uint32_t slot) noexcept {
  PeerAddress& peer = *s.peer_address;
  if (!waits(peer)) r.waiting_peers.push_back(peer);
  r.may_have_deferred_work = true;
  peer.destination.holds_back = true;
  if (s.unsent.slots == 0) list.push_back(s);
  s.unsent.slots |= bit(slot);
}

template <typename List, typename Session>
void forget(Rpc& r, List& list, Session& s) noexcept {
  if (std::exchange(s.unsent.slots, 0) == 0) return;
  list.erase(s);
  PeerAddress& peer = *s.peer_address;
  if (waits(peer)) return;
  peer.destination.holds_back = false;
  r.waiting_peers.erase(peer);
}

/// Returns false if there is no room. A slot may have been used again since it was deferred.
bool send_again(Rpc& r, ClientSession& c, std::uint32_t slot) noexcept {
  ClientSlot& k = c.slots[slot];
  if (!is_busy(c, slot) || k.resends != kNotSent || k.outcome) return true;
  if (!send(r, c.peer_address->destination, header_of(c, k), k.payload)) return false;
  k.resends = 0;
  k.sent_at = r.context.clock.now();
  return true;
}
bool send_again(Rpc& r, ServerSession& s, std::uint32_t slot) noexcept {
  ServerSlot& v = s.slots[slot];
  if (v.state != ServerSlotState::unsent) return true;
  if (!try_to_send_reply(r, s, v, kServerTimeUnknown, v.number, v.status, v.size)) return false;
  v.state = ServerSlotState::answered;
  return true;
}

/// Sends one datagram of the session whose turn it is. Returns false if there is no room.
template <typename List>
bool send_next(Rpc& r, List& list) noexcept {
  auto& s = *list.front();
  const std::uint32_t turn = s.unsent.turn;
  const auto ahead = static_cast<std::uint32_t>(
      std::countr_zero(std::rotr(s.unsent.slots, static_cast<int>(turn))));
  const std::uint32_t slot = (turn + ahead) % kWindowMax;
  if (!send_again(r, s, slot)) return false;
  s.unsent.slots &= ~bit(slot);
  s.unsent.turn = (slot + 1) % kWindowMax;
  list.pop_front();
  if (s.unsent.slots != 0) list.push_back(s);
  return true;
}

void send_to(Rpc& r, PeerAddress& peer) noexcept {
  peer.destination.holds_back = false;
  for (bool room = true; room && waits(peer);) {
    if (!peer.unsent_replies.empty()) room = send_next(r, peer.unsent_replies);
    if (room && !peer.unsent_requests.empty()) room = send_next(r, peer.unsent_requests);
  }
  if (!waits(peer)) return;
  peer.destination.holds_back = true;
  r.waiting_peers.push_back(peer);
}

}  // namespace

void defer_request(Rpc& r, ClientSession& c, std::uint32_t slot) noexcept {
  c.slots[slot].resends = kNotSent;
  defer(r, c.peer_address->unsent_requests, c, slot);
}
void defer_reply(Rpc& r, ServerSession& s, std::uint32_t slot) noexcept {
  s.slots[slot].state = ServerSlotState::unsent;
  defer(r, s.peer_address->unsent_replies, s, slot);
}
void forget_unsent(Rpc& r, ClientSession& c) noexcept {
  if (c.peer_address != nullptr) forget(r, c.peer_address->unsent_requests, c);
}
void forget_unsent(Rpc& r, ServerSession& s) noexcept {
  forget(r, s.peer_address->unsent_replies, s);
}

void send_unsent(Rpc& r) noexcept {
  post_datagrams(r);  // direct datagrams do not overtake work requests
  for (int i = 0; i < kPeersPerPoll && has_unsent(r); ++i) send_to(r, r.waiting_peers.pop_front());
}

}  // namespace spinwire::rpc
