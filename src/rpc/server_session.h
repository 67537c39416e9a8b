// A served session: creation, lookup, release.
#pragma once

#include <cstdint>

#include "base/internals.h"
#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// Makes the server's record of a session, and counts it for the peer's source until it is
/// released. A full server evicts a session that was never used, neither by a datagram nor by a
/// connection that has heard the client: the oldest of the source that has most of them. Null if
/// all rpc.sessions were used. May throw.
ServerSession* accept_session(Rpc& r, const wire::SessionEnd& peer, PeerAddress* peer_address,
                              const control::Address& from);
/// Whether one more session of the peer's source (control/peer_source.h) is within its share; see
/// control/source_share.h. A loopback address has no share. A source at its share may replace a
/// session that it has never used.
bool admit_source(Rpc& r, const control::Address& source) noexcept;
/// Counts a session that was never used for a source that is nearer to the truth. False: that has
/// no share left. May throw.
bool count_for_source(Rpc& r, ServerSession& s, const control::Address& to);
/// Takes a session out of the list of those that were never used, if it is there.
void mark_used(Rpc& r, ServerSession& s) noexcept;
inline ServerSession* find_server(Rpc& r, std::uint32_t name) noexcept {
  ServerSession* const s = r.servers.find(wire::RpcName::index(name));
  return s != nullptr && s->name == name ? s : nullptr;
}
/// The handle of a call's session; empty if the session is gone.
inline ServedSession served_session(Rpc& r, CallRef call) noexcept {
  const ServerSession* const s = find_server(r, call.session);
  if (s == nullptr) return {};
  const std::uint32_t index = wire::RpcName::index(s->name);
  return detail::make<ServedSession>(r.context.slot, s->name, r.servers.generation(index));
}
/// The session of a handle; null if it is gone.
inline ServerSession* find_served(Rpc& r, std::uint32_t name, std::uint32_t generation) noexcept {
  ServerSession* const s = find_server(r, name);
  const bool same = s != nullptr && r.servers.generation(wire::RpcName::index(name)) == generation;
  return same ? s : nullptr;
}
/// The slot of an inline call; null if a later call has the slot.
inline ServerSlot* find_slot(const ServerSession& s, std::uint32_t number) noexcept {
  ServerSlot& v = s.slots[number & (s.window - 1)];
  return v.number == number ? &v : nullptr;
}
/// Releases the record. `why`: the status of replies that are not complete; ok if the client has
/// closed the session in order.
void release_server_session(Rpc& r, ServerSession& s, Status why) noexcept;
void on_ping_or_close(Rpc& r, const wire::RpcHeader& header, const ibv_wc& wc,
                      const std::byte* grh) noexcept;

}  // namespace spinwire::rpc
