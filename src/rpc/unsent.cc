#include "rpc/unsent.h"

#include <bit>

#include "rpc/client_session.h"
#include "rpc/server_call.h"
#include "rpc/slots.h"

namespace spinwire::rpc {
namespace {

/// Sessions that one poll tries: a peer that does not poll takes none of its datagrams.
constexpr int kTries = 8;

template <typename Queue, typename Session>
void defer(Queue& queue, Session& s, std::uint32_t slot) noexcept {
  if (s.unsent.slots == 0) queue.push_back(s);
  s.unsent.slots |= bit(slot);
}

template <typename Queue, typename Session>
void forget(Queue& queue, Session& s) noexcept {
  if (s.unsent.slots != 0) queue.erase(s);
  s.unsent.slots = 0;
}

/// Returns false if there is no room.
bool send_again(Rpc& r, ClientSession& c, std::uint32_t slot) noexcept {
  const ClientSlot& k = c.slots[slot];
  const bool over = (c.free_slots & bit(slot)) != 0 || k.outcome;
  return over || send(r, c.peer_address->destination, header_of(c, k), k.payload);
}
bool send_again(Rpc& r, ServerSession& s, std::uint32_t slot) noexcept {
  const ServerSlot& v = s.slots[slot];
  if (v.state != ServerSlotState::answered) return true;
  return try_to_send_reply(r, s, v, kServerTimeUnknown, v.number, v.status, v.size);
}

/// A session that still finds no room goes behind the others: their peers may have some.
template <typename Queue>
void send_for_some(Rpc& r, Queue& queue) noexcept {
  for (int i = 0; i < kTries && !queue.empty(); ++i) {
    auto& s = queue.pop_front();
    while (s.unsent.slots != 0) {
      const auto slot = static_cast<std::uint32_t>(std::countr_zero(s.unsent.slots));
      if (!send_again(r, s, slot)) break;
      s.unsent.slots &= ~bit(slot);
    }
    if (s.unsent.slots != 0) queue.push_back(s);
  }
}

}  // namespace

void defer_request(Rpc& r, ClientSession& c, std::uint32_t slot) noexcept {
  defer(r.unsent_requests, c, slot);
}
void defer_reply(Rpc& r, ServerSession& s, std::uint32_t slot) noexcept {
  defer(r.unsent_replies, s, slot);
}
void forget_unsent(Rpc& r, ClientSession& c) noexcept { forget(r.unsent_requests, c); }
void forget_unsent(Rpc& r, ServerSession& s) noexcept { forget(r.unsent_replies, s); }

void send_unsent(Rpc& r) noexcept {
  send_for_some(r, r.unsent_requests);
  send_for_some(r, r.unsent_replies);
}

}  // namespace spinwire::rpc
