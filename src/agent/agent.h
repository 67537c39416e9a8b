// Functions on an agent: operations, completions and stages. credit.h has its credit, submit.h
// accepts operations.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

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
inline Connection handle(const EngineContext& ctx, AgentId id) noexcept {
  return detail::make<Connection>(ctx.slot, id.index, id.generation);
}

/// Prefetches what a message touches.
inline void prefetch(const Agent& a) noexcept {
  for (std::size_t line = 0; line < kHotLines; ++line)
    __builtin_prefetch(reinterpret_cast<const std::byte*>(&a) + kHotAt + 64 * line);
}

/// Prefetches the agent of this index. Accepts any number.
inline void prefetch(const EngineContext& ctx, std::uint32_t index) noexcept {
  asm volatile("");  // g++ drops calls of functions without effect; this counts as one
  if (index >= ctx.agents.capacity()) return;
  prefetch(ctx.agents.at(index));
  if (const ibv_qp* const qp = ctx.queue_pairs[index]; qp != nullptr && ctx.direct != nullptr)
    ctx.direct->prefetch(ctx.device->context(), qp);
}

/// Gives an agent that runs no handler other ones.
inline void use_handlers(Agent& a, const ConnectionHandlers& handlers) noexcept {
  a.handlers = handlers;
  a.on_message = handlers.on_message;
}

// Counts of operations.

[[nodiscard]] inline const Tally& tally(const Agent& a, OperationKind kind) noexcept {
  return a.tallies[static_cast<std::size_t>(kind)];
}
[[nodiscard]] inline std::uint64_t outstanding(const Tally& t) noexcept {
  return t.begun - t.done - t.failed;
}
/// Work requests that have not completed, and rendezvous messages that have not ended.
[[nodiscard]] inline std::uint32_t outstanding(const Agent& a) noexcept {
  return a.send_queue.used + a.rendezvous.send_count;
}
inline void count_begin(Agent& a, OperationKind kind) noexcept {
  ++a.tallies[static_cast<std::size_t>(kind)].begun;
}
[[nodiscard]] inline std::uint64_t messages_sent(const Agent& a) noexcept {
  return a.activity.direct_messages + tally(a, OperationKind::send).done +
         tally(a, OperationKind::send_imm).done + tally(a, OperationKind::raw_send).done +
         tally(a, OperationKind::raw_send_imm).done;
}

[[nodiscard]] inline std::uint64_t messages_received(const Agent& a) noexcept {
  return a.activity.messages_received;
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
/// SendQueue::direct_limit of a ready connection.
[[nodiscard]] std::uint16_t max_direct_limit(const EngineContext& ctx, const Agent& a) noexcept;
/// Whether the device reads an offered message without a key, whether or not our own offers are so.
[[nodiscard]] bool reads_local_offers(const EngineContext& ctx) noexcept;
/// Whether long messages in memory of the pools go without a key, and so without a window.
[[nodiscard]] inline bool offers_locally(const EngineContext& ctx, const Agent& a) noexcept {
  return ctx.direct != nullptr && a.domain == nullptr;
}
/// Longest message, with its header, that the agent's peer may send as a direct message; 0 without
/// direct messages.
[[nodiscard]] std::uint32_t longest_in_place(const EngineContext& ctx) noexcept;
/// Whether no operation is outstanding.
inline bool idle(const Agent& a) noexcept { return a.send_queue.used == 0; }
/// Whether a connection that ends has no operation to wait for. While the queue pair is up, a
/// deferred goodbye still counts.
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
/// Sends a control message without a work request, if the device can and nothing waits in front of
/// it. The caller has counted its credit, and publishes it (publish_direct()).
bool send_control_direct(EngineContext& ctx, Agent& a, const wire::MessageHeader& header,
                         std::span<const std::byte> body) noexcept;
/// Appends one of the agent's own operations. False: all records are in use.
bool submit_internal(EngineContext& ctx, Agent& a, OperationKind kind,
                     std::uint16_t credits = 0) noexcept;
/// Posts the agent's deferred operations with one doorbell. Operations that the device refuses end
/// with that error.
void flush(EngineContext& ctx, Agent& a) noexcept;
/// Runs deferred READs and WRITEs at once, where the device can: ran_operations.cc. The rest stays
/// deferred.
void run_deferred(EngineContext& ctx, Agent& a) noexcept;
/// Ends the operations that have run so. Returns their number.
std::uint32_t end_ran_operations(EngineContext& ctx) noexcept;
/// Has the next poll call end_ran_operations().
void await_ran_operations(EngineContext& ctx) noexcept;
/// Drops what the agent has in those lists; it ends.
void forget_ran_operations(EngineContext& ctx, Agent& a) noexcept;
/// Shows the peers what direct sends have written.
inline void publish_direct(EngineContext& ctx) noexcept {
  if (!std::exchange(ctx.direct_unpublished, false)) return;
  ++ctx.stats.doorbells;
  ++ctx.direct_round->number;
  if (ctx.direct_round->has_held_lines) ctx.direct->publish(ctx.device->context());
}
/// Posts the deferred operations of all agents, and publishes direct messages. Those that have run
/// at once end in this poll: end_ran_operations().
void flush_listed_agents(EngineContext& ctx) noexcept;
inline void flush_in_poll(EngineContext& ctx) noexcept {
  if (ctx.flush_queue.count() != 0 || ctx.direct_unpublished) flush_listed_agents(ctx);
}
/// As flush_in_poll(), outside a poll: operations that have run at once end in the next poll.
inline void flush_queued_agents(EngineContext& ctx) noexcept {
  flush_in_poll(ctx);
  await_ran_operations(ctx);
}
/// Posts what the application has deferred, receives first: on one connection, or on all.
inline Status flush_application(EngineContext& ctx, Agent& a) noexcept {
  if (ctx.queued_agents != 0 && a.raw != nullptr) [[unlikely]]
    post_raw_receives_now(ctx, a);
  flush(ctx, a);
  return Status::ok;
}
inline void flush_application(EngineContext& ctx) noexcept {
  if (ctx.queued_agents != 0 && ctx.raw != nullptr) [[unlikely]]
    post_queued_raw_receives(ctx);
  flush_queued_agents(ctx);
}
/// Ends deferred operations that will not be posted, once the posted ones have ended.
void flush_unposted(EngineContext& ctx, Agent& a) noexcept;
/// Ends every operation as flushed. The queue pair must be gone.
void flush_all_operations(EngineContext& ctx, Agent& a) noexcept;

// Cancellation: cancel.cc.

/// Ends an operation by its id; the callback reports `status`. False: the agent has no such
/// operation.
bool cancel(EngineContext& ctx, Agent& a, std::uint64_t id, Status status) noexcept;
/// Runs the callbacks of cancelled operations.
void run_cancel_callbacks(EngineContext& ctx) noexcept;
/// The device has finished a cancelled operation.
void end_cancelled(EngineContext& ctx, Agent& a, Operation& op, Status status) noexcept;
/// The id of the newest operation of the application that has not ended; empty if there is none.
OperationId last_operation(const EngineContext& ctx, const Agent& a) noexcept;

// Completions. Hot.

/// Handles completions in order. Returns the number of events.
std::uint32_t process_completions(EngineContext& ctx, const ibv_wc* wcs, int count) noexcept;
/// As process_completions(), but leaves messages in the device's memory for
/// release_what_was_read().
std::uint32_t process_part(EngineContext& ctx, const ibv_wc* wcs, int count) noexcept;
/// Has messages delivered in blocks, not where they lie in the device's memory.
inline void deliver_in_blocks(Agent& a) noexcept { a.slow_path |= kNeedsBlock; }
/// Returns the lines of the messages of a batch that were read in place to their senders.
inline void release_in_place(EngineContext& ctx) noexcept {
  ctx.in_place_seen = false;
  if (ctx.spare_blocks.count != SpareBlocks::kMost) [[unlikely]]
    fill_spare_blocks(ctx);
  verbs::release_reads(*ctx.direct_reads, ctx.spare_blocks.count);
}
/// As release_in_place(), if a message was read in place.
inline void release_what_was_read(EngineContext& ctx) noexcept {
  if (ctx.in_place_seen) release_in_place(ctx);
}
/// Gives a message to the application.
void deliver(EngineContext& ctx, Agent& a, Message& message) noexcept;
/// Refills and posts receives, flushes operations, advertises credit. Returns the number of
/// operations that ended.
std::uint32_t run_deferred_work(EngineContext& ctx) noexcept;
/// 0 if run_deferred_work() has nothing to do, unless this poll handles completions.
inline std::uint64_t listed_work(const EngineContext& ctx) noexcept {
  return std::bit_cast<std::uint64_t>(ctx.work);
}
/// Whether anything is deferred to the end of a poll.
inline bool has_deferred_work(const EngineContext& ctx) noexcept {
  return listed_work(ctx) != 0 || ctx.queued_agents != 0;
}
/// The end of a poll. Returns the number of operations that ended.
inline std::uint32_t end_poll(EngineContext& ctx) noexcept {
  const bool idle = (listed_work(ctx) | ctx.queued_agents | ctx.receive_shortage) == 0 &&
                    ctx.receives.count() < ctx.list_length;
  const std::uint32_t ended = idle ? 0 : run_deferred_work(ctx);
  publish_direct(ctx);
  return ended;
}
/// Whether callbacks run in the next poll, whatever it finds.
[[nodiscard]] inline bool has_callbacks_due(const EngineContext& ctx) noexcept {
  return !ctx.cancellations.empty() || !ctx.ran_agents.empty();
}
/// Whether something is awaited that no event announces: credit that a peer stores or writes,
/// receives, blocks, and steps that the device or a peer delays.
[[nodiscard]] bool awaits_unannounced(const EngineContext& ctx) noexcept;
/// The engine has slept.
inline void on_awake(EngineContext& ctx) noexcept {
  if (ctx.sleeps_for_credit != 0) --ctx.sleeps_for_credit;
}
/// The part of a control step that looks for missing blocks and lost peers, before set-up steps.
/// Returns the number of operations that ended.
std::uint32_t run_upkeep(EngineContext& ctx) noexcept;
/// A receive ended with an error at the device. Cold.
void on_receive_failed(EngineContext& ctx, Agent& a, const ibv_wc& wc) noexcept;
/// An operation ended with an error at the device. Cold.
void on_operation_failed(EngineContext& ctx, Agent& a, OperationKind kind,
                         const ibv_wc& wc) noexcept;

// Stages: lifecycle.cc. Cold.

/// Gives an agent without a queue pair its attributes.
inline void set_attributes(Agent& a, const config::ConnectionAttributes& attributes) noexcept {
  a.attributes = attributes;
  a.send_queue.inline_bytes = static_cast<std::uint16_t>(attributes.queue_pair.inline_bytes);
}
/// Prepares the timers of a new agent, or of an agent that reconnects.
void prepare_timers(Agent& a) noexcept;
/// The only writer of Agent::state; sets the deadline of the new state.
void enter(EngineContext& ctx, Agent& a, ConnectionState state) noexcept;
/// The only writer of Agent::stage.
void set_stage(Agent& a, Stage stage) noexcept;
/// Events that move an agent to another stage.
enum class Event : std::uint8_t {
  route_resolved,     ///< rdma_cm knows the device and the route
  endpoint_received,  ///< accept_endpoint() has taken the peer's endpoint
  peer_ready,         ///< the handshake is complete at the peer
  timeout,            ///< Setup::deadline has passed
  aborted,            ///< the engine ends without waiting
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
/// Ends the connection. `cause` is the reported cause unless an earlier one exists.
void fail(EngineContext& ctx, Agent& a, Error cause) noexcept;
/// Ends the connection, and counts it, because the peer's message violates the protocol.
void fail_protocol(EngineContext& ctx, Agent& a, Error cause) noexcept;
/// The application closes.
void close(EngineContext& ctx, Agent& a) noexcept;
/// The peer closes; note_goodbye() knows why.
void on_goodbye(EngineContext& ctx, Agent& a) noexcept;
/// The last outstanding operation ended while the connection drains.
void continue_close(EngineContext& ctx, Agent& a) noexcept;
/// Handles a timer of an agent or a lease. Returns an agent whose backoff is over, which the caller
/// connects again.
Agent* on_timer(EngineContext& ctx, const base::Timer& timer) noexcept;
/// The handshake is done at both ends.
void become_ready(EngineContext& ctx, Agent& a) noexcept;
/// A message arrived before the end of the handshake, and completes the handshake.
void on_early_message(EngineContext& ctx, Agent& a) noexcept;
/// Reports the end to the application, and frees the record.
void finish(EngineContext& ctx, Agent& a) noexcept;
[[gnu::cold]] void install_next_handlers(Agent& a) noexcept;
/// Installs the handlers that set_handlers() has left, because an old one may have been running. To
/// be called before each callback.
inline void use_next_handlers(Agent& a) noexcept {
  if ((a.slow_path & kHandlersReplaced) != 0) [[unlikely]]
    install_next_handlers(a);
}

/// This end of the handshake.
Endpoint endpoint(const EngineContext& ctx, const Agent& a) noexcept;
/// The peer's end of the handshake. Errors: unsupported, protocol.
Result<void> accept_endpoint(EngineContext& ctx, Agent& a, const Endpoint& peer);
/// Keeps a copy of private data; null or empty: nothing is kept. Errors: no_memory.
Result<void> keep_private_data(std::unique_ptr<PrivateData>& kept,
                               const PrivateData* data) noexcept;

/// The agent of a queue pair; null if the queue pair is gone.
inline Agent* find_by_qpn(const EngineContext& ctx, std::uint32_t qp_num) noexcept {
  return ctx.by_qpn.find(qp_num);
}
/// The registrations of the agent's own domain; null: the keys are in the engine's domain.
inline memory::RegistrationTable::Group* registrations_of(const Agent& a) noexcept {
  return a.domain != nullptr ? &a.domain->registrations : nullptr;
}

// Liveness: liveness.cc. Cold.

/// Checks the peer at intervals from now on, while the connection is ready.
void start_liveness_checks(EngineContext& ctx, Agent& a) noexcept;
/// connections.peer_timeout in ms, for the peer.
std::uint32_t peer_timeout_ms(const EngineContext& ctx) noexcept;
/// Sets the interval of keepalives from the peer's longest accepted silence, in ms.
void set_keepalive_interval(const EngineContext& ctx, Agent& a,
                            std::uint32_t peer_timeout) noexcept;
/// Ends the connection if its peer has been silent for too long.
void check_liveness(EngineContext& ctx, Agent& a) noexcept;
/// Ends the connections whose peers ended without having taken a direct message.
void end_lost_connections(EngineContext& ctx) noexcept;
/// The peer is dead, hung or out of reach: ends the connection with Status::peer_lost.
void peer_lost(EngineContext& ctx, Agent& a, std::string asked, std::string found,
               const char* remedy) noexcept;

// Where an agent stands.

inline AgentId id_of(const Agent& a) noexcept { return {a.index, a.generation}; }
/// Null: the agent is gone.
inline Agent* find(EngineContext& ctx, AgentId id) noexcept {
  return id ? ctx.find(id.index, id.generation) : nullptr;
}
/// Whether the agent handled a message or a completion in the poll of a tick.
inline bool was_active_at(const Agent& a, std::uint64_t tick) noexcept {
  return a.activity.last_heard == tick || a.liveness.last_completion == tick;
}
inline bool is_ready(const Agent& a) noexcept { return a.state == ConnectionState::ready; }
/// Whether the connection is being taken down.
inline bool is_ending(const Agent& a) noexcept { return a.state == ConnectionState::draining; }
/// Whether messages of the peer are delivered.
inline bool takes_messages(const Agent& a) noexcept {
  return a.state == ConnectionState::ready || (a.goodbyes.awaits_peer && a.stage == Stage::up);
}
/// Longest eager message, and longest message, bytes. From the handshake on.
inline std::uint32_t max_eager(const Agent& a) noexcept { return a.send_queue.max_eager; }
inline std::uint32_t max_message(const Agent& a) noexcept { return a.max_message; }
/// Whether replies to the peer's calls wait. One that gets no credit for them for
/// connections.peer_timeout is lost.
inline void set_owes_replies(Agent& a, bool owes) noexcept { a.liveness.owes_replies = owes; }
/// The connection is a client's, and all that it sends are replies to calls.
inline void set_serves_calls(Agent& a) noexcept { a.liveness.serves_calls = true; }
/// Gives the connection to remote calls: these handlers, and messages that come in blocks.
inline void give_to_calls(Agent& a, const ConnectionHandlers& handlers) noexcept {
  use_handlers(a, handlers);
  deliver_in_blocks(a);
}
/// Replaces the handlers of a connection that has none running.
inline void replace_handlers(Agent& a, const ConnectionHandlers& handlers) noexcept {
  use_handlers(a, handlers);
}

// For the public API: statistics.cc and peer_access.cc.

ConnectionStats stats(const Agent& a) noexcept;
ConnectionSnapshot snapshot(const EngineContext& ctx, const Agent& a) noexcept;
/// All counters but those of the control port.
EngineStats stats(const EngineContext& ctx) noexcept;
/// What stats() answers without the sums over living agents, in constant time.
EngineStats stats_without_agents(const EngineContext& ctx) noexcept;
inline ConnectionState state_of(const Agent& a) noexcept { return a.state; }
inline bool has_queue_pair(const Agent& a) noexcept { return a.qp != nullptr; }
/// The state that the device reports of the agent's queue pair. Errors: system.
Result<QueuePairState> query_state(const EngineContext& ctx, const Agent& a);
/// Longest message that may be sent now, bytes; 0 unless the connection is ready.
inline std::size_t max_message_now(const Agent& a) noexcept {
  return a.state == ConnectionState::ready ? a.max_message : 0;
}
/// Replaces the handlers: at once, or before the next callback if one may be running.
void set_handlers(Agent& a, const ConnectionHandlers& handlers, bool polling) noexcept;
/// Opens memory to the peers of the agent's domain. Errors: those of Connection::expose().
Result<RemoteRegion> expose(EngineContext& ctx, Agent& a, const BufferSlice& slice, Access access,
                            MemoryFlags flags);
/// Opens memory to the agent's peer alone. Errors: those of Connection::expose().
Result<RemoteRegion> expose_to_peer(EngineContext& ctx, Agent& a, const BufferSlice& slice,
                                    Access access);
/// Registers memory in the agent's domain. Errors: those of Connection::register_memory().
Result<memory::RegisteredMemory> register_memory(EngineContext& ctx, Agent& a,
                                                 std::span<std::byte> bytes, Access access,
                                                 MemoryFlags flags);
/// Whether a key of this engine that the agent's peer can have opens these bytes.
bool is_exposed(const EngineContext& ctx, const Agent& a, const RemoteRegion& region) noexcept;
/// The agent's queue pair if the key works for no other; else 0.
std::uint32_t qp_bound_to(const Agent& a, std::uint32_t rkey) noexcept;
/// Errors: invalid_argument (memory of another engine).
Result<void> check_owner(const EngineContext& ctx, const BufferSlice& slice);

/// Drops all callbacks, as if the process had died. In abort.cc.
void abort(EngineContext& ctx) noexcept;
/// Checks that the agents' counts agree with their lists; see Engine::audit().
Result<void> audit(EngineContext& ctx);

}  // namespace spinwire::agent
