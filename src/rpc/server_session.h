// A served session: made, found, released.
#pragma once

#include <cstdint>

#include "rpc/rpc.h"

namespace spinwire::rpc {

/// Makes the server's record of a session. A full server forgets the oldest one whose client was
/// never heard. Null if the clients of all rpc.sessions were. May throw.
ServerSession* accept_session(Rpc& r, const wire::SessionEnd& peer, PeerAddress* peer_address);
inline ServerSession* find_server(Rpc& r, std::uint32_t name) noexcept {
  ServerSession* const s = r.servers.find(wire::RpcName::index(name));
  return s != nullptr && s->name == name ? s : nullptr;
}
void release_server_session(Rpc& r, ServerSession& s) noexcept;
void on_client_control(Rpc& r, const wire::RpcHeader& header, const ibv_wc& wc,
                       const std::byte* grh) noexcept;

}  // namespace spinwire::rpc
