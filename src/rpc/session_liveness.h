// How a dead peer is noticed: silence of a server, or of a client.
#pragma once

#include <cstdint>

#include "rpc/rpc.h"

namespace spinwire::rpc {

/// Sends a ping to a silent server, asks for its probe, or ends the session: then false.
bool check_server_liveness(Rpc& r, ClientSession& c, std::uint64_t now) noexcept;
/// A silent server was probed: its sessions end with that reason, at once if another engine has
/// replaced it.
void on_server_probed(Rpc& r, std::uint64_t incarnation, control::ProbeOutcome outcome) noexcept;
/// Checks a served session whose timer has expired.
void on_server_timer(Rpc& r, ServerSession& s) noexcept;
/// Releases the session of a silent client, which is told if it is heard again.
void forget_session(Rpc& r, ServerSession& s) noexcept;
/// Looks at the next of the forgotten sessions: one that nobody will ask about holds no address of
/// its client any more, since that keeps memory of the client's process mapped. Each control step.
void review_forgotten_session(Rpc& r) noexcept;
/// A datagram of a session that does not exist here.
[[gnu::cold]] void on_unknown_session(Rpc& r, const wire::RpcHeader& header, const ibv_wc& wc,
                                      const std::byte* grh) noexcept;

}  // namespace spinwire::rpc
