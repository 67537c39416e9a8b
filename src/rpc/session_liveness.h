// Detects dead peers: silence of a server, or of a client.
#pragma once

#include <cstdint>

#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// Handles a silent server: sends a ping, requests a probe, or ends the session. Returns false if
/// it ended.
bool check_server_liveness(Rpc& r, ClientSession& c, std::uint64_t now) noexcept;
/// Ends a session whose server has answered and whose server's process has ended, where the device
/// knows that. Returns whether it did.
bool end_if_server_ended(Rpc& r, ClientSession& c) noexcept;
/// The connection for long calls has ended. Returns whether the reason raises the doubt that the
/// server is lost; then the calls that wait for the connection wait for what is found.
bool doubt_server(Rpc& r, ClientSession& c, const EndReason& why) noexcept;
/// A silent server was probed at an address. Its sessions that were opened there will end with that
/// reason, or end at once if another engine has replaced the server.
void on_server_probed(Rpc& r, const control::ProbedEngine& probed,
                      control::ProbeOutcome outcome) noexcept;
/// Checks a served session whose timer has expired.
void on_server_timer(Rpc& r, ServerSession& s) noexcept;
/// Releases a served session. If its client's path is validated, a tombstone stays, so that the
/// client is told if it is heard again. `why`: see release_server_session().
void release_with_tombstone(Rpc& r, ServerSession& s, Status why) noexcept;
/// Reviews the next tombstone, in each control step. If it is too old or its client has ended,
/// drops the client's address, which keeps memory of the client's process mapped.
void review_tombstone(Rpc& r) noexcept;
/// Handles a datagram of a session that does not exist here.
[[gnu::cold]] void on_unknown_session(Rpc& r, const wire::RpcHeader& header, const ibv_wc& wc,
                                      const std::byte* grh) noexcept;

}  // namespace spinwire::rpc
