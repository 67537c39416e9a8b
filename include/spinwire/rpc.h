// Remote calls. A server gives methods to Engine::serve() and listens as for connections. A client
// opens sessions with Engine::open_session() and calls methods. Each call ends once, with a reply
// or a status, and its handler runs at most once. All sessions of an engine share one datagram
// queue pair. spinwire.h has the rules for all functions; all functions here may be called from
// callbacks.
//
// Short calls travel as datagrams. Long calls (a request longer than a datagram, or
// CallOptions::reply_into) travel over a reliable connection. The session makes it for its first
// long call, and again if it is lost. The server reads long requests, and writes replies to the
// named memory. Long calls are not ordered with short ones.
//
// If one of the two engines has no datagrams (because of its device or rpc.transport), all calls of
// the session travel over such a connection, with the same limits. The session is then ready when
// its connection is. If the connection is lost, its calls end with peer_lost, and the client makes
// another; further calls wait for it, and the session stays ready. The session ends with peer_lost
// if the new connection cannot be made, or is lost within connections.close_timeout.
//
// A server that hears nothing from a session for connections.peer_timeout forgets it; when the
// client is heard again, the session ends with peer_lost. A client that hears nothing from a server
// for two connections.keepalive_interval asks the server's address for its engine. If another
// engine answers, the session ends with peer_lost; otherwise it does after connections.peer_timeout
// of silence. A server forgets a session that has no datagrams after that time without a
// connection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include "spinwire/buffer.h"
#include "spinwire/callback.h"
#include "spinwire/clock.h"
#include "spinwire/connection.h"
#include "spinwire/export.h"
#include "spinwire/status.h"

namespace spinwire {

/// Identifies a method of a server. Methods index a dense table, so keep the numbers small.
using Method = std::uint16_t;

/// Requests and replies up to this many bytes are stored in the call's record and fit in a
/// cacheline.
inline constexpr std::size_t kShortCall = 48;

namespace detail {
/// Where received bytes can be kept: in the block. Copies bytes that lie elsewhere, in the device's
/// memory, into it.
inline std::byte* in_block(Block* block, std::byte* data, std::size_t size) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(block->payload);
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  if (at - begin < block->capacity) return data;
  std::memcpy(block->payload, data, size);
  return block->payload;
}
}  // namespace detail

/// How a call ended. Valid during its callback. The bytes lie where they arrived. On softverbs,
/// unless rpc.direct_datagrams is "off", the peer's process can still write to short ones: if you
/// do not trust the peer, copy or keep() the bytes before you validate them. Hot.
class SPINWIRE_API Reply {
 public:
  /// How the call ended:
  ///   ok           the server has replied
  ///   refused      the handler refused the call; text() says why
  ///   unsupported  the server has no such method
  ///   timed_out    the time-out passed; the handler may have run
  ///   cancelled    by Session::cancel(); the handler may have run
  ///   flushed      the session was closed; the handler may have run
  ///   peer_lost    the server or the connection for long calls was lost; the handler may have run
  /// A long call whose handler has not run may also end with no_buffer (the server's pool
  /// memory.rendezvous_bytes had no block for connections.rendezvous_timeout), message_too_long
  /// (the server takes no request of that length), or the status with which its connection failed.
  [[nodiscard]] Status status() const noexcept { return status_; }
  /// The reply; with CallOptions::reply_into, the first bytes of that memory.
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }
  /// The reason of a server that refused.
  [[nodiscard]] std::string_view text() const noexcept {
    return {reinterpret_cast<const char*>(data_), status_ != Status::ok ? size_ : 0};
  }
  /// Keeps the bytes beyond the callback: a slice of the receive in which they arrived, or of a
  /// block to which short bytes are copied. bytes() then answers the kept bytes. Empty if there are
  /// none.
  [[nodiscard]] BufferSlice keep() noexcept {
    if (block_ == nullptr || size_ == 0) return {};
    kept_ = true;
    std::byte* const data = detail::in_block(block_, const_cast<std::byte*>(data_), size_);
    data_ = data;  // so that they are copied once
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
};

using ReplyCallback = Callback<void(Reply&)>;

/// A call that is answered later, from any callback or between polls. Copies name the same call,
/// and dropping it does not answer. Hot.
class SPINWIRE_API PendingCall {
 public:
  PendingCall() noexcept = default;
  /// Replies with a copy of the bytes. Errors:
  ///   not_connected     the call was answered, timed out or cancelled, or its session has ended
  ///   message_too_long  longer than max_reply()
  ///   no_buffer         the send pool has no block for more than kShortCall bytes
  Status reply(std::span<const std::byte> bytes) const noexcept;
  /// Replies with these bytes, without a copy. Holds a reference until the client has certainly the
  /// reply: until its next call in the same slot, the session's end, or
  /// connections.keepalive_interval without a call; over a connection, until it is written. Errors:
  /// as above, and invalid_argument (memory of another engine).
  Status reply(const BufferSlice& bytes) const noexcept;
  /// Refuses the call: it ends with `refused` and the first kShortCall bytes of the text. Errors:
  /// not_connected, no_buffer.
  Status refuse(std::string_view why) const noexcept;
  /// Longest reply in bytes: a datagram, or the memory that the client named; 0 once the call is
  /// over.
  [[nodiscard]] std::size_t max_reply() const noexcept;
  /// Memory to build a reply of up to `size` bytes in, without a copy; its bytes are undefined.
  /// Finish with commit_reply(). The memory belongs to the call until it is answered or over. A
  /// call may end in any poll(): check max_reply() before you write after one. If another thread or
  /// a device fills the memory, use a buffer of your own and reply(BufferSlice). Empty if `size` is
  /// more than a datagram takes, the call names memory for its reply or is over, or the send pool
  /// has no block.
  [[nodiscard]] std::span<std::byte> reserve_reply(std::size_t size) const noexcept;
  /// Replies with the first `size` bytes of the reserved memory. Errors: those of reply(), and
  /// invalid_argument (more than was reserved).
  Status commit_reply(std::size_t size) const noexcept;

 private:
  friend struct detail::Internals;

  PendingCall(detail::EngineSlot* slot, std::uint32_t session, std::uint32_t number) noexcept
      : slot_(slot), session_(session), number_(number) {}

  detail::EngineSlot* slot_ = nullptr;
  std::uint32_t session_ = 0;
  std::uint32_t number_ = 0;
};

/// A call, as the server's handler receives it. The handler answers it by reply(), commit_reply()
/// or refuse(), or takes a PendingCall by defer(). If none of these succeeds before the handler
/// returns, the library refuses the call. Hot.
class SPINWIRE_API Request {
 public:
  [[nodiscard]] Method method() const noexcept { return method_; }
  /// The request, where it arrived; see Reply about peers that you do not trust.
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }
  /// As Reply::keep().
  [[nodiscard]] BufferSlice keep() noexcept {
    if (size_ == 0) return {};
    kept_ = true;
    data_ = detail::in_block(block_, data_, size_);
    return BufferSlice(block_, data_, size_);
  }
  // As those of PendingCall.
  Status reply(std::span<const std::byte> bytes) noexcept { return note(call_.reply(bytes)); }
  Status reply(const BufferSlice& bytes) noexcept { return note(call_.reply(bytes)); }
  Status refuse(std::string_view why) noexcept { return note(call_.refuse(why)); }
  [[nodiscard]] std::size_t max_reply() const noexcept { return call_.max_reply(); }
  [[nodiscard]] std::span<std::byte> reserve_reply(std::size_t size) const noexcept {
    return call_.reserve_reply(size);
  }
  Status commit_reply(std::size_t size) noexcept { return note(call_.commit_reply(size)); }
  /// The handle to answer the call with, after the handler has returned.
  [[nodiscard]] PendingCall defer() noexcept {
    answered_ = true;
    return call_;
  }

 private:
  friend struct detail::Internals;

  Request(const PendingCall& call, Method method, detail::Block* block, std::byte* data,
          std::size_t size) noexcept
      : call_(call), block_(block), data_(data), size_(size), method_(method) {}
  /// A reply that was not accepted does not answer the call.
  Status note(Status status) noexcept {
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

using MethodHandler = Callback<void(Request&)>;

enum class SessionState : std::uint8_t { opening, ready, closing, closed };

/// Names a call of a session.
struct CallId {
  std::uint32_t number = 0;
};

struct CallOptions {
  Nanoseconds timeout{0};  ///< from the call on; 0: rpc.call_timeout
  /// When the request is posted. A call that has to wait (for the window, credit or the session's
  /// connection) is posted by the poll() that ends the wait.
  Post post = Post::automatic;
  /// Memory of this engine for a reply of up to its size. The server may write to it, and its bytes
  /// are undefined, until `done` runs. On softverbs, if the server's process was stopped during a
  /// write and the call ended with cancelled, timed_out, flushed or peer_lost, the server finishes
  /// that write when it continues; the library keeps a reference meanwhile: drop such a buffer, do
  /// not use it again. A buffer uses a memory window (memory.windows); registered memory, or a
  /// buffer when no window is free, costs a registration for each call.
  BufferSlice reply_into{};
};

/// A client's session: a small value that may be copied. Hot unless marked otherwise.
class SPINWIRE_API Session {
 public:
  Session() noexcept = default;
  [[nodiscard]] SessionState state() const noexcept;
  [[nodiscard]] bool ready() const noexcept { return state() == SessionState::ready; }
  /// Longest request and reply of a short call, in bytes; 0 unless ready.
  [[nodiscard]] std::size_t max_inline_call() const noexcept;
  /// Longest request, in bytes: connections.max_message_bytes here and, once there is a connection
  /// for long calls, at the server; 0 unless ready.
  [[nodiscard]] std::size_t max_call() const noexcept;

  /// Calls a method. If it answers ok, `done` runs exactly once, in a later poll(). Do not change
  /// the request until then. As many short calls as the session's window, and as many long ones,
  /// are under way at once; further calls wait in the backlog. `id`, unless null, receives the
  /// call's id for cancel(). Errors:
  ///   would_block       rpc.backlog calls of this kind wait already
  ///   message_too_long  longer than max_call()
  ///   invalid_argument  no callback, a negative time-out, an empty `reply_into`, or memory of
  ///                     another engine
  ///   unsupported       `reply_into`, but queue_pair.access forbids peers to write, or
  ///                     leases.maximum is 0
  ///   no_buffer         the call has to wait, and the send pool has no block for it
  ///   no_memory         the records for the session's first long call
  ///   not_connected     not ready
  Status call(Method method, const BufferSlice& request, const ReplyCallback& done,
              const CallOptions& options, CallId* id = nullptr) noexcept {
    return identify(submit_call(method, request, done, options), id);
  }
  /// Calls a method with a copy of up to kShortCall bytes. Errors: as above; message_too_long for
  /// more.
  Status call(Method method, std::span<const std::byte> request, const ReplyCallback& done,
              const CallOptions& options, CallId* id = nullptr) noexcept {
    return identify(submit_call(method, request, done, options), id);
  }
  // With default options.
  Status call(Method method, const BufferSlice& request, const ReplyCallback& done) noexcept;
  Status call(Method method, std::span<const std::byte> request,
              const ReplyCallback& done) noexcept;
  /// The id of the call that the session accepted last.
  [[nodiscard]] CallId last_call() const noexcept;
  /// Loads the session's records into the cache. With thousands of sessions, call it on the session
  /// that you will use some hundred nanoseconds later.
  void prefetch() const noexcept;
  /// Ends a call with `cancelled`. `done` runs by the end of the next poll(), never inside this
  /// call; until then the call keeps its place in the window or the backlog. A late reply is
  /// dropped. `done` of a long call runs when the server no longer uses its memory. If the server
  /// does not confirm that within connections.close_timeout, the connection for long calls is
  /// closed, and its other calls end with peer_lost. Time-outs end calls in the same way. Errors:
  /// invalid_argument (the call is over).
  Status cancel(CallId id) noexcept;
  /// Closes the session. Its calls end with `flushed` by the end of the next poll(), long ones as
  /// soon as the server no longer uses their memory; no callback runs inside this call. The server
  /// is told, and on_closed runs when it has confirmed, or after connections.close_timeout. Set-up.
  /// Errors: not_connected (closing or closed already).
  Status close() noexcept;

  friend bool operator==(const Session&, const Session&) noexcept = default;

 private:
  friend struct detail::Internals;

  Session(detail::EngineSlot* slot, std::uint64_t id) noexcept : slot_(slot), id_(id) {}

  Status submit_call(Method method, const BufferSlice& request, const ReplyCallback& done,
                     const CallOptions& options) noexcept;
  Status submit_call(Method method, std::span<const std::byte> request, const ReplyCallback& done,
                     const CallOptions& options) noexcept;
  Status identify(Status accepted, CallId* id) const noexcept {
    if (id != nullptr && accepted == Status::ok) *id = last_call();
    return accepted;
  }

  detail::EngineSlot* slot_ = nullptr;
  std::uint64_t id_ = 0;
};

struct SessionOptions {
  Callback<void(Session)> on_ready;
  /// The session is closed. Runs once, after its last call has ended. The error's status is ok
  /// after close(); otherwise the error says why the session could not be opened or was lost.
  Callback<void(Session, const Error&)> on_closed;
  std::uint32_t window = 0;  ///< calls at once, a power of two up to 64; 0: rpc.window
  Nanoseconds timeout{0};    ///< until ready; 0: connections.connect_timeout
};

/// Counts since the engine was opened, unless marked "now".
struct RpcStats {
  std::uint64_t calls = 0;          ///< accepted calls of clients here
  std::uint64_t replies = 0;        ///< calls that ended by a reply or a refusal
  std::uint64_t retransmits = 0;    ///< requests sent again as datagrams
  std::uint64_t served = 0;         ///< handlers run here
  std::uint64_t resent = 0;         ///< replies sent again, because the request came again
  std::uint64_t duplicates = 0;     ///< requests dropped, because the call is served or over
  std::uint64_t late = 0;           ///< replies and closings dropped: the call or session is over
  std::uint64_t bad_datagrams = 0;  ///< dropped: malformed, or of no known session
  std::uint64_t slowed = 0;         ///< reductions of a session's congestion window
  std::uint64_t unsent = 0;         ///< datagrams without room in the send queue
  std::uint64_t bulk_calls = 0;     ///< calls over connections
  /// Violations of the protocol on such connections, each of which ended its connection, and
  /// refused connections that belong to no session.
  std::uint64_t bad_bulk = 0;
  std::uint32_t sessions = 0;         ///< opened by us, now
  std::uint32_t served_sessions = 0;  ///< opened by peers, now
};

}  // namespace spinwire
