// A connection's own protection domain: its queue pair, its receives, the pools and whatever it
// opens to its peer are in a domain that no other connection is in, so that the device refuses the
// keys of either to the other. The hot path knows nothing of it: such a connection never has room
// where acceptance looks for it, and is accepted for by a copy of its own.
#pragma once

#include <cstdint>

#include "memory/registration_table.h"
#include "verbs/opened_device.h"

namespace spinwire::agent {

struct Agent;
struct Operation;
struct EngineContext;

struct OwnDomain {
  verbs::Domain domain;
  memory::RegistrationTable::Group registrations;
  std::uint32_t lkey = 0;        ///< of the pools
  std::uint32_t send_limit = 0;  ///< what SendQueue::limit is for other connections
};

// Steps of its life, with at most one control verb each; they answer as advance().

/// Makes the domain, and gives the connection receives of its own in place of shared ones.
bool step_domain(EngineContext& ctx, Agent& a) noexcept;
/// Registers the pools there.
bool step_slab(EngineContext& ctx, Agent& a) noexcept;
/// Ends what is registered there, then the domain.
bool step_leave(EngineContext& ctx, Agent& a) noexcept;

/// Whether the domain has a key to the block's memory: that of the pools, or registered there.
bool reaches(const EngineContext& ctx, const OwnDomain& own, const detail::Block& block) noexcept;
/// Has a built operation name the pools by the domain's key.
void use_own_key(const EngineContext& ctx, const OwnDomain& own, Operation& op) noexcept;

}  // namespace spinwire::agent
