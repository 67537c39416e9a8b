// A served session: made, found, released.
#pragma once

#include <cstdint>

#include "rpc/rpc.h"

namespace spinwire::rpc {

/// Makes the server's record of a session. A full server forgets the oldest one whose client was
/// never heard. Null if the clients of all rpc.sessions were. May throw.
ServerSession* accept_session(Rpc& r, const wire::SessionEnd& peer, PeerAddress* peer_address);
/// Whether one more session of the peer's host is within its share. A host that has its share may
/// replace one that it has never used. Peers on this host have no share: they all look alike.
bool make_room(Rpc& r, const control::Address& peer) noexcept;
/// Counts the session for the host of its peer until it is released. May throw.
void count_source(Rpc& r, ServerSession& s, const control::Address& peer);
inline ServerSession* find_server(Rpc& r, std::uint32_t name) noexcept {
  ServerSession* const s = r.servers.find(wire::RpcName::index(name));
  return s != nullptr && s->name == name ? s : nullptr;
}
void release_server_session(Rpc& r, ServerSession& s) noexcept;
void on_client_control(Rpc& r, const wire::RpcHeader& header, const ibv_wc& wc,
                       const std::byte* grh) noexcept;

}  // namespace spinwire::rpc
