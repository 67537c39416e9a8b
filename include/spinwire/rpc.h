// Remote calls. A server gives methods to Engine::serve() and listens as for connections. A client
// opens sessions with Engine::open_session() and calls methods. Each call ends once, with a reply
// or a status, and its handler runs at most once. All sessions of an engine share one datagram
// queue pair. All functions here may be called from callbacks; spinwire.h has the other rules.
//
// Inline calls, whose request fits into a datagram (Session::max_inline_call()), travel as
// datagrams. Long calls (a longer request, or CallOptions::reply_into) travel over a reliable
// connection. The session makes this connection for its first long call, and again if it is lost.
// The server reads long requests. It writes replies to the named memory, or the client fetches
// them. Long calls are not ordered with inline ones.
//
// If one of the two engines has no datagrams (because of its device or rpc.transport), all calls of
// the session travel over a connection, with the same limits. The session is ready when its
// connection is. If the connection is lost, its calls end with peer_lost, and the client makes
// another connection. With SessionOptions::reconnect, calls that were not sent wait for it instead.
// Further calls wait, too, and the session stays ready. The session ends with the error of the new
// connection if that cannot be made, or is lost within connections.close_timeout.
//
// A server that hears nothing from a session for connections.peer_timeout forgets the session; when
// the client is heard again, the session ends with peer_lost. A client that hears nothing from a
// server for two connections.keepalive_interval asks the server's address for its engine. If
// another engine answers, the session ends with peer_lost. Otherwise the session ends with
// peer_lost after connections.peer_timeout of silence. It ends sooner if the device reports that
// the server's process has ended, as softverbs does (rpc.direct_datagrams); and if the connection
// for long calls was lost with its peer or was refused, nobody or another engine listens at the
// address, and no datagram comes for a keepalive_interval. A session without datagrams is forgotten
// by the server after connections.peer_timeout without a connection.
//
// With SessionOptions::reconnect, a session does not end in these ways: it is opened again, under
// the same handle. Meanwhile it is `opening`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spinwire/buffer.h"
#include "spinwire/callback.h"
#include "spinwire/clock.h"
#include "spinwire/connection.h"
#include "spinwire/export.h"
#include "spinwire/goodbye.h"
#include "spinwire/identity.h"
#include "spinwire/reconnect.h"
#include "spinwire/session_state.h"
#include "spinwire/status.h"

namespace spinwire {

/// Identifies a method of a server. Methods index a dense table, so keep the numbers small.
using Method = std::uint16_t;

/// Requests and replies of up to this many bytes are stored in the call's slot, need no block of
/// the send pool, and fit in a cacheline.
inline constexpr std::size_t kSlotPayloadBytes = 48;

namespace detail {
/// Where to keep received bytes: in the block. Copies bytes from the device's memory into the
/// block.
inline std::byte* in_block(Block* block, std::byte* data, std::size_t size) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(block->payload);
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  if (at - begin < block->capacity) return data;
  std::memcpy(block->payload, data, size);
  return block->payload;
}

/// How calls travel.
enum class Transport : std::uint8_t {
  datagram,    ///< of a session: inline calls as datagrams, long ones over a connection
  connection,  ///< of a session: all calls; one of the two engines has no datagrams
};

/// Names a call at its server, in one word.
struct CallRef {
  static constexpr unsigned kSessionBits = 31;
  CallRef() noexcept = default;
  CallRef(std::uint32_t name, Transport by, std::uint32_t call) noexcept
      : session(name & ~(~0u << kSessionBits)), transport(by), number(call) {}

  std::uint32_t session : kSessionBits = 0;  ///< the server's name of the session
  Transport transport : 1 = Transport::datagram;
  std::uint32_t number = 0;
};
}  // namespace detail

/// The end of a call. Valid during its callback. The bytes lie where they arrived. On softverbs,
/// unless rpc.direct_datagrams is "off", the peer's process can still write to a datagram's bytes:
/// if you do not trust the peer, copy or keep() the bytes before you validate them. Hot.
class SPINWIRE_API Reply {
 public:
  /// How the call ended:
  ///   ok                the server has replied
  ///   refused           the handler refused the call; text() and code() say why
  ///   unsupported       the server has no such method
  ///   timed_out         the time-out passed; the handler may have run
  ///   cancelled         by Session::cancel(); the handler may have run
  ///   flushed           the session was closed
  ///   peer_lost         the server, or the connection for long calls, was lost. After flushed and
  ///                     peer_lost the handler may have run. A session that was ready, and is not
  ///                     opened again, ends calls so that were never sent, too
  ///   not_connected     the handler has not run: the server refused the call because it ends the
  ///                     session, or it was not sent, as the session was interrupted or could not
  ///                     be opened, or lacks a connection for long calls. It could not wait for the
  ///                     next server (WhenNotReady::fail, no reconnect, or no memory)
  ///   limit             the handler has run; the server dropped the reply, because its send pool
  ///                     was used up before it arrived, or its memory could not be registered.
  ///                     is_retryable() is true, but calling again runs the handler again
  /// A long call whose handler has not run may also end with:
  ///   no_buffer         the server's pool memory.rendezvous_bytes had no block for
  ///                     connections.rendezvous_timeout
  ///   message_too_long  the server takes no request of that length
  ///   invalid_argument, limit, no_memory, system
  ///                     the registration of `reply_into` failed
  [[nodiscard]] Status status() const noexcept { return status_; }
  /// The reply; with CallOptions::reply_into, the first bytes of that memory. Unless the status is
  /// ok, the bytes of text().
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }
  /// The server's reason for `refused`.
  [[nodiscard]] std::string_view text() const noexcept {
    return {reinterpret_cast<const char*>(data_), status_ != Status::ok ? size_ : 0};
  }
  /// The code with which the handler has refused the call; none if it gave none. A server of an
  /// older release gives none.
  [[nodiscard]] std::optional<std::uint32_t> code() const noexcept {
    return status_ == Status::refused && has_code_ != 0 ? std::optional(code_) : std::nullopt;
  }
  /// Keeps the bytes beyond the callback: answers a slice of the receive in which they arrived, or
  /// of a block to which bytes in the device's memory are copied. bytes() then answers the kept
  /// bytes. Empty if there are none.
  [[nodiscard]] BufferSlice keep() noexcept {
    if (block_ == nullptr || size_ == 0) return {};
    kept_ = true;
    std::byte* const data = detail::in_block(block_, const_cast<std::byte*>(data_), size_);
    data_ = data;  // a second keep() then copies nothing
    return BufferSlice(block_, data, size_);
  }

 private:
  friend struct detail::Internals;

  Reply(Status status, detail::Block* block, const std::byte* data, std::size_t size) noexcept
      : block_(block), data_(data), size_(size), status_(status) {}

  detail::Block* block_;
  const std::byte* data_;
  std::size_t size_;
  Status status_;
  bool kept_ = false;
  std::uint8_t has_code_;  ///< undefined unless the status is `refused`
  std::uint32_t code_;     ///< undefined without a code
};

/// Receives the end of a call.
using ReplyCallback = Callback<void(Reply&)>;

/// A session that a client has opened with us: a small value that may be copied. Hot.
class SPINWIRE_API ServedSession {
 public:
  ServedSession() noexcept = default;
  /// Whether the session still exists. It may end in any poll().
  explicit operator bool() const noexcept;
  /// What the handshake has shown of the client; empty once the session is gone. Valid while the
  /// session exists.
  [[nodiscard]] PeerIdentity peer_identity() const noexcept;
  /// Ends the session in order, and tells the client why (Error::goodbye). Calls in progress go on;
  /// further calls are refused, and their handlers do not run: they wait for the client's next
  /// server (WhenNotReady::wait), or end as `not_connected`. The client closes the session when its
  /// calls are over. After `timeout`, or without a call in progress and without a sign of the
  /// client for connections.close_timeout, the session ends at once. 0: connections.close_timeout.
  /// Runs no callback. Set-up. Errors:
  ///   invalid_argument  the goodbye, as at Connection::close(), or a time-out below 0 or above
  ///                     24 h
  ///   not_connected     the session has ended, or ends already
  Status close(const Goodbye& goodbye, Nanoseconds timeout = Nanoseconds(0)) const noexcept;

  friend bool operator==(const ServedSession&, const ServedSession&) noexcept = default;

 private:
  friend struct detail::Internals;

  ServedSession(detail::EngineSlot* slot, std::uint32_t name, std::uint32_t generation) noexcept
      : slot_(slot), name_(name), generation_(generation) {}

  detail::EngineSlot* slot_ = nullptr;
  std::uint32_t name_ = 0;
  std::uint32_t generation_ = 0;
};

/// Reports that replies may find memory again; see Engine::set_reply_writable_handler().
using ReplyWritableCallback = Callback<void()>;

/// The end of a reply that was made with a callback; see PendingCall::reply(). Hot.
using ReplyCompletionCallback = Callback<void(Status)>;

/// A call to answer later, from any callback or between polls. Copies name the same call. Dropping
/// the handle does not answer the call. After no_buffer, Engine::set_reply_writable_handler() tells
/// when an answer may succeed. Hot.
class SPINWIRE_API PendingCall {
 public:
  PendingCall() noexcept = default;
  /// Replies with a copy of the bytes. Errors:
  ///   not_connected     the call was answered, timed out or cancelled, or its session has ended
  ///   message_too_long  longer than max_reply()
  ///   no_buffer         the send pool has no block for more than kSlotPayloadBytes, or for a reply
  ///                     over a connection
  Status reply(std::span<const std::byte> bytes) const noexcept;
  /// Replies with these bytes, without a copy. Holds a reference until the client certainly has the
  /// reply: until its next call in the same slot, the session's end, or
  /// connections.keepalive_interval without a call. Over a connection, until the client has it.
  /// An exhausted send pool ends that sooner; see `limit` at Reply::status(). Write to the memory
  /// again once Buffer::unique() of its buffer is true. Ask before the buffer's next use, as in a
  /// loop over a few buffers, allocate one for each reply, or give a callback, below. Errors:
  ///   not_connected     the call was answered, timed out or cancelled, or its session has ended
  ///   message_too_long  longer than max_reply()
  ///   invalid_argument  memory of another engine
  ///   no_buffer         the send pool has no block for a reply over a connection
  Status reply(const BufferSlice& bytes) const noexcept;
  /// Replies like reply(bytes). If it answers ok, `done` runs exactly once, inside a poll() or the
  /// engine's destruction and never inside this function. From then on the library neither reads
  /// the bytes nor holds a reference for this reply: they may be written again, unless the
  /// application has also given them to something else. `done` gets:
  ///   ok         the reply needs its bytes no longer: they were copied or written, the client has
  ///              made a later call in the same slot, has given the call up, said that it is over
  ///              or closed the session, the connection that carried them was lost, or the send
  ///              pool was exhausted. It does not say that the client has received the reply; a
  ///              client that must know that calls again.
  ///   peer_lost  a session over datagrams ended first: the server lost the client
  ///   flushed    the session ended first: ServedSession::close() or Engine::drain() ran out of
  ///              time, or the engine was destroyed
  ///   other      the session ended first: it could not get the connection that all its calls use
  /// An idle client says within connections.keepalive_interval which of its calls are over.
  /// `done` may call any function. If reply() does not answer ok, `done` does not run, and nothing
  /// holds the bytes. Takes a block of 256 bytes of the send pool until `done` runs. Errors:
  ///   not_connected     the call was answered, timed out or cancelled, or its session has ended
  ///   message_too_long  longer than max_reply()
  ///   invalid_argument  no callback, or memory of another engine
  ///   no_buffer         the send pool has no block
  Status reply(const BufferSlice& bytes, const ReplyCompletionCallback& done) const noexcept;
  /// Refuses the call: it ends with `refused` and the first kSlotPayloadBytes of the text. Errors:
  ///   not_connected     the call was answered, timed out or cancelled, or its session has ended
  ///   no_buffer         the send pool has no block for a reply over a connection
  Status refuse(std::string_view why) const noexcept;
  /// Refuses the call with a code of the application's own (Reply::code()) and the first
  /// kSlotPayloadBytes - 4 bytes of the text. A client of an older release gets the text alone.
  /// Errors:
  ///   not_connected     the call was answered, timed out or cancelled, or its session has ended
  ///   no_buffer         the send pool has no block for a reply over a connection
  Status refuse(std::uint32_t code, std::string_view why) const noexcept;
  /// Longest reply in bytes: a datagram, or the memory that the client named; 0 once the call is
  /// over.
  [[nodiscard]] std::size_t max_reply() const noexcept;
  /// Reserves memory to build a reply of up to `size` bytes in, without a copy; its bytes are
  /// undefined. Finish with commit_reply(). The memory belongs to the call until the call is
  /// answered or over. A call may end in any poll(): after a poll(), check max_reply() before you
  /// write. If another thread or a device fills the memory, use a buffer of your own and
  /// reply(BufferSlice). Empty if `size` is more than a datagram takes, the call names memory for
  /// its reply or is over, or the send pool has no block.
  [[nodiscard]] std::span<std::byte> reserve_reply(std::size_t size) const noexcept;
  /// Replies with the first `size` bytes of the reserved memory. Errors:
  ///   not_connected     the call was answered, timed out or cancelled, or its session has ended
  ///   invalid_argument  nothing, or less than `size`, was reserved
  Status commit_reply(std::size_t size) const noexcept;
  /// The session of the call; empty once the session is gone.
  [[nodiscard]] ServedSession session() const noexcept;
  /// What the handshake has shown of the client; see ServedSession::peer_identity().
  [[nodiscard]] PeerIdentity peer() const noexcept { return session().peer_identity(); }

 private:
  friend struct detail::Internals;

  PendingCall(detail::EngineSlot* slot, detail::CallRef call) noexcept : slot_(slot), call_(call) {}

  detail::EngineSlot* slot_ = nullptr;
  detail::CallRef call_;
};

/// A call, as the server's handler receives it. The handler answers the call by reply(),
/// commit_reply() or refuse(), or takes a PendingCall by defer(). If none of these succeeds before
/// the handler returns, the library refuses the call. Hot.
class SPINWIRE_API Request {
 public:
  /// The method that is called.
  [[nodiscard]] Method method() const noexcept { return method_; }
  /// The request, where it arrived. See Reply if you do not trust the client.
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }
  /// Keeps the bytes beyond the handler; see Reply::keep().
  [[nodiscard]] BufferSlice keep() noexcept {
    if (size_ == 0) return {};
    kept_ = true;
    data_ = detail::in_block(block_, data_, size_);
    return BufferSlice(block_, data_, size_);
  }
  // These functions do what their namesakes of PendingCall do.

  /// Replies with a copy of the bytes. Errors:
  ///   not_connected     the call was answered, or its session has ended
  ///   message_too_long  longer than max_reply()
  ///   no_buffer         the send pool has no block for more than kSlotPayloadBytes, or for a reply
  ///                     over a connection
  Status reply(std::span<const std::byte> bytes) noexcept {
    return record_answer(call_.reply(bytes));
  }
  /// Replies with these bytes, without a copy. The memory may be written again once
  /// Buffer::unique() of its buffer is true; PendingCall::reply() says when. Errors:
  ///   not_connected     the call was answered, or its session has ended
  ///   message_too_long  longer than max_reply()
  ///   invalid_argument  memory of another engine
  ///   no_buffer         the send pool has no block for a reply over a connection
  Status reply(const BufferSlice& bytes) noexcept { return record_answer(call_.reply(bytes)); }
  /// Replies like reply(bytes). `done` runs once, in a poll() or the engine's destruction, when the
  /// library no longer uses the bytes; PendingCall::reply() says which status it gets. If the
  /// answer is not ok, it does not run. Errors:
  ///   not_connected     the call was answered, or its session has ended
  ///   message_too_long  longer than max_reply()
  ///   invalid_argument  no callback, or memory of another engine
  ///   no_buffer         the send pool has no block
  Status reply(const BufferSlice& bytes, const ReplyCompletionCallback& done) noexcept {
    return record_answer(call_.reply(bytes, done));
  }
  /// Refuses the call. Errors:
  ///   not_connected     the call was answered, or its session has ended
  ///   no_buffer         the send pool has no block for a reply over a connection
  Status refuse(std::string_view why) noexcept { return record_answer(call_.refuse(why)); }
  /// Refuses the call with a code. Errors:
  ///   not_connected     the call was answered, or its session has ended
  ///   no_buffer         the send pool has no block for a reply over a connection
  Status refuse(std::uint32_t code, std::string_view why) noexcept {
    return record_answer(call_.refuse(code, why));
  }
  /// Longest reply that the client can take, in bytes.
  [[nodiscard]] std::size_t max_reply() const noexcept { return call_.max_reply(); }
  /// Memory to write the reply into; see PendingCall::reserve_reply().
  [[nodiscard]] std::span<std::byte> reserve_reply(std::size_t size) const noexcept {
    return call_.reserve_reply(size);
  }
  /// Replies with the first `size` bytes of the reserved memory. Errors:
  ///   not_connected     the call was answered, or its session has ended
  ///   invalid_argument  nothing, or less than `size`, was reserved
  Status commit_reply(std::size_t size) noexcept { return record_answer(call_.commit_reply(size)); }
  /// The session.
  [[nodiscard]] ServedSession session() const noexcept { return call_.session(); }
  /// Who the client is.
  [[nodiscard]] PeerIdentity peer() const noexcept { return call_.peer(); }
  /// Answers the handle to answer the call with, after the handler has returned. The window does
  /// not bound deferred calls: a client may cancel its calls, or say that it has, and make new ones
  /// at once. Bound the calls that you keep, and refuse more. A call whose PendingCall::max_reply()
  /// is 0 is over, and needs no answer.
  [[nodiscard]] PendingCall defer() noexcept {
    answered_ = true;
    return call_;
  }

 private:
  friend struct detail::Internals;

  Request(const PendingCall& call, Method method, detail::Block* block, std::byte* data,
          std::size_t size) noexcept
      : call_(call), block_(block), data_(data), size_(size), method_(method) {}
  /// A reply that was refused does not answer the call.
  Status record_answer(Status status) noexcept {
    answered_ |= status == Status::ok;
    return status;
  }

  PendingCall call_;
  detail::Block* block_;
  std::byte* data_;
  std::size_t size_;
  Method method_;
  bool kept_ = false;
  bool answered_ = false;
};

/// Serves the calls of a method.
using MethodHandler = Callback<void(Request&)>;

/// Whether calls wait while their session is not ready: those that are made while it is `opening`,
/// and those that were made before and whose handlers have not run. The latter were not sent before
/// the session was interrupted, or a server has refused them because it ends the session.
/// is_retryable() holds for not_connected.
enum class WhenNotReady : std::uint8_t {
  /// call() answers not_connected. Calls that were made before end as not_connected.
  fail,
  /// Calls wait in the backlog, and are sent in their order when the session is ready. Their
  /// time-outs go on, and they can be cancelled. They end as not_connected if the session cannot be
  /// opened. Calls that were made before wait only with SessionOptions::reconnect: ahead of later
  /// ones, also beyond rpc.backlog.
  wait,
};

/// Names an accepted call of a session until it has ended. Plain data. A value is used again after
/// 2^32 calls of the session.
struct CallId {
  std::uint64_t value = ~std::uint64_t{0};  ///< all bits are set: empty
  explicit operator bool() const noexcept { return value != ~std::uint64_t{0}; }
  friend bool operator==(const CallId&, const CallId&) noexcept = default;
};

/// How a call is made.
struct CallOptions {
  Nanoseconds timeout{0};  ///< relative to the call; 0: rpc.call_timeout
  /// When the request is posted. A call may have to wait for the window, credit or the session's
  /// connection; then the poll() that ends the wait posts it.
  Post post = Post::automatic;
  /// Memory of this engine for a reply of up to its size; none: the reply is a message. The server
  /// may write to the memory, and its bytes are undefined, until `done` runs. If the server writes,
  /// a buffer uses a memory window (memory.windows). Registered memory, or a buffer when no window
  /// is free, needs a registration for each call. With direct messages, replies are fetched
  /// instead.
  ///
  /// On softverbs, a server's process that writes may be stopped meanwhile. If the call then ends
  /// with cancelled, timed_out, flushed or peer_lost, the server finishes that write when it
  /// continues, and the library keeps a reference until then. Drop such a buffer; do not use it
  /// again.
  std::optional<BufferSlice> reply_into{};
  std::optional<WhenNotReady> when_not_ready{};  ///< none: SessionOptions::when_not_ready
};

/// A client's session: a small value that may be copied. Hot unless marked otherwise.
class SPINWIRE_API Session {
 public:
  Session() noexcept = default;
  /// The state.
  [[nodiscard]] SessionState state() const noexcept;
  /// Whether the state is `ready`.
  [[nodiscard]] bool ready() const noexcept { return state() == SessionState::ready; }
  /// Longest request and longest reply of an inline call, in bytes; 0 unless ready. On adapters
  /// what one datagram holds besides a header of 16 bytes. On softverbs 32 KiB, or 4 KiB if
  /// memory.rendezvous_bytes is 0 at an end, unless rpc.direct_datagrams is "off" at one, or the
  /// network is simulated.
  [[nodiscard]] std::size_t max_inline_call() const noexcept;
  /// Longest request, in bytes: connections.max_message_bytes here and, once there is a connection
  /// for long calls, at the server. If queue_pair.access forbids peers to read,
  /// connections.eager_bytes. At least max_inline_call(). 0 unless ready.
  [[nodiscard]] std::size_t max_call() const noexcept;
  /// The server's "address:port": of the present attempt, and the one that is connected when the
  /// session is ready. Empty also if memory has run out. Set-up.
  [[nodiscard]] std::string peer() const noexcept;
  /// The local path of the present attempt, and the one in use when the session is ready; see
  /// SessionOptions::local_paths. Port 0 once the session is gone. Set-up.
  [[nodiscard]] LocalPath local_path() const noexcept;

  /// Calls a method. If it answers ok, `done` runs exactly once, inside a poll() and never inside
  /// this function; in a callback, perhaps in the same poll(). Do not change the request until
  /// then. The session's window limits the inline calls that are under way at once, and equally the
  /// long ones; further calls wait in the backlog. `id`, unless null, receives the call's id for
  /// cancel(). While the session is `opening`, WhenNotReady says whether calls wait. Errors:
  ///   would_block       rpc.backlog calls of this kind wait already; see
  ///                     SessionOptions::on_writable
  ///   message_too_long  longer than max_call()
  ///   invalid_argument  no callback, a negative time-out, memory of another engine, or
  ///                     `reply_into` without bytes (also: out of bounds) or of 4 GiB and more
  ///   unsupported       `reply_into`, but queue_pair.access forbids peers to write, or
  ///                     leases.maximum is 0
  ///   no_buffer         the call has to wait, and there is no memory to keep it
  ///   no_memory         no memory for the records of the session's first long call
  ///   not_connected     not ready, and the call may not wait for that
  Status call(Method method, const BufferSlice& request, const ReplyCallback& done,
              const CallOptions& options, CallId* id = nullptr) noexcept {
    return identify(submit_call(method, request, done, options), id);
  }
  /// Calls a method with a copy of the bytes. Errors:
  ///   would_block       rpc.backlog calls of this kind wait already; see
  ///                     SessionOptions::on_writable
  ///   message_too_long  longer than max_call()
  ///   invalid_argument  no callback, a negative time-out, or `reply_into` without bytes (also:
  ///                     out of bounds), of 4 GiB and more, or memory of another engine
  ///   unsupported       `reply_into`, but queue_pair.access forbids peers to write, or
  ///                     leases.maximum is 0
  ///   no_buffer         the send pool has no block for more than kSlotPayloadBytes; or the call
  ///                     has to wait, and there is no memory to keep it
  ///   no_memory         no memory for the records of the session's first long call
  ///   not_connected     not ready, and the call may not wait for that
  Status call(Method method, std::span<const std::byte> request, const ReplyCallback& done,
              const CallOptions& options, CallId* id = nullptr) noexcept {
    return identify(submit_call(method, request, done, options), id);
  }
  // Calls with default options.
  /// Calls a method; see the overload with CallOptions.
  Status call(Method method, const BufferSlice& request, const ReplyCallback& done,
              CallId* id = nullptr) noexcept {
    return identify(submit_call(method, request, done), id);
  }
  /// Calls a method; see the overload with CallOptions.
  Status call(Method method, std::span<const std::byte> request, const ReplyCallback& done,
              CallId* id = nullptr) noexcept {
    return identify(submit_call(method, request, done), id);
  }
  /// The id of the newest accepted call of the session that has neither ended nor been cancelled.
  /// Empty if there is none. Takes time in proportion to the window and the backlog.
  [[nodiscard]] CallId last_call() const noexcept;
  /// Loads the session's records into the cache. With thousands of sessions, call it some hundred
  /// nanoseconds before you use the session.
  void prefetch() const noexcept;
  /// Cancels a call: its callback runs with Status::cancelled in poll(), never inside this call,
  /// and by the end of the next poll(). Until then the call keeps its place in the window or the
  /// backlog. A late reply is dropped. Errors: invalid_argument (the call is not this session's,
  /// has ended or was cancelled already), not_connected (the session is gone).
  ///
  /// For a long call, the callback runs when the server no longer uses the call's memory. If the
  /// server does not confirm that within connections.close_timeout, the connection for long calls
  /// is closed, and its other calls end with peer_lost. Time-outs end calls in the same way.
  Status cancel(CallId id) noexcept;
  /// Closes the session. Its calls end with `flushed` by the end of the next poll(), long ones as
  /// soon as the server no longer uses their memory; no callback runs inside the call. The server
  /// is notified. on_closed runs when the server has confirmed, or after connections.close_timeout.
  /// Set-up. Errors: not_connected (closing or closed already).
  Status close() noexcept;
  /// What the session does, and what blocks it. Takes constant time.
  [[nodiscard]] SessionSnapshot snapshot() const noexcept;
  /// What the handshake has shown of the server; empty before it has answered. Valid until
  /// on_interrupted or on_closed runs.
  [[nodiscard]] PeerIdentity peer_identity() const noexcept;
  /// PeerIdentity::private_data of the server.
  [[nodiscard]] std::span<const std::byte> peer_private_data() const noexcept {
    return peer_identity().private_data;
  }

  friend bool operator==(const Session&, const Session&) noexcept = default;

 private:
  friend struct detail::Internals;

  Session(detail::EngineSlot* slot, std::uint64_t id) noexcept : slot_(slot), id_(id) {}

  Status submit_call(Method method, const BufferSlice& request, const ReplyCallback& done) noexcept;
  Status submit_call(Method method, std::span<const std::byte> request,
                     const ReplyCallback& done) noexcept;
  Status submit_call(Method method, const BufferSlice& request, const ReplyCallback& done,
                     const CallOptions& options) noexcept;
  Status submit_call(Method method, std::span<const std::byte> request, const ReplyCallback& done,
                     const CallOptions& options) noexcept;
  Status identify(Status accepted, CallId* id) const noexcept {
    if (id != nullptr && accepted == Status::ok) *id = accepted_call();
    return accepted;
  }
  /// The id of the call that was accepted last.
  [[nodiscard]] CallId accepted_call() const noexcept;

  detail::EngineSlot* slot_ = nullptr;
  std::uint64_t id_ = 0;
};

/// What Engine::visit_served_sessions() tells of a session.
struct ServedSessionInfo {
  ServedSession session;     ///< names it, for ServedSession::close()
  PeerIdentity peer;         ///< the client; valid during the visit
  std::uint32_t calls = 0;   ///< in progress: their handlers run or have deferred them
  std::uint32_t window = 0;  ///< calls that the client may have under way at once, of either kind
  Nanoseconds since_last_heard{0};  ///< as SessionSnapshot::since_last_heard, of the client
  bool is_leaving = false;          ///< it ends, by close() or Engine::drain()
};
/// Receives each session that an engine serves.
using ServedSessionVisitor = Callback<void(const ServedSessionInfo&)>;

/// How Engine::open_session() makes a session.
struct SessionOptions {
  /// The session is ready, for the first time or again.
  Callback<void(Session)> on_ready;
  /// The session is closed. Runs once, after its last call has ended. The error's status is ok
  /// after close(), and if the server has ended the session in order; Error::goodbye is what the
  /// server said, also when it refuses the session for a time. Otherwise the error says why the
  /// session could not be opened or was lost; of one that reconnects, see Reconnect.
  Callback<void(Session, const Error&)> on_closed;
  std::uint32_t window = 0;  ///< calls at once, a power of two up to 64; 0: rpc.window
  Nanoseconds timeout{0};    ///< of each attempt, until ready; 0: connections.connect_timeout
  /// Opens the session again when its server is lost, was restarted, has forgotten the session or
  /// closes it, or when an attempt fails. Close the session to end it. Calls whose handlers may
  /// have run end with peer_lost (with `flushed` if the server closed the session), and the library
  /// never sends them again. Calls that were not sent, or that the server refused because it ends
  /// the session: see WhenNotReady. A server that says goodbye (Error::goodbye) first answers the
  /// calls under way; no attempt at its address comes before Goodbye::retry_after. A server that
  /// has refused a call that waits again, and says no goodbye for connections.close_timeout, is
  /// lost.
  Reconnect reconnect{};
  /// Further addresses of the server, or of servers that can stand in for it, in the order in which
  /// they are tried; see Reconnect and Session::peer().
  std::vector<std::string> alternatives{};
  WhenNotReady when_not_ready = WhenNotReady::fail;  ///< of calls that do not say
  /// The session was interrupted and is opened again. The state is `opening`, and the calls that
  /// may have been sent have ended, but for long ones, whose memory the server may still use.
  /// on_ready or on_closed runs next.
  Callback<void(Session, const Error&)> on_interrupted{};
  /// A call answered would_block or no_buffer, and may succeed now. Runs once, in a poll(), for all
  /// such answers since the last time; call until would_block comes again. While the session is
  /// `opening`, it runs only if calls may wait (when_not_ready). While an engine waits for this,
  /// its sleeps are brief.
  Callback<void(Session)> on_writable{};
  /// Given to the server with each attempt; up to kPrivateDataMax bytes, which open_session()
  /// copies.
  std::span<const std::byte> private_data{};
  /// Ports and GIDs of this engine's device, in the order in which they are tried; see Reconnect,
  /// ConnectOptions::local_paths and Session::local_path(). Empty: the engine's. Datagrams leave by
  /// the engine's port and GID only. Through any other path, all calls of the session travel over a
  /// connection.
  std::vector<LocalPath> local_paths{};
};

}  // namespace spinwire
