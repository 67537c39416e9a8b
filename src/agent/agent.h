// What happens to a connection: operations in, completions out, credit, life cycle. The hot part
// is in operations.cc and arrivals.cc, the cold in lifecycle.cc and bring_up.cc.
#pragma once

#include <bit>
#include <cstdint>
#include <span>

#include "agent/shared.h"
#include "spinwire/connection.h"
#include "spinwire/status.h"
#include "wire/handshake.h"

namespace spinwire::agent {

// Hot: operations; their acceptance is in submit.h.

/// Lays a message's header, and its payload if that is short, into the operation's staging room;
/// else the payload is the second element.
void build_apart(const Shared& s, const Agent& a, Operation& op, std::uint64_t header,
                 const std::byte* data, std::uint32_t lkey) noexcept;
/// Posts the agent's deferred operations with one doorbell. Always ok: what the device refuses
/// ends with that error.
Status flush(Shared& s, Agent& a) noexcept;
/// Whether no operation is outstanding.
inline bool idle(const Agent& a) noexcept { return a.sq_used == 0; }
/// Whether a connection that is to end has nothing left to wait for. A goodbye may wait to be
/// posted, as long as the queue pair takes it.
inline bool is_drained(const Agent& a) noexcept {
  return a.state != ConnectionState::ready && a.posted == nullptr &&
         (a.deferred == nullptr || a.stage != Stage::up);
}
/// Ends deferred operations that will not be posted any more, behind those that the device has.
void flush_unposted(Shared& s, Agent& a) noexcept;
/// Ends every operation, as flushed; the device has forgotten them.
void flush_everything(Shared& s, Agent& a) noexcept;

/// Gives up an operation by its name: a work-request id, or a long message's. False if the agent
/// has none such.
bool cancel(Shared& s, Agent& a, std::uint64_t name) noexcept;
/// Runs the callbacks of those given up so far.
void tell_cancelled(Shared& s) noexcept;
/// A cancelled operation that the device had has ended there.
void end_cancelled(Shared& s, Agent& a, Operation& op, Status status) noexcept;
/// The name of the application's operation accepted last of those that have not ended; that of none
/// if there is none.
OperationId last_operation(const Shared& s, const Agent& a) noexcept;

/// Posts everything deferred, agent by agent.
void flush_all(Shared& s) noexcept;

// Hot: arrivals.

/// Handles completions in order; answers the number of events.
std::uint32_t take_completions(Shared& s, const ibv_wc* wcs, int count) noexcept;
/// A message that arrives while the connection is draining.
void take_while_draining(Shared& s, Agent& a, const Block* block, const ibv_wc& wc) noexcept;
/// Gives a message to the application.
void deliver(Shared& s, Agent& a, Message& message) noexcept;
/// A receive that ended with an error at the device. Cold.
void on_receive_failed(Shared& s, Agent& a, const ibv_wc& wc) noexcept;
/// Where the slot's next message goes: its header into the block's headroom. `lkey` opens the block
/// to the queue pair.
inline void aim_receive(Shared& s, std::uint32_t slot, const Block& block,
                        std::uint32_t lkey) noexcept {
  const std::uint32_t bytes =
      s.config.connections.eager_bytes + std::uint32_t{wire::kMessageHeaderBytes};
  s.receives.aim(slot, block.payload - wire::kMessageHeaderBytes, bytes, lkey);
}
/// The end of a poll: fill up and repost receives, flush what was deferred, tell credit.
void finish_poll(Shared& s) noexcept;
/// Whether finish_poll() has anything to do.
inline bool has_work(const Shared& s) noexcept { return std::bit_cast<std::uint64_t>(s.work) != 0; }
/// Makes the receives, and fills the shared queue of them if there is one. Errors: no_memory when
/// the receive pool is short.
Result<void> post_first_receives(Shared& s);

// Credit.

/// Takes the credit that messages told of. False: all that is known of is used.
inline bool learn_credit(Agent& a) noexcept {
  const auto news =
      static_cast<std::uint16_t>(a.told_granted - static_cast<std::uint16_t>(a.granted_to_us));
  if (news < 0x8000) {  // else it is older than what the cell told
    a.granted_to_us += news;
    a.send_limit = a.granted_to_us - a.returned_by_us;
  }
  return a.sent != a.send_limit;
}
[[nodiscard]] inline std::uint32_t send_credits(const Agent& a) noexcept {
  return a.send_limit - a.sent;
}
[[nodiscard]] inline const Tally& tally(const Agent& a, OperationKind kind) noexcept {
  return a.tallies[static_cast<std::size_t>(kind)];
}
[[nodiscard]] inline std::uint64_t outstanding(const Tally& t) noexcept {
  return t.begun - t.done - t.failed;
}
inline void count_begin(Agent& a, OperationKind kind) noexcept {
  ++a.tallies[static_cast<std::size_t>(kind)].begun;
}
[[nodiscard]] inline std::uint64_t messages_sent(const Agent& a) noexcept {
  return tally(a, OperationKind::send).done + tally(a, OperationKind::send_imm).done +
         tally(a, OperationKind::raw_send).done + tally(a, OperationKind::raw_send_imm).done;
}
[[nodiscard]] inline std::uint32_t peer_credits(const Agent& a) noexcept {
  return a.granted - a.returned - a.received;
}
/// What has not ended: work requests accepted, and long messages that were offered.
[[nodiscard]] inline std::uint32_t outstanding(const Agent& a) noexcept {
  return a.sq_used + a.transfers.offers;
}
/// The same with what the peer has told of and nobody has looked at yet.
std::uint32_t credits_in_sight(const Agent& a) noexcept;
/// Looks for credit where the peer tells of it; false if there is none.
bool find_credit(Shared& s, Agent& a) noexcept;
/// Takes what the peer wrote into the credit cell. False: nonsense was in it, and the connection
/// ends.
bool read_credit_cell(Shared& s, Agent& a) noexcept;
/// What the agent's allotment is counted in.
inline std::uint32_t& allotted_with(Shared& s, const Agent& a) noexcept {
  return a.own_queue != kNone ? s.own->allotted : s.allotted;
}
/// Keeps up to `wanted` receives for the peer, as many as the budget has.
void grow_allotment(Shared& s, Agent& a, std::uint32_t wanted) noexcept;
/// Receives that each connection gets when there are too few for all.
std::uint32_t fair_share(const Shared& s) noexcept;
/// Takes the receive of a message just arrived from an agent that has more than its share.
void yield_credit(Shared& s, Agent& a) noexcept;
void list_grant(Shared& s, Agent& a) noexcept;
/// Lets the peer have credit up to its allotment.
void grant_more(Shared& s, Agent& a) noexcept;
/// The room that acceptance goes by: see Agent::sq_room.
[[nodiscard]] inline std::uint32_t& room_in_force(Agent& a) noexcept {
  if (a.raw != nullptr) return a.raw->sq_room;
  OwnDomain* const own = a.domain.get();
  return own != nullptr ? own->sq_room : a.sq_room;
}
[[nodiscard]] inline std::uint32_t room_in_force(const Agent& a) noexcept {
  if (a.raw != nullptr) return a.raw->sq_room;
  const OwnDomain* const own = a.domain.get();
  return own != nullptr ? own->sq_room : a.sq_room;
}
/// Work requests that the application may have in the send queue.
[[nodiscard]] inline std::uint32_t room_of(const Agent& a) noexcept {
  if (a.raw != nullptr) return a.attributes.queue_pair.send_depth;
  return a.attributes.queue_pair.send_depth - kControlRequests - kTransferRequests - kLeaseRequests;
}

// Cold: life cycle.

/// A fresh agent in `state`, which has to be ready within `patience`, by default the configured
/// time; null when the limit is reached.
Agent* acquire(Shared& s, ConnectionState state, bool outbound, Nanoseconds patience = {}) noexcept;
/// Gives an agent without a queue pair its attributes.
inline void set_attributes(Agent& a, const Attributes& attributes) noexcept {
  a.attributes = attributes;
  a.inline_bytes = attributes.queue_pair.inline_bytes;
}
/// The agents whose receives are in the same queue, or in one of their own, as this one's.
inline QpnMap& neighbours(Shared& s, const Agent& a) noexcept {
  if (a.raw != nullptr) return s.raw->by_qpn;
  return a.own_queue != kNone ? s.own->by_qpn : s.by_qpn;
}
/// The agent of a queue pair; null if it is no more.
inline Agent* find_by_qpn(Shared& s, std::uint32_t qp_num) noexcept {
  Agent* a = s.by_qpn.find(qp_num);
  if (a == nullptr && s.own != nullptr) a = s.own->by_qpn.find(qp_num);
  return a == nullptr && s.raw != nullptr ? s.raw->by_qpn.find(qp_num) : a;
}
/// Where keys that are the agent's own are registered; null: in the engine's protection domain.
inline memory::RegistrationTable::Group* registrations_of(const Agent& a) noexcept {
  return a.domain != nullptr ? &a.domain->registrations : nullptr;
}
/// Parts of acquire(), for an agent that begins anew.
void prepare_timers(Agent& a) noexcept;
/// Keeps a receive for the peer to begin with; false if none is left.
[[nodiscard]] bool promise_receive(Shared& s, Agent& a) noexcept;
/// The only writer of Agent::state; stamps the deadline of the new one.
void enter(Shared& s, Agent& a, ConnectionState state) noexcept;
/// Takes the next step of the agent's set-up or tear-down, with at most one control verb.
/// Answers true if it used one.
bool advance(Shared& s, Agent& a) noexcept;
/// The part of advance() for stages from `domain` to `rts`.
bool bring_up(Shared& s, Agent& a) noexcept;
/// Puts the agent in line for a control verb.
void list_setup(Shared& s, Agent& a) noexcept;
/// The connection ends, with this as its cause if it has none yet.
void fail(Shared& s, Agent& a, Error cause) noexcept;
/// The same for what no peer says, which is counted.
void fail_bad(Shared& s, Agent& a, Error cause) noexcept;
/// The application closes.
void close(Shared& s, Agent& a) noexcept;
/// An operation ended with an error at the device.
void on_operation_failed(Shared& s, Agent& a, OperationKind kind, const ibv_wc& wc) noexcept;
/// The peer says goodbye.
void on_goodbye(Shared& s, Agent& a) noexcept;
/// The last outstanding operation ended while draining.
void on_drained(Shared& s, Agent& a) noexcept;
void on_timer(Shared& s, Agent& a, TimerKind kind) noexcept;
/// Ready for traffic: the handshake is done at both ends.
void become_ready(Shared& s, Agent& a) noexcept;
/// A message has come while the connection is being made: it vouches for the peer.
void overtake_handshake(Shared& s, Agent& a) noexcept;
/// Our side of the handshake.
Endpoint endpoint(const Shared& s, const Agent& a) noexcept;
/// The peer's side; false and an error if it cannot be connected to.
Result<void> take_endpoint(Shared& s, Agent& a, const Endpoint& peer);
/// Appends one of the agent's own operations; false if the pool is out of records.
bool submit_control(Shared& s, Agent& a, OperationKind kind, std::uint16_t credits = 0) noexcept;
/// Lays a control message into the operation's staging room.
void build_control(const Shared& s, const Agent& a, Operation& op,
                   const wire::MessageHeader& header, std::span<const std::byte> body) noexcept;
/// Puts the handlers in place that the application set while one of the old may have been running.
inline void replace_handlers(Agent& a) noexcept {
  a.handlers = a.next_handlers;
  a.detour &= static_cast<std::uint8_t>(~kReplaced);
}
/// Tells the application and gives the record back.
void finish(Shared& s, Agent& a) noexcept;

/// No callback of the application's runs any more. Cold.
void fall_silent(Shared& s) noexcept;
/// Checks that what the agents count is what there is, from outside of a poll; see Engine::audit().
Result<void> audit(Shared& s);

inline Connection handle(const Shared& s, const Agent& a) noexcept {
  return {s.core, a.index, a.generation};
}

}  // namespace spinwire::agent
