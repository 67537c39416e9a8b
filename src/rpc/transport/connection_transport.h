// Calls over a session's reliable connection, which is made when first needed: calls longer than a
// datagram, and calls that name memory for their reply. A call is a header and, unless the request
// is short, a message with the request and the call's number. The reply is a message, or a WRITE
// with the call's number to the named memory. Where the device reads offered messages without a
// key, the memory is not opened: a long reply is a message with the call's number, which the client
// places there. Cold.
//
// With Transport::connection all calls use the connection. The connection is made at once, and the
// session becomes ready with it. The session ends if a lost connection cannot be made again.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "agent/agent.h"
#include "rpc/client_session.h"
#include "rpc/reply_buffer.h"
#include "rpc/rpc_state.h"
#include "wire/rpc_connection.h"

namespace spinwire::rpc {

/// One end of a session's connection.
struct ConnectionEnd {
  /// due: in Rpc::connection_queue; blocked: in Rpc::blocked_connections.
  enum class Turn : std::uint8_t { none, due, blocked };
  std::uint32_t session = 0;  ///< our name of the session
  bool is_server = false;
  Turn turn = Turn::none;
  agent::AgentId agent;  ///< empty: not connected
  base::IntrusiveLinks<ConnectionEnd> links;
};

struct ConnectionCall : BackloggedCall {
  BufferSlice reply;  ///< memory for the reply; empty: the reply is a message
};

/// A slot with a call, from its first step to done(). With an outcome, the call is over;
/// try_finish() ends it when no peer uses its memory.
struct ConnectionClientSlot {
  enum class Sent : std::uint8_t { nothing, header, all };
  enum class Cancel : std::uint8_t { none, due, sent };
  std::uint32_t number = 0;  ///< of this call, or the next; the low bits are the slot
  Sent sent = Sent::nothing;
  Cancel cancel = Cancel::none;
  bool request_in_flight = false;     ///< the request's message has not ended
  bool places_reply = false;          ///< no key opens the reply's memory: place_reply() gives it
  bool placing = false;               ///< the reply is on its way to its memory
  bool key_open = false;              ///< the reply's memory has a key
  bool key_closing = false;           ///< the key is being closed
  std::uint32_t size = 0;             ///< of the reply in its memory, bytes
  std::optional<std::uint32_t> code;  ///< of the handler's refusal
  Buffer reply_message;               ///< the reply, kept until the request's message ends
  std::uint32_t rkey = 0;
  std::uint32_t lease = 0;  ///< the agent's lease id of the key
  /// The tick at which the call times out, while `call.deadline` is that of the steps after its
  /// reply, such as closing a key. A refused call that waits again gets it back. 0: not replaced.
  std::uint64_t asked_deadline = 0;
  ConnectionCall call;
};

struct ConnectionClient : ConnectionEnd {
  std::uint32_t window = 0;
  std::uint64_t active = 0;  ///< slots with a call, and all bits beyond the window
  std::unique_ptr<ConnectionClientSlot[]> slots;
  std::unique_ptr<ConnectionCall[]> backlog;  ///< a ring
  std::uint32_t backlog_room = 0;             ///< entries of the ring
  std::uint32_t backlog_first = 0;
  std::uint32_t backlog_count = 0;
  bool wants_connection = false;  ///< in Rpc::connection_requests
  base::IntrusiveLinks<ConnectionClient> request_links;
  bool was_ready = false;
  std::uint64_t ready_at = 0;   ///< tick
  bool had_connection = false;  ///< it replaces a lost one; of a session without datagrams
  bool is_ending = false;       ///< the session ends with its connection, because of `why`
  bool was_opening = false;     ///< the session, when it began to end
  bool is_interrupted = false;  ///< the agent is of a server that the session has lost
  Status interrupted_as = Status::peer_lost;  ///< how its calls end
  bool is_retried = false;                    ///< it could not be made, though the server is there
  EndReason why;
};

/// The server's end of a slot.
struct ConnectionServerSlot {
  /// refusing: the library refuses the call when there is memory for the message.
  enum class State : std::uint8_t { none, body, running, refusing, answering, over };
  std::uint32_t number = 0;
  State state = State::none;
  bool cancel_to_confirm = false;  ///< a cancel must be answered
  bool is_bare = false;            ///< the reply has no header: it goes to the client's memory
  Method method = 0;
  Status refusal = Status::ok;  ///< while it is being refused
  std::uint32_t size = 0;       ///< of the request
  RemoteRegion named;           ///< the memory that the call named; length 0: none
  BufferSlice reply;            ///< what is sent; empty unless `answering`
};

struct ConnectionServer : ConnectionEnd {
  std::uint32_t window = 0;
  std::uint32_t next_slot = 0;  ///< where the next turn begins
  std::uint64_t waiting = 0;    ///< slots that had to wait, a bit for each
  std::unique_ptr<ConnectionServerSlot[]> slots;
  std::unique_ptr<ReplyBuffer[]> reply_buffers;  ///< see ServerSession::reply_buffers
};

/// Whether another call may wait beside `waiting` ones. Until the server is known, all calls of a
/// session may have to wait for its connection, so those of both backlogs count together.
inline bool is_backlog_full(const Rpc& r, const ClientSession& c, std::uint32_t waiting) noexcept {
  const std::uint32_t most = r.context.config.rpc.backlog;
  if (c.state != SessionState::opening) return waiting >= most;
  return c.backlog_count + (c.connection != nullptr ? c.connection->backlog_count : 0) >= most;
}

// In connection_transport.cc.
/// The agent of an end; null if there is none.
inline agent::Agent* agent_of(const Rpc& r, const ConnectionEnd& e) noexcept {
  return agent::find(r.context, e.agent);
}
/// The agent of a session's connection; null if there is none.
template <typename End>
agent::Agent* agent_of(const Rpc& r, const std::unique_ptr<End, ConnectionDeleter>& e) noexcept {
  return e != nullptr ? agent_of(r, *e) : nullptr;
}
/// Whether a handle names the connection of an end.
bool is_connection_of(const Rpc& r, const ConnectionEnd& e, const Connection& named) noexcept;
/// Gives an end its agent.
void attach(ConnectionEnd& e, agent::Agent& a, const ConnectionHandlers& handlers) noexcept;
/// A callback of an agent that runs Handler(rpc, session, connection, event).
template <auto Handler>
auto session_handler(Rpc& r, std::uint32_t session) noexcept {
  return [self = &r, session](Connection connection, auto&&... event) {
    Handler(*self, session, connection, event...);
  };
}
/// The attributes of a session's connection: the engine's, without leases.
config::ConnectionAttributes connection_attributes(const agent::EngineContext& ctx) noexcept;
/// Queues the connection for the end of the poll, which advances it.
void queue_connection(Rpc& r, ConnectionEnd& e) noexcept;
/// A connection was heard. If it lacks credit, it has a turn: the message's header may grant some.
inline void wake_blocked(Rpc& r, ConnectionEnd& e) noexcept {
  if (e.turn == ConnectionEnd::Turn::blocked) queue_connection(r, e);
}
/// The connection had to wait: for credit or room that nothing reports, or for memory. With
/// `has_sent` it has a turn in the next poll, otherwise after others that wait.
void wait_for_turn(Rpc& r, ConnectionEnd& e, bool has_sent) noexcept;
void unqueue_connection(Rpc& r, ConnectionEnd& e) noexcept;
/// Connections that could send nothing in their last turn, and have one in the same poll. Peers
/// that grant no credit can make many wait.
inline constexpr std::uint32_t kBlockedPerPoll = 4;
void run_connection_queue(Rpc& r) noexcept;
/// Messages up to this length can be sent even if the application holds the whole send pool.
inline constexpr std::size_t kReservedMessageBytes =
    wire::kRpcMessageHeaderBytes + kSlotPayloadBytes;
/// A block of the send pool or, for up to kReservedMessageBytes, of the control pool. Null: both
/// are empty.
Block* block_to_send(Rpc& r, std::size_t size) noexcept;
/// Sends a header and its payload with the next flush. Takes no block before there is credit.
/// Errors: those of Connection::send(), no_buffer.
Status send_message(Rpc& r, agent::Agent& a, const wire::RpcMessageHeader& header,
                    std::span<const std::byte> payload) noexcept;
/// Whether a message with this payload is sent eagerly.
inline bool is_eager(const agent::Agent& a, std::size_t payload) noexcept {
  return wire::kRpcMessageHeaderBytes + payload <= agent::max_eager(a);
}
/// The outcome of a step of a call.
enum class Step : std::uint8_t {
  done,
  waiting,  ///< for room or memory; it is taken again later
  failed,
};
/// Maps the status of a send to the outcome of its step.
constexpr Step step_of(Status sent) noexcept {
  if (sent == Status::ok) return Step::done;
  return sent == Status::would_block || sent == Status::no_buffer ? Step::waiting : Step::failed;
}
/// Ends a connection whose peer violates the protocol.
void fail_protocol(Rpc& r, agent::Agent& a, const char* found) noexcept;

// In connection_client.cc.
/// Starts a long call, at once if `now` and there is room. Runs no callback. Errors: those of
/// Session::call().
Status call_over_connection(Rpc& r, ClientSession& c, const CallRequest& call,
                            const BufferSlice* reply_into, const ReplyCallback& done, bool now,
                            bool waits_until_ready) noexcept;
std::size_t max_call(const Rpc& r, const ClientSession& c) noexcept;
/// Cancels a call over the session's connection. Returns false if the call is over.
bool cancel_on_connection(Rpc& r, ClientSession& c, std::uint32_t id) noexcept;
/// How many ids before `last_id` the newest call over the connection is that can be cancelled;
/// kNone if there is none.
std::uint32_t age_of_newest_long(const ConnectionClient& b, std::uint32_t last_id) noexcept;
/// Runs the callbacks of cancelled calls over the connection.
void run_cancel_callbacks(Rpc& r, ConnectionClient& b) noexcept;
/// Makes the connection record of a session that sends all calls over it. Returns false without
/// memory.
bool open_mandatory_connection(Rpc& r, ClientSession& c) noexcept;
/// Closes the session's connection with the session. Returns false if there is none. Runs no
/// callback.
bool close_client_connection(Rpc& r, ClientSession& c) noexcept;
/// Ends a session's inline calls and those that wait, and releases its connection. Returns false
/// while the connection is still ending; end_session() runs again afterwards.
bool release_client_connection(Rpc& r, ClientSession& c, const EndReason& why) noexcept;
/// Ends the connection of a session that was interrupted. Its calls end with the connection's
/// agent. Runs no callback.
void interrupt_client_connection(Rpc& r, ClientSession& c, const Error& why) noexcept;
/// Moves inline calls from the backlog of the connection of a session without datagrams, which is
/// interrupted, to the session's: the next server may have datagrams. The session's is empty.
void reclaim_inline_calls(Rpc& r, ClientSession& c) noexcept;
/// Moves calls that cannot go as datagrams, from the backlog to that of the connection. May run
/// callbacks.
void reroute_backlog(Rpc& r, ClientSession& c) noexcept;
/// Asks for the connection if calls wait for it.
void connect_backlog(Rpc& r, ClientSession& c) noexcept;
/// Ends calls that timed out. Returns the tick of the next check. The session may be gone
/// afterwards.
std::uint64_t check_connection_calls(Rpc& r, ClientSession& c, std::uint64_t now) noexcept;
/// The session that has wanted a connection for longest; one does.
ClientSession& next_session_to_connect(Rpc& r) noexcept;
/// The attempt to connect failed at its start.
void fail_connecting(Rpc& r, ClientSession& c, const Error& why) noexcept;

// In connection_replies.cc.
/// Gives the session the agent of its connection, which is being made.
void attach_connection(Rpc& r, ClientSession& c, agent::Agent& a) noexcept;
/// Leaves only the handler for the connection's end, because the session's end waits for that.
void keep_closed_handler(Rpc& r, std::uint32_t session, agent::Agent& a) noexcept;

// In connection_call.cc.
/// Advances the client's calls.
void advance(Rpc& r, ConnectionClient& b) noexcept;
/// Advances calls without callbacks, and rings the doorbell. Calls that fail are left to the next
/// poll.
void post_calls(Rpc& r, ConnectionClient& b) noexcept;

// In connection_server.cc.
/// Where the reply of a call over a connection is built.
ReplyPlace reply_place_on_connection(Rpc& r, CallRef call) noexcept;
/// Releases the reply buffers of an idle session, except those of running calls.
void release_reply_buffers(ConnectionServer& b) noexcept;
/// Whether the session has a connection.
bool is_connected(const Rpc& r, const ServerSession& s) noexcept;
/// Whether the client's device was heard by the connection. The frames that make one need no
/// device.
bool was_heard_by_connection(const Rpc& r, const ServerSession& s) noexcept;
/// The session that a join_session frame names; null if that peer has no such session.
ServerSession* find_session_to_join(Rpc& r, const wire::JoinSession& join) noexcept;
/// Gives a session its connection, which replaces the previous one. May throw.
void join_session(Rpc& r, ServerSession& s, agent::Agent& a);
void release_server_connection(Rpc& r, ServerSession& s) noexcept;
/// Answers a call. Errors: those of PendingCall::reply().
Status answer_over_connection(Rpc& r, CallRef call, Status status, const std::byte* data,
                              std::size_t size, Block* block) noexcept;
/// Refuses a call for its handler. Errors: those of PendingCall::refuse().
Status refuse_over_connection(Rpc& r, CallRef call, std::uint32_t code,
                              std::string_view text) noexcept;
/// Advances the server's calls.
void advance(Rpc& r, ConnectionServer& b) noexcept;

}  // namespace spinwire::rpc
