// Datagrams that found no room: a long one waits for its peer's lane, and any waits for the send
// queue. They are tried again at the end of each poll. Cold.
#pragma once

#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// Remembers that a request was not sent. The call is in its slot.
[[gnu::cold, gnu::noinline]] void defer_request(Rpc& r, ClientSession& c,
                                                std::uint32_t slot) noexcept;
/// The same for the reply in a slot.
[[gnu::cold, gnu::noinline]] void defer_reply(Rpc& r, ServerSession& s,
                                              std::uint32_t slot) noexcept;
/// The session ends.
void forget_unsent(Rpc& r, ClientSession& c) noexcept;
void forget_unsent(Rpc& r, ServerSession& s) noexcept;
/// Sends what there is room for now, for a bounded number of sessions.
void send_unsent(Rpc& r) noexcept;

}  // namespace spinwire::rpc
