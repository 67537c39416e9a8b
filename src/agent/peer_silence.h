// How long a peer has been silent, as its liveness checks have found. Cold.
#pragma once

#include "agent/agent.h"

namespace spinwire::agent {

/// For how long the peer has given no sign of life, although one was due; 0 for an idle raw peer.
Nanoseconds silent_for(const EngineContext& ctx, const Agent& a) noexcept;

}  // namespace spinwire::agent
