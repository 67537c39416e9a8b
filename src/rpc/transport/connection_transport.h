// Calls over a session's reliable connection, which is made when it is first needed: calls longer
// than a datagram, and calls that name memory for their reply. A call is a header and, unless it is
// short, its request as a message that carries the call's number. The reply is a message, or a
// WRITE with that number to the named memory. Cold. With Transport::connection all calls go this
// way: the connection is made at once, the session is ready when the connection is, and ends with
// it if no other can be made.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "agent/agent.h"
#include "rpc/client_session.h"
#include "rpc/reply_buffer.h"
#include "rpc/rpc.h"
#include "wire/rpc_connection.h"

namespace spinwire::rpc {

/// One end of a session's connection.
struct ConnectionEnd {
  std::uint32_t session = 0;  ///< ours
  bool is_server = false;
  bool queued = false;          ///< in Rpc::connection_queue
  std::uint32_t agent = kNone;  ///< kNone: not connected
  std::uint32_t agent_generation = 0;
  ConnectionEnd* next_queued = nullptr;
};

struct ConnectionCall {
  Method method = 0;
  std::uint32_t size = 0;
  std::uint32_t id = 0;  ///< as the application calls it
  std::uint64_t deadline = 0;
  ReplyCallback done;
  std::optional<Status> outcome;  ///< as ClientSlot::outcome, of a call in the backlog
  Payload payload;
  BufferSlice reply;  ///< where it may be written; empty: it comes as a message
};

/// A slot with a call, from its first step to done().
struct ConnectionClientSlot {
  enum class Sent : std::uint8_t { nothing, header, all };
  enum class Cancel : std::uint8_t { none, due, sent };
  std::uint32_t number = 0;  ///< of this one, or the next; its low bits are the slot
  Sent sent = Sent::nothing;
  Cancel cancel = Cancel::none;
  bool request_in_flight = false;  ///< the request's message has not ended
  bool key_open = false;           ///< the reply's memory has a key
  bool key_closing = false;        ///< the key is being closed
  bool has_outcome = false;        ///< `status` says how the call ends
  Status status = Status::ok;
  std::uint32_t size = 0;  ///< of what was written
  Buffer reply_message;    ///< the reply, kept because the request's had not ended
  std::uint32_t rkey = 0;
  std::uint32_t lease = 0;  ///< what the agent calls the key
  ConnectionCall call;
};

struct ConnectionClient : ConnectionEnd {
  std::uint32_t window = 0;
  std::uint64_t active = 0;  ///< slots with a call
  std::unique_ptr<ConnectionClientSlot[]> slots;
  std::unique_ptr<ConnectionCall[]> backlog;  ///< a ring of rpc.backlog
  std::uint32_t backlog_first = 0;
  std::uint32_t backlog_count = 0;
  bool wants_connection = false;  ///< counted in Rpc::connections_wanted
  bool was_ready = false;
  std::uint64_t ready_at = 0;  ///< tick
  bool had_connection =
      false;               ///< a connection was ready before; peer_lost if no other can be made
  bool is_ending = false;  ///< the session ends with its connection, for the reason `why`
  Error why;
};

/// The server's end of a slot.
struct ConnectionServerSlot {
  /// refusing: the library refuses the call as soon as it has memory for the message.
  enum class State : std::uint8_t { none, body, running, refusing, answering, over };
  std::uint32_t number = 0;
  State state = State::none;
  bool cancel_to_confirm = false;  ///< a cancel is to be answered
  bool writes_reply = false;       ///< the answer goes into the client's memory
  Method method = 0;
  Status refusal = Status::ok;     ///< while it is being refused
  std::uint32_t size = 0;          ///< of the request, then of the reply
  RemoteRegion reply;              ///< the memory that the call named; length 0: none
  detail::Block* block = nullptr;  ///< of the answer
  std::byte* data = nullptr;
};

struct ConnectionServer : ConnectionEnd {
  std::uint32_t window = 0;
  std::unique_ptr<ConnectionServerSlot[]> slots;
  std::unique_ptr<ReplyBuffer[]> reply_buffers;  ///< as ServerSession::reply_buffers
};

// In connection_transport.cc.
/// The end's agent; null if there is none.
inline agent::Agent* agent_of(const Rpc& r, const ConnectionEnd& e) noexcept {
  return e.agent == kNone ? nullptr : r.context.find(e.agent, e.agent_generation);
}
/// The attributes of a session's connection: the engine's, without leases.
config::ConnectionAttributes connection_attributes(const agent::EngineContext& s) noexcept;
/// Has the connection advanced at the end of the poll.
void queue_connection(Rpc& r, ConnectionEnd& e) noexcept;
void unqueue_connection(Rpc& r, ConnectionEnd& e) noexcept;
void run_connection_queue(Rpc& r) noexcept;
/// Sends deferred calls as far as there is room. Runs no callback.
void post_connection_queue(Rpc& r) noexcept;
/// Messages of up to this many bytes can be sent when the application holds all of the send pool.
inline constexpr std::size_t kReservedMessageBytes = wire::kRpcMessageHeaderBytes + kShortCall;
/// A block of the send pool or, for up to kReservedMessageBytes, of the control pool. Null: both
/// are empty.
Block* block_to_send(Rpc& r, std::size_t size) noexcept;
/// Sends a header and what lies behind it with the next flush. Errors: those of Connection::send(),
/// no_buffer.
Status send_message(Rpc& r, agent::Agent& a, const wire::RpcMessageHeader& header,
                    std::span<const std::byte> payload) noexcept;
/// Whether a message with this payload is sent eagerly.
inline bool is_eager(const agent::Agent& a, std::size_t payload) noexcept {
  return wire::kRpcMessageHeaderBytes + payload <= a.send_queue.max_eager;
}
/// Whether a send may succeed later.
constexpr bool is_transient(Status status) noexcept {
  return status == Status::would_block || status == Status::no_buffer;
}
/// Ends a connection whose peer broke the protocol.
void fail_protocol(Rpc& r, agent::Agent& a, const char* found) noexcept;
Result<void> audit_connections(Rpc& r);

// In connection_client.cc.
/// A long call, which goes out at once if `now` and there is room. Runs no callback. Errors: those
/// of Session::call().
Status call_over_connection(Rpc& r, ClientSession& c, const CallRequest& call,
                            const BufferSlice* reply_into, const ReplyCallback& done,
                            bool now) noexcept;
std::size_t max_call(const Rpc& r, const ClientSession& c) noexcept;
/// As cancel() and run_cancel_callbacks(), for the calls over the session's connection.
Status cancel_on_connection(Rpc& r, ClientSession& c, std::uint32_t id) noexcept;
void run_cancel_callbacks(Rpc& r, ConnectionClient& b) noexcept;
/// For a session whose calls all need a connection. Errors: no_memory.
Status open_sole_connection(Rpc& r, ClientSession& c) noexcept;
/// The session closes, and its connection with it. False: there is none. Runs no callback.
bool close_client_connection(Rpc& r, ClientSession& c) noexcept;
/// Releases the connection of a session that ends. False: the connection is still ending; when it
/// has ended, fail_session() runs again.
bool release_client_connection(Rpc& r, ClientSession& c, const Error& why) noexcept;
/// Ends calls that timed out. Returns the tick of the next check. The session may be gone
/// afterwards.
std::uint64_t check_connection_calls(Rpc& r, ClientSession& c, std::uint64_t now) noexcept;
/// A session that wants a connection; null if there is none.
ClientSession* next_session_to_connect(Rpc& r) noexcept;
/// The connection could not be begun.
void fail_connecting(Rpc& r, ClientSession& c, const Error& why) noexcept;

// In connection_replies.cc.
/// Gives the session the agent of its connection, which is being made.
void attach_connection(Rpc& r, ClientSession& c, agent::Agent& a) noexcept;
/// Leaves only the handler for the connection's end, which the session's end waits for.
void set_closed_handler(Rpc& r, std::uint32_t session, agent::Agent& a) noexcept;

// In connection_call.cc.
/// False: something has to wait.
bool advance(Rpc& r, ConnectionClient& b) noexcept;
/// As advance(), without callbacks and with a doorbell. Calls that fail are left to the next poll.
void post_calls(Rpc& r, ConnectionClient& b) noexcept;

// In connection_server.cc.
/// As reserve_reply() and find_reserved_reply().
std::span<std::byte> reserve_on_connection(Rpc& r, std::uint32_t session, std::uint32_t number,
                                           std::size_t size) noexcept;
ReservedReply find_reserved_on_connection(Rpc& r, std::uint32_t session, std::uint32_t number,
                                          std::size_t size) noexcept;
/// Releases the reply buffers of an idle session, except those of running calls.
void release_reply_buffers(ConnectionServer& b) noexcept;
/// Whether the session's connection is there.
bool is_connected(const Rpc& r, const ServerSession& s) noexcept;
/// The session that a join_session frame names; null if there is none of that peer.
ServerSession* find_session_to_join(Rpc& r, const wire::JoinSession& join) noexcept;
/// Gives a session its connection, in place of the previous one. May throw.
void join_session(Rpc& r, ServerSession& s, agent::Agent& a);
void release_server_connection(Rpc& r, ServerSession& s) noexcept;
Status answer_over_connection(Rpc& r, std::uint32_t session, std::uint32_t number, Status status,
                              const std::byte* data, std::size_t size, Block* block) noexcept;
/// The longest reply to a call; 0 if the call is over.
std::size_t max_reply(Rpc& r, std::uint32_t session, std::uint32_t number) noexcept;
/// False: something has to wait.
bool advance(Rpc& r, ConnectionServer& b) noexcept;

}  // namespace spinwire::rpc
