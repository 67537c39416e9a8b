// Making connections: a new agent, its handshake, and its end. The engine, which owns the control
// port, calls these functions; agent.h has the stages behind them. Cold.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "agent/agent.h"
#include "spinwire/engine.h"
#include "wire/handshake.h"

namespace spinwire::agent {

struct NewAgent {
  ConnectionState state = ConnectionState::exchanging;
  bool outbound = false;
  std::string_view peer;                      ///< its name for errors and Connection::peer()
  const control::Address* address = nullptr;  ///< of a peer that the application has chosen
  const config::ConnectionAttributes& attributes;
  control::HandshakeId handshake{};              ///< at the control port; may be none
  Nanoseconds timeout{0};                        ///< until it must be ready; 0: the configured one
  const ConnectionHandlers* handlers = nullptr;  ///< null: none yet
  std::unique_ptr<ReconnectState> reconnect{};   ///< null: it does not reconnect
  const PrepareOptions* out_of_band = nullptr;   ///< null: not through the application
  const PrivateData* private_data = nullptr;     ///< for the peer; null: none
};
/// Makes an agent and queues its first set-up step. `asked` is for the error. Errors: limit
/// (connections.maximum or the receives are used up), no_memory.
Result<Agent*> make(EngineContext& ctx, NewAgent what, std::string asked);
/// Whether no further agent can be made.
[[nodiscard]] bool is_full(const EngineContext& ctx) noexcept;
/// The reader of an error. Its remedy names the engine whose configuration to change.
enum class ErrorFor : std::uint8_t {
  caller,  ///< the application of this engine
  peer,    ///< the peer, as a refusal
};
/// The error when no connection can be added: limit, which names the exhausted resource.
Error no_more_connections(const EngineContext& ctx, std::string asked, ErrorFor reader);
/// Gives other settings to an agent without a queue pair. Errors: those of Connection::configure().
Result<void> configure(EngineContext& ctx, Agent& a, const ConnectionSettings& settings);

// Where an agent stands.

/// The control port's name of an agent.
inline std::uint64_t subject_of(const Agent& a) noexcept {
  return std::uint64_t{a.generation} << 32 | a.index;
}
/// The agent's handshake at the control port; may be over, or none.
inline control::HandshakeId handshake_of(const Agent& a) noexcept { return a.setup.handshake; }
/// Whether the connection is, or was, ready.
inline bool was_ready(const Agent& a) noexcept { return a.setup.was_ready; }
inline bool is_through_cm(const Agent& a) noexcept { return a.setup.cm != nullptr; }
/// Whether a peer has asked for the connection, which is the application's, and is not ready yet.
inline bool is_half_open(const Agent& a) noexcept {
  return !a.setup.outbound && !a.setup.out_of_band && a.state == ConnectionState::exchanging &&
         (a.slow_path & kNeedsBlock) == 0;
}
/// Whether the peer has this queue pair.
inline bool is_peers_qp(const Agent& a, std::uint32_t qp_num) noexcept {
  return a.peer.queue_pair.qp_num == qp_num;
}
/// The port and the GID that it uses.
inline const verbs::Place& place_of(const Agent& a) noexcept {
  return a.attributes.queue_pair.place;
}
inline std::uint64_t peer_incarnation(const Agent& a) noexcept { return a.peer.incarnation; }
inline const char* peer_name(const Agent& a) noexcept { return a.peer.name.data(); }
void name_peer(Agent& a, std::string_view text) noexcept;
/// The peer has proved the key of this name.
inline void set_peer_key(Agent& a, control::KeyName key) noexcept { a.peer.key = std::move(key); }
PeerIdentity peer_identity_of(const Agent& a) noexcept;
/// Through rdma_cm, the port alone.
LocalPath local_path_of(const Agent& a) noexcept;
Error closed_by_application();
/// Why the connection ends, for the peer.
Error reason_for_peer(const Agent& a);

// The handshake.

/// The part of the handshake that is due after a set-up step.
enum class HandshakeStep : std::uint8_t {
  none,
  ask,      ///< outbound: send this end's endpoint
  answer,   ///< inbound: send this end's endpoint
  confirm,  ///< outbound: say that this end is up
  end       ///< the connection is ready, or ends
};
HandshakeStep next_handshake_step(const Agent& a) noexcept;
/// Begins to use a handshake of the control port.
inline void use_handshake(Agent& a, control::HandshakeId handshake) noexcept {
  a.setup.handshake = handshake;
}
/// The ask is sent.
void on_asked(EngineContext& ctx, Agent& a) noexcept;
/// Takes the peer's endpoint, or fails the connection. Outbound.
Result<void> receive_endpoint(EngineContext& ctx, Agent& a, const Result<Endpoint>& peer);
/// Takes the endpoint of a peer that asks for a connection, and shows the connection to the
/// application. `options` null: not to the application. On an error the connection has failed.
Result<void> accept_peer(EngineContext& ctx, Agent& a, const Endpoint& peer,
                         const ListenOptions* options);
/// The peer refuses the connection.
void on_refused(EngineContext& ctx, Agent& a, const wire::Refuse& refusal);
/// Rdma_cm reports that the peer disconnected.
void on_cm_disconnected(EngineContext& ctx, Agent& a);

/// An agent that has its peer's endpoint waits for on_address_known() before it uses the address.
inline void await_address(Agent& a) noexcept { a.setup.address_pending = true; }
/// The peer's address is resolved, or cannot be.
void on_address_known(EngineContext& ctx, Agent& a, const Result<void>& outcome) noexcept;

// Out-of-band.

/// Takes the peer's endpoint from the application. Errors: those of Connection::join(). The agent
/// then waits for on_address_known().
Result<void> join(EngineContext& ctx, Agent& a, const Endpoint& peer);
/// This end's endpoint, for the application. Errors: not_connected.
Result<Endpoint> own_endpoint(const EngineContext& ctx, const Agent& a);
/// Delivers the endpoint, or completes the handshake, after a set-up step.
void run_out_of_band_step(EngineContext& ctx, Agent& a) noexcept;

// The set-up queue.

/// Removes the agent that has waited longest at the source whose turn it is; null if there is none.
Agent* pop_setup_queue(EngineContext& ctx) noexcept;
inline bool has_setup_work(const EngineContext& ctx) noexcept {
  return !ctx.sources.setup_turns.empty();
}
/// Whether the next step destroys the queue pair, whose completions the device then forgets.
inline bool destroys_next(const Agent& a) noexcept { return a.stage == Stage::destroy; }
/// Takes the agent's next step, and queues the agent again while steps change anything. Returns
/// whether the step used a control verb.
bool continue_setup(EngineContext& ctx, Agent& a) noexcept;
/// Whether nothing is left but finish().
inline bool is_over(const Agent& a) noexcept {
  return a.stage == Stage::over && is_ending(a) && !a.setup.in_queue;
}

// The end.

/// Ends the connection without another attempt, because the device is lost.
void fail_for_good(EngineContext& ctx, Agent& a, Error cause) noexcept;
/// The engine ends: says this goodbye and flushes the queue pair.
void begin_end(EngineContext& ctx, Agent& a, const Goodbye& goodbye) noexcept;
/// Takes all steps to Stage::over, except those that a peer blocks.
void complete_end(EngineContext& ctx, Agent& a) noexcept;

// Probing a lost peer: engine/loss_probes.h.

/// Whether the end of this agent must wait for a probe that has not started.
bool wants_loss_probe(const EngineContext& ctx, const Agent& a) noexcept;
inline void set_loss_probe(Agent& a, LossProbe probe) noexcept { a.setup.probe = probe; }
inline bool awaits_loss_probe(const Agent& a) noexcept {
  return a.setup.probe == LossProbe::under_way && !a.closing;
}
/// A probe of this peer has ended. Adds what was found to the causes of the connections that
/// dialled its address, which may end now. `found` null: nothing; `remedy` null: keeps the remedy.
void end_loss_probe(EngineContext& ctx, const control::ProbedEngine& probed, const char* found,
                    const char* remedy) noexcept;

}  // namespace spinwire::agent
