// Functions on an agent: operations out, completions in, and its stages. Credit is in credit.h,
// acceptance of operations in submit.h.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <string>

#include "agent/credit.h"
#include "agent/engine_context.h"
#include "agent/receive_slots.h"
#include "base/internals.h"
#include "spinwire/connection.h"
#include "spinwire/status.h"
#include "wire/handshake.h"

namespace spinwire::agent {

inline Connection handle(const EngineContext& ctx, const Agent& a) noexcept {
  return detail::make<Connection>(ctx.slot, a.index, a.generation);
}

// Counts of operations.

[[nodiscard]] inline const Tally& tally(const Agent& a, OperationKind kind) noexcept {
  return a.traffic.tallies[static_cast<std::size_t>(kind)];
}
[[nodiscard]] inline std::uint64_t outstanding(const Tally& t) noexcept {
  return t.begun - t.done - t.failed;
}
/// Work requests that have not completed, and rendezvous messages that have not ended.
[[nodiscard]] inline std::uint32_t outstanding(const Agent& a) noexcept {
  return a.send_queue.used + a.rendezvous.send_count;
}
inline void count_begin(Agent& a, OperationKind kind) noexcept {
  ++a.traffic.tallies[static_cast<std::size_t>(kind)].begun;
}
[[nodiscard]] inline std::uint64_t messages_sent(const Agent& a) noexcept {
  return tally(a, OperationKind::send).done + tally(a, OperationKind::send_imm).done +
         tally(a, OperationKind::raw_send).done + tally(a, OperationKind::raw_send_imm).done;
}

// The send queue. Hot.

/// The limit that acceptance checks; see SendQueue::limit.
[[nodiscard]] inline std::uint32_t& send_limit_of(Agent& a) noexcept {
  if (a.raw != nullptr) return a.raw->send_limit;
  OwnDomain* const own = a.domain.get();
  return own != nullptr ? own->send_limit : a.send_queue.limit;
}
[[nodiscard]] inline std::uint32_t send_limit_of(const Agent& a) noexcept {
  return send_limit_of(const_cast<Agent&>(a));
}
/// Work requests that the application may have in the send queue of a ready connection.
[[nodiscard]] inline std::uint32_t max_send_limit(const Agent& a) noexcept {
  if (a.raw != nullptr) return a.attributes.queue_pair.send_depth;
  return a.attributes.queue_pair.send_depth - kControlRequests - kRendezvousRequests -
         kLeaseRequests;
}
/// Whether no operation is outstanding.
inline bool idle(const Agent& a) noexcept { return a.send_queue.used == 0; }
/// Whether a connection that ends waits for no operation. A goodbye may wait to be posted while the
/// queue pair takes it.
inline bool is_drained(const Agent& a) noexcept {
  return a.state != ConnectionState::ready && a.send_queue.posted == nullptr &&
         (a.send_queue.deferred == nullptr || a.stage != Stage::up);
}
/// Builds a message with its header, and a short payload, in the operation's staging room. A longer
/// payload is the second element.
void build_staged(const EngineContext& ctx, const Agent& a, Operation& op, std::uint64_t header,
                  const std::byte* data, std::uint32_t lkey) noexcept;
/// Builds a control message in the operation's staging room.
void build_control(const EngineContext& ctx, const Agent& a, Operation& op,
                   const wire::MessageHeader& header, std::span<const std::byte> body) noexcept;
/// Appends one of the agent's own operations. False: all records are in use.
bool submit_control(EngineContext& ctx, Agent& a, OperationKind kind,
                    std::uint16_t credits = 0) noexcept;
/// Posts the agent's deferred operations with one doorbell. Always ok: operations that the device
/// refuses end with that error.
Status flush(EngineContext& ctx, Agent& a) noexcept;
/// Posts the deferred operations of all agents.
void flush_queued_agents(EngineContext& ctx) noexcept;
/// Ends deferred operations that will not be posted, once the posted ones have ended.
void flush_unposted(EngineContext& ctx, Agent& a) noexcept;
/// Ends every operation as flushed. The queue pair must be gone.
void flush_all_operations(EngineContext& ctx, Agent& a) noexcept;

// Cancellation: cancel.cc.

/// Cancels an operation by its id. False: the agent has no such operation.
bool cancel(EngineContext& ctx, Agent& a, std::uint64_t id) noexcept;
/// Runs the callbacks of cancelled operations.
void run_cancel_callbacks(EngineContext& ctx) noexcept;
/// The device is done with a cancelled operation.
void end_cancelled(EngineContext& ctx, Agent& a, Operation& op, Status status) noexcept;
/// The id of the newest operation of the application that has not ended; empty if there is none.
OperationId last_operation(const EngineContext& ctx, const Agent& a) noexcept;

// Completions. Hot.

/// Handles completions in order. Returns the number of events.
std::uint32_t process_completions(EngineContext& ctx, const ibv_wc* wcs, int count) noexcept;
/// Gives a message to the application.
void deliver(EngineContext& ctx, Agent& a, Message& message) noexcept;
/// The end of a poll: refills and posts receives, flushes operations, advertises credit.
void finish_poll(EngineContext& ctx) noexcept;
/// Not 0 if finish_poll() has anything to do.
inline std::uint64_t listed_work(const EngineContext& ctx) noexcept {
  return std::bit_cast<std::uint64_t>(ctx.work);
}
inline bool has_work(const EngineContext& ctx) noexcept { return listed_work(ctx) != 0; }
/// A receive ended with an error at the device. Cold.
void on_receive_failed(EngineContext& ctx, Agent& a, const ibv_wc& wc) noexcept;
/// An operation ended with an error at the device. Cold.
void on_operation_failed(EngineContext& ctx, Agent& a, OperationKind kind,
                         const ibv_wc& wc) noexcept;

// Stages: lifecycle.cc. Cold.

/// A new agent in `state`, which has to be ready within `timeout`, by default the configured one.
/// Null: connections.maximum or the receives are used up.
Agent* acquire(EngineContext& ctx, ConnectionState state, bool outbound,
               Nanoseconds timeout = {}) noexcept;
/// Gives an agent without a queue pair its attributes.
inline void set_attributes(Agent& a, const config::ConnectionAttributes& attributes) noexcept {
  a.attributes = attributes;
  a.send_queue.inline_bytes = attributes.queue_pair.inline_bytes;
}
/// Prepares the timers of a new agent, or of one that connects again.
void prepare_timers(Agent& a) noexcept;
/// The only writer of Agent::state; sets the deadline of the new state.
void enter(EngineContext& ctx, Agent& a, ConnectionState state) noexcept;
/// The only writer of Agent::stage.
void set_stage(Agent& a, Stage stage) noexcept;
/// What happens outside of an agent and moves it to another stage.
enum class Event : std::uint8_t {
  route_resolved,     ///< rdma_cm knows the device and the route
  endpoint_received,  ///< accept_endpoint() has taken the peer's endpoint
  peer_ready,         ///< the handshake is complete at the peer
  timeout,            ///< Setup::deadline has passed
  aborted,            ///< the engine ends and waits for nothing
};
/// Moves the agent on after an event that came from the engine or the control port.
void advance(EngineContext& ctx, Agent& a, Event event) noexcept;
/// Takes the next step of the agent's set-up or tear-down, with at most one control verb. Returns
/// true if it used one.
bool run_setup_step(EngineContext& ctx, Agent& a) noexcept;
/// The part of run_setup_step() for stages from `domain` to `rts`.
bool bring_up(EngineContext& ctx, Agent& a) noexcept;
/// Queues the agent for run_setup_step() in a control step.
void queue_setup(EngineContext& ctx, Agent& a) noexcept;
/// Ends the connection. `cause` is its cause if it has none yet.
void fail(EngineContext& ctx, Agent& a, Error cause) noexcept;
/// Ends the connection because of a message that no peer of this protocol sends, and counts it.
void fail_bad(EngineContext& ctx, Agent& a, Error cause) noexcept;
/// The application closes.
void close(EngineContext& ctx, Agent& a) noexcept;
/// The peer closes.
void on_goodbye(EngineContext& ctx, Agent& a) noexcept;
/// The last outstanding operation ended while the connection drains.
void on_drained(EngineContext& ctx, Agent& a) noexcept;
void on_timer(EngineContext& ctx, Agent& a, TimerKind kind) noexcept;
/// The handshake is done at both ends.
void become_ready(EngineContext& ctx, Agent& a) noexcept;
/// A message arrived before the handshake's end, which it stands for.
void on_early_message(EngineContext& ctx, Agent& a) noexcept;
/// Tells the application that the connection has ended, and frees the record.
void finish(EngineContext& ctx, Agent& a) noexcept;
/// Installs the handlers that the application set while one of the old may have been running.
inline void replace_handlers(Agent& a) noexcept {
  a.handlers = a.next_handlers;
  a.detour &= static_cast<std::uint8_t>(~kReplaced);
}

/// This end of the handshake.
Endpoint endpoint(const EngineContext& ctx, const Agent& a) noexcept;
/// The peer's end of the handshake. Errors: unsupported, protocol.
Result<void> accept_endpoint(EngineContext& ctx, Agent& a, const Endpoint& peer);

/// The map that the agent's queue pair is in.
inline QpnMap& qpn_map_of(EngineContext& ctx, const Agent& a) noexcept {
  if (a.raw != nullptr) return ctx.raw->by_qpn;
  return a.own_queue != kNone ? ctx.own_queues->by_qpn : ctx.by_qpn;
}
/// The agent of a queue pair; null if the queue pair is gone.
inline Agent* find_by_qpn(EngineContext& ctx, std::uint32_t qp_num) noexcept {
  Agent* a = ctx.by_qpn.find(qp_num);
  if (a == nullptr && ctx.own_queues != nullptr) a = ctx.own_queues->by_qpn.find(qp_num);
  return a == nullptr && ctx.raw != nullptr ? ctx.raw->by_qpn.find(qp_num) : a;
}
/// Where the agent's own keys are registered; null: in the engine's protection domain.
inline memory::RegistrationTable::Group* registrations_of(const Agent& a) noexcept {
  return a.domain != nullptr ? &a.domain->registrations : nullptr;
}

// Liveness: liveness.cc. Cold.

/// Checks the peer at intervals from now on, while the connection is ready.
void start_liveness_checks(EngineContext& ctx, Agent& a) noexcept;
/// connections.peer_timeout, for the peer.
std::uint32_t peer_timeout_ms(const EngineContext& ctx) noexcept;
/// Takes over how long a silence the peer accepts, in ms.
void set_beat_interval(const EngineContext& ctx, Agent& a, std::uint32_t peer_timeout) noexcept;
/// Ends the connection if its peer has been silent for too long.
void check_liveness(EngineContext& ctx, Agent& a) noexcept;
/// The peer is dead, hung or out of reach: ends the connection with Status::peer_lost.
void peer_lost(EngineContext& ctx, Agent& a, std::string asked, std::string found,
               const char* remedy) noexcept;

/// Drops all callbacks, as if the process had died: abort.cc.
void abort(EngineContext& ctx) noexcept;
/// Checks that the agents' counts agree with their lists; see Engine::audit().
Result<void> audit(EngineContext& ctx);

// In bring_up.cc.
/// Errors: limit, naming what is used up.
Error no_more_connections(const EngineContext& s, std::string asked);
/// The peer's name for errors and Connection::peer().
void name_peer(Agent& a, std::string_view text) noexcept;
/// How the control port names an agent.
inline std::uint64_t subject_of(const Agent& a) noexcept {
  return std::uint64_t{a.generation} << 32 | a.index;
}

}  // namespace spinwire::agent
