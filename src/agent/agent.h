// One connection: operations in, completions out, credit, stages. The hot part is in operations.cc
// and message_receive.cc, the cold in lifecycle.cc, bring_up.cc, liveness.cc and
// completion_errors.cc.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <string>

#include "agent/engine_context.h"
#include "base/internals.h"
#include "spinwire/connection.h"
#include "spinwire/status.h"
#include "wire/handshake.h"

namespace spinwire::agent {

// Hot: operations; their acceptance is in submit.h.

/// Lays a message's header, and its payload if that is short, into the operation's staging room;
/// else the payload is the second element.
void build_staged(const EngineContext& ctx, const Agent& a, Operation& op, std::uint64_t header,
                  const std::byte* data, std::uint32_t lkey) noexcept;
/// Posts the agent's deferred operations with one doorbell. Always ok: what the device refuses
/// ends with that error.
Status flush(EngineContext& ctx, Agent& a) noexcept;
/// Whether no operation is outstanding.
inline bool idle(const Agent& a) noexcept { return a.send_queue.used == 0; }
/// Whether a connection that is to end has nothing left to wait for. A goodbye may wait to be
/// posted, as long as the queue pair takes it.
inline bool is_drained(const Agent& a) noexcept {
  return a.state != ConnectionState::ready && a.send_queue.posted == nullptr &&
         (a.send_queue.deferred == nullptr || a.stage != Stage::up);
}
/// Ends deferred operations that will not be posted any more, behind those that the device has.
void flush_unposted(EngineContext& ctx, Agent& a) noexcept;
/// Ends every operation, as flushed; the device has forgotten them.
void flush_all_operations(EngineContext& ctx, Agent& a) noexcept;

/// Gives up an operation by its name: a work-request id, or a long message's. False if the agent
/// has none such.
bool cancel(EngineContext& ctx, Agent& a, std::uint64_t name) noexcept;
/// Runs the callbacks of those given up so far.
void run_cancel_callbacks(EngineContext& ctx) noexcept;
/// A cancelled operation that the device had has ended there.
void end_cancelled(EngineContext& ctx, Agent& a, Operation& op, Status status) noexcept;
/// The name of the application's operation accepted last of those that have not ended; that of none
/// if there is none.
OperationId last_operation(const EngineContext& ctx, const Agent& a) noexcept;

/// Posts everything deferred, agent by agent.
void flush_queued_agents(EngineContext& ctx) noexcept;

// Hot: arrivals.

/// Handles completions in order; answers the number of events.
std::uint32_t process_completions(EngineContext& ctx, const ibv_wc* wcs, int count) noexcept;
/// A message that arrives while the connection is draining.
void on_message_while_draining(EngineContext& ctx, Agent& a, const Block* block,
                               const ibv_wc& wc) noexcept;
/// Gives a message to the application.
void deliver(EngineContext& ctx, Agent& a, Message& message) noexcept;
/// A receive that ended with an error at the device. Cold.
void on_receive_failed(EngineContext& ctx, Agent& a, const ibv_wc& wc) noexcept;
/// Where the slot's next message goes: its header into the block's headroom. `lkey` opens the block
/// to the queue pair.
inline void aim_receive(EngineContext& ctx, std::uint32_t slot, const Block& block,
                        std::uint32_t lkey) noexcept {
  const std::uint32_t bytes =
      ctx.config.connections.eager_bytes + std::uint32_t{wire::kMessageHeaderBytes};
  ctx.receives.aim(slot, block.payload - wire::kMessageHeaderBytes, bytes, lkey);
}
/// The end of a poll: fill up and repost receives, flush what was deferred, tell credit.
void finish_poll(EngineContext& ctx) noexcept;
/// Whether finish_poll() has anything to do.
inline bool has_work(const EngineContext& ctx) noexcept {
  return std::bit_cast<std::uint64_t>(ctx.work) != 0;
}
/// Makes the receives, and fills the shared queue of them if there is one. Errors: no_memory when
/// the receive pool is short.
Result<void> post_first_receives(EngineContext& ctx);

// Credit.

/// Takes the credit that messages told of. False: all that is known of is used.
inline bool learn_credit(Agent& a) noexcept {
  const auto news = static_cast<std::uint16_t>(a.credit.header_granted -
                                               static_cast<std::uint16_t>(a.credit.granted_to_us));
  if (news < 0x8000) {  // else it is older than what the cell told
    a.credit.granted_to_us += news;
    a.credit.send_limit = a.credit.granted_to_us - a.credit.returned_by_us;
  }
  return a.credit.sent != a.credit.send_limit;
}
[[nodiscard]] inline std::uint32_t send_credits(const Agent& a) noexcept {
  return a.credit.send_limit - a.credit.sent;
}
[[nodiscard]] inline const Tally& tally(const Agent& a, OperationKind kind) noexcept {
  return a.traffic.tallies[static_cast<std::size_t>(kind)];
}
[[nodiscard]] inline std::uint64_t outstanding(const Tally& t) noexcept {
  return t.begun - t.done - t.failed;
}
inline void count_begin(Agent& a, OperationKind kind) noexcept {
  ++a.traffic.tallies[static_cast<std::size_t>(kind)].begun;
}
[[nodiscard]] inline std::uint64_t messages_sent(const Agent& a) noexcept {
  return tally(a, OperationKind::send).done + tally(a, OperationKind::send_imm).done +
         tally(a, OperationKind::raw_send).done + tally(a, OperationKind::raw_send_imm).done;
}
[[nodiscard]] inline std::uint32_t peer_credits(const Agent& a) noexcept {
  return a.credit.granted - a.credit.returned - a.credit.received;
}
/// What has not ended: work requests accepted, and long messages that were offered.
[[nodiscard]] inline std::uint32_t outstanding(const Agent& a) noexcept {
  return a.send_queue.used + a.rendezvous.send_count;
}
/// The same with what the peer has told of and nobody has looked at yet.
std::uint32_t credits_in_sight(const Agent& a) noexcept;
/// Looks for credit where the peer tells of it; false if there is none.
bool find_credit(EngineContext& ctx, Agent& a) noexcept;
/// Takes what the peer wrote into the credit cell. False: nonsense was in it, and the connection
/// ends.
bool read_credit_cell(EngineContext& ctx, Agent& a) noexcept;
/// What the agent's allotment is counted in.
inline std::uint32_t& reserved_total(EngineContext& ctx, const Agent& a) noexcept {
  return a.own_queue != kNone ? ctx.own_queues->reserved_receives : ctx.reserved_receives;
}
/// Keeps up to `wanted` receives for the peer, as many as the budget has.
void reserve_more_receives(EngineContext& ctx, Agent& a, std::uint32_t wanted) noexcept;
/// Receives that each connection gets when there are too few for all.
std::uint32_t fair_share(const EngineContext& ctx) noexcept;
/// Takes the receive of a message just arrived from an agent that has more than its share.
void yield_credit(EngineContext& ctx, Agent& a) noexcept;
void queue_credit(EngineContext& ctx, Agent& a) noexcept;
/// Lets the peer have credit up to its allotment.
void grant_more(EngineContext& ctx, Agent& a) noexcept;
/// The room that acceptance goes by: see SendQueue::limit.
[[nodiscard]] inline std::uint32_t& send_limit_of(Agent& a) noexcept {
  if (a.raw != nullptr) return a.raw->send_limit;
  OwnDomain* const own = a.domain.get();
  return own != nullptr ? own->send_limit : a.send_queue.limit;
}
[[nodiscard]] inline std::uint32_t send_limit_of(const Agent& a) noexcept {
  if (a.raw != nullptr) return a.raw->send_limit;
  const OwnDomain* const own = a.domain.get();
  return own != nullptr ? own->send_limit : a.send_queue.limit;
}
/// Work requests that the application may have in the send queue.
[[nodiscard]] inline std::uint32_t max_send_limit(const Agent& a) noexcept {
  if (a.raw != nullptr) return a.attributes.queue_pair.send_depth;
  return a.attributes.queue_pair.send_depth - kControlRequests - kRendezvousRequests -
         kLeaseRequests;
}

// Cold: life cycle.

/// A fresh agent in `state`, which has to be ready within `patience`, by default the configured
/// time; null when the limit is reached.
Agent* acquire(EngineContext& ctx, ConnectionState state, bool outbound,
               Nanoseconds patience = {}) noexcept;
/// Gives an agent without a queue pair its attributes.
inline void set_attributes(Agent& a, const config::ConnectionAttributes& attributes) noexcept {
  a.attributes = attributes;
  a.send_queue.inline_bytes = attributes.queue_pair.inline_bytes;
}
/// The agents whose receives are in the same queue, or in one of their own, as this one's.
inline QpnMap& qpn_map_of(EngineContext& ctx, const Agent& a) noexcept {
  if (a.raw != nullptr) return ctx.raw->by_qpn;
  return a.own_queue != kNone ? ctx.own_queues->by_qpn : ctx.by_qpn;
}
/// The agent of a queue pair; null if it is no more.
inline Agent* find_by_qpn(EngineContext& ctx, std::uint32_t qp_num) noexcept {
  Agent* a = ctx.by_qpn.find(qp_num);
  if (a == nullptr && ctx.own_queues != nullptr) a = ctx.own_queues->by_qpn.find(qp_num);
  return a == nullptr && ctx.raw != nullptr ? ctx.raw->by_qpn.find(qp_num) : a;
}
/// Where keys that are the agent's own are registered; null: in the engine's protection domain.
inline memory::RegistrationTable::Group* registrations_of(const Agent& a) noexcept {
  return a.domain != nullptr ? &a.domain->registrations : nullptr;
}
/// Parts of acquire(), for an agent that begins anew.
void prepare_timers(Agent& a) noexcept;
/// Keeps a receive for the peer to begin with; false if none is left.
[[nodiscard]] bool reserve_first_receive(EngineContext& ctx, Agent& a) noexcept;
/// The only writer of Agent::state; stamps the deadline of the new one.
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
/// Takes the next step of the agent's set-up or tear-down, with at most one control verb.
/// Returns true if it used one.
bool run_setup_step(EngineContext& ctx, Agent& a) noexcept;
/// The part of run_setup_step() for stages from `domain` to `rts`.
bool bring_up(EngineContext& ctx, Agent& a) noexcept;
/// Puts the agent in line for a control verb.
void queue_setup(EngineContext& ctx, Agent& a) noexcept;
/// The connection ends, with this as its cause if it has none yet.
void fail(EngineContext& ctx, Agent& a, Error cause) noexcept;
/// The same for what no peer says, which is counted.
void fail_bad(EngineContext& ctx, Agent& a, Error cause) noexcept;
/// The application closes.
void close(EngineContext& ctx, Agent& a) noexcept;
/// An operation ended with an error at the device.
void on_operation_failed(EngineContext& ctx, Agent& a, OperationKind kind,
                         const ibv_wc& wc) noexcept;
/// The peer says goodbye.
void on_goodbye(EngineContext& ctx, Agent& a) noexcept;
/// The last outstanding operation ended while draining.
void on_drained(EngineContext& ctx, Agent& a) noexcept;
void on_timer(EngineContext& ctx, Agent& a, TimerKind kind) noexcept;

// Liveness.

/// Checks the peer at intervals from now on, while the connection is ready.
void start_liveness_checks(EngineContext& ctx, Agent& a) noexcept;
/// Ends the connection if its peer has been silent for too long.
void check_liveness(EngineContext& ctx, Agent& a) noexcept;
/// The peer is dead, hung or out of reach: ends the connection with Status::peer_lost.
void peer_lost(EngineContext& ctx, Agent& a, std::string asked, std::string found,
               const char* remedy) noexcept;

/// Ready for traffic: the handshake is done at both ends.
void become_ready(EngineContext& ctx, Agent& a) noexcept;
/// A message has come while the connection is being made: it vouches for the peer.
void on_early_message(EngineContext& ctx, Agent& a) noexcept;
/// Our side of the handshake.
Endpoint endpoint(const EngineContext& ctx, const Agent& a) noexcept;
/// The peer's side; false and an error if it cannot be connected to.
Result<void> accept_endpoint(EngineContext& ctx, Agent& a, const Endpoint& peer);
/// Appends one of the agent's own operations; false if the pool is out of records.
bool submit_control(EngineContext& ctx, Agent& a, OperationKind kind,
                    std::uint16_t credits = 0) noexcept;
/// Lays a control message into the operation's staging room.
void build_control(const EngineContext& ctx, const Agent& a, Operation& op,
                   const wire::MessageHeader& header, std::span<const std::byte> body) noexcept;
/// Puts the handlers in place that the application set while one of the old may have been running.
inline void replace_handlers(Agent& a) noexcept {
  a.handlers = a.next_handlers;
  a.detour &= static_cast<std::uint8_t>(~kReplaced);
}
/// Tells the application and gives the record back.
void finish(EngineContext& ctx, Agent& a) noexcept;

/// Drops every callback of the application, as if its process had died. Cold.
void abort(EngineContext& ctx) noexcept;
/// Checks that what the agents count is what there is, from outside of a poll; see Engine::audit().
Result<void> audit(EngineContext& ctx);

inline Connection handle(const EngineContext& ctx, const Agent& a) noexcept {
  return detail::make<Connection>(ctx.slot, a.index, a.generation);
}

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
