// The state of a session, for the application and for observers. Cold.
#pragma once

#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// What the session does and what blocks it, in constant time.
SessionSnapshot snapshot(const Rpc& r, const ClientSession& c) noexcept;

}  // namespace spinwire::rpc
