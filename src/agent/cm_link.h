// A connection's part for rdma_cm, whose private data carries the handshake. Cold.
#pragma once

#include <cstdint>
#include <memory>

#include "control/cm_authentication.h"
#include "control/rdma_cm.h"
#include "spinwire/endpoint.h"
#include "spinwire/status.h"

namespace spinwire::agent {

struct Agent;
struct EngineContext;
enum class HandshakeStep : std::uint8_t;

/// State of a connection that rdma_cm brings up.
struct CmLink {
  control::CmId id;
  bool resolved = false;                        ///< device and route are known
  bool handshake_sent = false;                  ///< the first request or the answer is sent
  bool needs_id = false;                        ///< the next request is due, by a new identifier
  std::unique_ptr<control::CmClient> client{};  ///< outbound
  /// Inbound, until the answer; null: the client has said all in one request, without a key.
  std::unique_ptr<control::CmServer> server{};
};

/// Checks that the addresses belong to the open device. Errors: no_device.
Result<void> check_cm_device(const EngineContext& ctx, const control::CmId& id);
/// The peer's endpoint, from a request or an answer. Errors: protocol, system.
Result<Endpoint> read_cm_endpoint(const EngineContext& ctx, const control::CmId& id,
                                  const control::CmEvent& event);
/// Brings the agent up through this link's identifier.
void use_cm(Agent& a, std::unique_ptr<CmLink> link) noexcept;
/// Whether the identifier is the agent's.
bool uses_cm(const Agent& a, const rdma_cm_id* id) noexcept;
/// With a key or private data a connection asks several times, each time by a new identifier.
bool needs_cm_id(const Agent& a) noexcept;
/// Begins to resolve the peer's address for the next request. `id`: new, without an address.
/// Errors: those of CmId::resolve_address().
Result<void> renew_cm_id(Agent& a, control::CmId id);
/// Takes a step of the handshake through rdma_cm.
void run_cm_step(EngineContext& ctx, Agent& a, HandshakeStep step) noexcept;
/// Handles an event of the agent's identifier.
void on_cm_event(EngineContext& ctx, Agent& a, const control::CmEvent& event);
/// Disconnects through rdma_cm, or rejects a peer that waits for an answer.
void end_cm(Agent& a) noexcept;

}  // namespace spinwire::agent
