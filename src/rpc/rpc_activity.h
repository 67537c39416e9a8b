// Which sessions ran callbacks in a poll, for the stall detector. Cold.
#pragma once

#include <cstdint>
#include <optional>

#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// Whether a call, or a reply, came in the poll of a tick.
template <typename Session>
bool was_heard_at(const Session& session, std::uint64_t tick) noexcept {
  return session.last_heard == tick;
}
/// The method of the handler that ran last, if it was one of the session's inline calls.
inline std::optional<Method> method_of_last_handler(const Rpc& r, const ServerSession& s) noexcept {
  if (r.current_call.session != &s) return std::nullopt;
  return r.current_call.method;
}

}  // namespace spinwire::rpc
