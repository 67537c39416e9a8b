// A connection's own protection domain. Its queue pair, credit cell, receives, exposed memory and a
// registration of the pools are in a domain of no other connection, so the device refuses its keys
// to others. The connection has its own receives because devices differ in the domain of a shared
// receive queue's memory (Soft-RoCE uses the queue pair's domain). Operations are built with the
// engine's key to the pools, which use_own_key() then replaces. The domain ends after the queue
// pair, one verb per step. If a peer's access delays the end, verbs/domain.cc finishes it.
//
// The hot path has no branch for own domains: SendQueue::limit stays 0, and the slow path accepts
// the operations.
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
  std::uint32_t lkey = 0;        ///< local key of the pools in the domain
  std::uint32_t send_limit = 0;  ///< replaces SendQueue::limit
};

// Set-up steps, each with at most one control verb; see run_setup_step().

/// Makes the domain, and gives the connection its own receive queue.
bool step_domain(EngineContext& ctx, Agent& a) noexcept;
/// Registers the pools in the domain.
bool step_slab(EngineContext& ctx, Agent& a) noexcept;
/// Ends the registrations in the domain, then the domain.
bool step_end_domain(EngineContext& ctx, Agent& a) noexcept;

/// Whether the block is in the pools or registered in the domain.
bool reaches(const EngineContext& ctx, const OwnDomain& own, const detail::Block& block) noexcept;
/// Replaces the engine's key to the pools by the domain's key in a built operation.
void use_own_key(const EngineContext& ctx, const OwnDomain& own, Operation& op) noexcept;

}  // namespace spinwire::agent
