// Calls that are longer than a datagram: each session has a reliable connection for them, made when
// it is first needed, and all that is known of such connections applies: long messages, credit,
// keys, the loss of peers. A call is a header and, unless it is short, its request as a message
// that carries the call's number. The reply is a message, or a WRITE with that number to memory
// that the call has named. Cold, next to what the device moves.
//
// Where one of the two ends has no datagrams all calls go this way: then the connection is made at
// once, the session is ready when it is and ends with it, if no other can be made.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>

#include "agent/agent.h"
#include "rpc/rpc.h"
#include "wire/rpc_bulk.h"

namespace spinwire::rpc {

/// One end of a session's connection.
struct BulkEnd {
  std::uint32_t session = 0;  ///< ours
  bool serves = false;
  bool due = false;             ///< in Rpc::due_first's line
  std::uint32_t agent = kNone;  ///< none: not connected
  std::uint32_t agent_generation = 0;
  BulkEnd* next_due = nullptr;
};

struct BulkAsked {
  Method method = 0;
  std::uint32_t size = 0;
  std::uint32_t id = 0;  ///< as the application calls it
  std::uint64_t deadline = 0;
  ReplyCallback done;
  Payload payload;
  BufferSlice reply;  ///< where it may be written; empty: it comes as a message
};

/// One that the connection has, from its first step to done().
struct BulkCall {
  enum class Told : std::uint8_t { nothing, header, all };
  enum class Cancel : std::uint8_t { no, due, told };
  std::uint32_t number = 0;  ///< of this one, or the next; its low bits are the slot
  Told told = Told::nothing;
  Cancel cancel = Cancel::no;
  bool pulled_from = false;  ///< the request's message has not ended
  bool exposed = false;      ///< the reply's memory has a key
  bool closing = false;      ///< which is being ended
  bool over = false;         ///< how it ends is settled, and stands below
  Status status = Status::ok;
  std::uint32_t size = 0;  ///< of what was written
  Buffer message;          ///< the reply, kept because the request's had not ended
  std::uint32_t rkey = 0;
  std::uint32_t loan = 0;  ///< what the agent calls the key
  BulkAsked asked;
};

struct BulkClient : BulkEnd {
  std::uint32_t window = 0;
  std::uint64_t active = 0;  ///< slots with a call
  std::unique_ptr<BulkCall[]> calls;
  std::unique_ptr<BulkAsked[]> waiting;  ///< a ring of rpc.backlog
  std::uint32_t waiting_first = 0;
  std::uint32_t waiting_count = 0;
  bool wants = false;  ///< a connection; counted in Rpc::wanting
  bool was_ready = false;
  std::uint64_t ready_at = 0;  ///< tick
  bool lost_one = false;  ///< one that was ready: another that cannot be made is the server's loss
  bool leaving = false;   ///< the session ends with its connection, of this:
  Error why;
};

/// The server's end of a slot.
struct BulkService {
  /// refusing: the library itself does, as soon as there is memory to say so.
  enum class State : std::uint8_t { none, body, running, refusing, answering, over };
  std::uint32_t number = 0;
  State state = State::none;
  bool confirm = false;  ///< a cancel is to be answered
  bool write = false;    ///< the answer goes into the client's memory
  Method method = 0;
  Status refusal = Status::ok;     ///< while it is being refused
  std::uint32_t size = 0;          ///< of the request, and then of the answer
  RemoteRegion reply;              ///< where a large one goes; of no length: nowhere
  detail::Block* block = nullptr;  ///< of the answer
  std::byte* data = nullptr;
};

struct BulkServer : BulkEnd {
  std::uint32_t window = 0;
  std::unique_ptr<BulkService[]> services;
  std::unique_ptr<Space[]> spaces;  ///< as ServerSession::spaces
};

// In bulk.cc.
/// The end's agent; null if there is none.
inline agent::Agent* agent_of(const Rpc& r, const BulkEnd& e) noexcept {
  return e.agent == kNone ? nullptr : r.context.find(e.agent, e.agent_generation);
}
/// A connection for long calls is of the engine's settings, but lends nothing to the peer.
agent::Attributes bulk_attributes(const agent::EngineContext& s) noexcept;
/// To be pumped again at the end of the poll.
void make_due(Rpc& r, BulkEnd& e) noexcept;
void forget_due(Rpc& r, BulkEnd& e) noexcept;
void pump_due(Rpc& r) noexcept;
/// What the application deferred goes out, as far as there is room. Runs no callback.
void post_due(Rpc& r) noexcept;
/// What is up to this long goes out though the application has all of the send pool, maybe in calls
/// that wait for just that.
inline constexpr std::size_t kLeastMessage = wire::kBulkHeaderBytes + kShortCall;
/// From the send pool or, if that is dry and no more is wanted than kLeastMessage, the engine's
/// own. Null: neither has one.
Block* block_to_send(Rpc& r, std::size_t size) noexcept;
/// Sends a header and what lies behind it with the next flush. Errors: those of Connection::send(),
/// no_buffer.
Status send_bulk(Rpc& r, agent::Agent& a, const wire::BulkHeader& header,
                 std::span<const std::byte> payload) noexcept;
/// Whether a message of so many bytes is none of those that are pulled.
inline bool is_eager(const agent::Agent& a, std::size_t payload) noexcept {
  return wire::kBulkHeaderBytes + payload <= a.max_message;
}
/// Whether it is only the time to send something that is wrong.
constexpr bool is_passing(Status status) noexcept {
  return status == Status::would_block || status == Status::no_buffer;
}
/// The peer said what no peer says: its connection ends.
void bulk_protocol_error(Rpc& r, agent::Agent& a, const char* found) noexcept;
Result<void> audit_bulk(Rpc& r);

// In bulk_client.cc.
/// A long call, which goes out at once if `now` and there is room. Runs no callback. Errors: those
/// of Session::call().
Status call_bulk(Rpc& r, ClientSession& c, const Asked& asked, const BufferSlice* reply_into,
                 const ReplyCallback& done, bool now) noexcept;
std::size_t longest_bulk(const Rpc& r, const ClientSession& c) noexcept;
Status cancel_bulk(Rpc& r, ClientSession& c, std::uint32_t id) noexcept;
/// For a session whose calls all need a connection. Errors: no_memory.
Status connect_at_once(Rpc& r, ClientSession& c) noexcept;
/// The session closes, and its connection with it, if there is one.
bool close_bulk(Rpc& r, ClientSession& c) noexcept;
/// The session ends of `why`. False: it does when its connection has, with lose() called again.
bool leave_bulk(Rpc& r, ClientSession& c, const Error& why) noexcept;
/// Ends what is too late; answers the tick of the next look. The session may be gone afterwards.
std::uint64_t look_at_bulk(Rpc& r, ClientSession& c, std::uint64_t now) noexcept;
/// A session that wants a connection; null if there is none.
ClientSession* next_wanting(Rpc& r) noexcept;
/// It could not even be begun.
void fail_wanting(Rpc& r, ClientSession& c, const Error& why) noexcept;

// In bulk_replies.cc.
/// The session's connection is being made.
void use_connection(Rpc& r, ClientSession& c, agent::Agent& a) noexcept;
/// The session's connection tells it nothing but its end, which the session's own waits for.
void hear_end(Rpc& r, std::uint32_t session, agent::Agent& a) noexcept;

// In bulk_call.cc.
/// False: something has to wait.
bool pump_bulk(Rpc& r, BulkClient& b) noexcept;
/// The same without a callback, and with a doorbell: what fails is left to the poll's pump.
void post_bulk(Rpc& r, BulkClient& b) noexcept;

// In bulk_server.cc.
/// As reply_space() and space_of().
std::span<std::byte> bulk_space(Rpc& r, std::uint32_t session, std::uint32_t number,
                                std::size_t size) noexcept;
Written bulk_space_of(Rpc& r, std::uint32_t session, std::uint32_t number,
                      std::size_t size) noexcept;
/// Those of calls that are over: the session is idle.
void drop_spaces(BulkServer& b) noexcept;
/// Whether the session's connection is there.
bool is_connected(const Rpc& r, const ServerSession& s) noexcept;
/// The session that a connection is for; null if it fits none.
ServerSession* find_joined(Rpc& r, const wire::JoinSession& join) noexcept;
/// The connection is the session's, in the place of the one before. May throw.
void join_session(Rpc& r, ServerSession& s, agent::Agent& a);
void dismiss_bulk(Rpc& r, ServerSession& s) noexcept;
Status answer_bulk(Rpc& r, std::uint32_t session, std::uint32_t number, Status status,
                   const std::byte* data, std::size_t size, Block* block) noexcept;
/// The longest answer; 0 if it is over.
std::size_t room_of(Rpc& r, std::uint32_t session, std::uint32_t number) noexcept;
/// False: something has to wait.
bool pump_bulk(Rpc& r, BulkServer& b) noexcept;

}  // namespace spinwire::rpc
