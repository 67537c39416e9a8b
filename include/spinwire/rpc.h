// Remote procedure calls: many sessions over one datagram queue pair, each call answered once or
// ended with a status. A server gives methods to Engine::serve() and listens as for connections; a
// client opens sessions with Engine::open_session() and calls. Everything runs inside poll().
//
// Calls whose request is longer than a datagram, and those that name memory for their reply
// (CallOptions::reply_into), go over a reliable connection, which their session makes when it first
// needs one, and again when it was lost: long requests are pulled by the server, replies to named
// memory are written there by its device. They are not in order with short ones.
//
// Where one of the two ends has no datagrams, as its device has none or by `rpc.transport`, all
// calls go over such a connection, with the same limits of length, window and backlog; the others'
// sessions in the same engine stay as they are. The session is then ready when its connection is,
// which counts as one of connections.maximum at both ends. When that is lost (which it finds out by
// itself, also while idle), calls under way end with peer_lost and the client makes another at
// once, for which further calls wait; the session stays ready. It ends with peer_lost if that
// cannot be made, or is lost as well within connections.close_timeout. A server forgets a session
// that has been without a connection for connections.peer_timeout. (iWARP devices have no
// datagrams, but no engine opens on them yet: they have no immediates, and connect through rdma_cm
// alone.)
//
// A server that hears nothing of a session for connections.peer_timeout forgets it, and says so
// when its client is heard again: the session ends with peer_lost. A client that hears nothing for
// two connections.keepalive_interval asks at the address that it opened the session with whether
// the same engine is there; if another one is, or the server's next life, its silent sessions with
// the first end with peer_lost. Else they do after connections.peer_timeout of silence.
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

/// Which of a server's methods; they are looked up in a table that is as long as the highest.
using Method = std::uint16_t;

/// Requests and replies up to this many bytes are kept beside the call and sent with one cacheline.
inline constexpr std::size_t kShortCall = 48;

namespace detail {
/// Where bytes that arrived can stay: they lie in the block, or, if few came where the device had
/// them, are copied there.
inline std::byte* in_block(Block* block, std::byte* data, std::size_t size) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(block->payload);
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  if (at - begin < block->capacity) return data;
  std::memcpy(block->payload, data, size);
  return block->payload;
}
}  // namespace detail

/// How a call ended, inside its callback. The bytes lie where they arrived: on the embedded device
/// short ones where the peer's process could write still, unless rpc.direct_datagrams is "off". Who
/// does not trust it copies, or keeps, them before he looks.
class SPINWIRE_API Reply {
 public:
  /// ok: the server has answered. refused: its handler did not want to, text() says why.
  /// unsupported: the server has no such method. timed_out: the deadline passed; cancelled: by
  /// Session::cancel(); flushed: the session was closed; peer_lost: the server does not answer any
  /// more, or the connection for long calls was lost. After the last four the handler may have run
  /// or not. Of a long call also, and then it has not run: no_buffer (the server's pool
  /// memory.rendezvous_bytes stayed dry for connections.rendezvous_timeout), message_too_long (the
  /// server takes no requests of that length), and whatever kept the connection from being made:
  /// limit, refused, timed_out and others.
  [[nodiscard]] Status status() const noexcept { return status_; }
  /// With CallOptions::reply_into, and ok: the first bytes of that.
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }
  /// What a server that refused said.
  [[nodiscard]] std::string_view text() const noexcept {
    return {reinterpret_cast<const char*>(data_), status_ != Status::ok ? size_ : 0};
  }
  /// The same bytes to be kept beyond the callback: the receive they arrived in is not used again
  /// while the slice lives. Short ones that took none, as the device has them to be read where they
  /// lie, are copied to a block of the same pool; bytes() are those from then on. Empty if there
  /// are none.
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

/// The right to answer a call later, from any callback or between polls. A plain handle: copies
/// mean the same call, and dropping it answers nothing. May outlive the call, its session and its
/// engine, and answers not_connected then.
class SPINWIRE_API PendingCall {
 public:
  PendingCall() noexcept = default;
  /// Copies the bytes. Errors: not_connected (the call is over for its client, as far as is known
  /// here: its time is over, it was cancelled, or the session ended; or it was answered),
  /// message_too_long (than max_reply()), no_buffer (the send pool is dry, for more than
  /// kShortCall), wrong_thread, forked_child. Hot.
  Status reply(std::span<const std::byte> bytes) const noexcept;
  /// Copies nothing: holds a reference until the next call in the same place, the session's end, or
  /// until its client was idle for connections.keepalive_interval; of a reply over a connection,
  /// until it is written.
  Status reply(const BufferSlice& bytes) const noexcept;
  /// Ends the call at its client with `refused` and as much of the text as fits.
  Status refuse(std::string_view why) const noexcept;
  /// Longest reply, bytes: a datagram's, or the memory that the client named; 0 once it is over.
  [[nodiscard]] std::size_t max_reply() const noexcept;
  /// Memory of the call's own place in its session, to write a reply of up to `size` bytes into:
  /// nothing is copied and, while the session is in use and the place has it, no pool is asked.
  /// What it holds is undefined. It is this call's until it is answered or over, as max_reply()
  /// tells: then it is the next call's, or goes back to its pool. The client may give the call up
  /// in any poll(), so ask max_reply() before writing after one; what another thread or a device is
  /// to fill takes a buffer of one's own, for reply(BufferSlice). Empty if `size` is more than a
  /// datagram takes, the call names memory for its reply or is over, or memory is short. Hot.
  [[nodiscard]] std::span<std::byte> reserve_reply(std::size_t size) const noexcept;
  /// Replies with the first bytes of it. Errors: as reply(); invalid_argument (reserve_reply() was
  /// not asked for as many). Hot.
  Status commit_reply(std::size_t size) const noexcept;

 private:
  friend struct detail::Internals;

  PendingCall(detail::EngineSlot* slot, std::uint32_t session, std::uint32_t number) noexcept
      : slot_(slot), session_(session), number_(number) {}

  detail::EngineSlot* slot_ = nullptr;
  std::uint32_t session_ = 0;
  std::uint32_t number_ = 0;
};

/// A call as the server's handler has it, in place where it arrived or, if it is long, in a block
/// of the pool memory.rendezvous_bytes. To be answered by one of reply(), refuse() and defer(),
/// before the handler returns; else, and if none of them answered ok, the call is refused.
class SPINWIRE_API Request {
 public:
  [[nodiscard]] Method method() const noexcept { return method_; }
  /// As Reply's.
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }
  /// As Reply::keep().
  [[nodiscard]] BufferSlice keep() noexcept {
    if (size_ == 0) return {};
    kept_ = true;
    data_ = detail::in_block(block_, data_, size_);
    return BufferSlice(block_, data_, size_);
  }
  /// As PendingCall's. Hot.
  Status reply(std::span<const std::byte> bytes) noexcept { return note(call_.reply(bytes)); }
  Status reply(const BufferSlice& bytes) noexcept { return note(call_.reply(bytes)); }
  Status refuse(std::string_view why) noexcept { return note(call_.refuse(why)); }
  [[nodiscard]] std::size_t max_reply() const noexcept { return call_.max_reply(); }
  [[nodiscard]] std::span<std::byte> reserve_reply(std::size_t size) const noexcept {
    return call_.reserve_reply(size);
  }
  Status commit_reply(std::size_t size) noexcept { return note(call_.commit_reply(size)); }
  /// The handler will answer, or not, when it likes.
  [[nodiscard]] PendingCall defer() noexcept {
    answered_ = true;
    return call_;
  }

 private:
  friend struct detail::Internals;

  Request(const PendingCall& call, Method method, detail::Block* block, std::byte* data,
          std::size_t size) noexcept
      : call_(call), block_(block), data_(data), size_(size), method_(method) {}
  /// What could not be sent is no answer.
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

/// Names a call of a session, for cancel().
struct CallId {
  std::uint32_t number = 0;
};

struct CallOptions {
  Nanoseconds timeout{0};  ///< counted from the call; 0: rpc.call_timeout
  /// When the request is on its way. One that has to wait (for the window, for credit, for its
  /// session's connection) goes out with the poll that finds the way free, whatever this says.
  Post post = Post::automatic;
  /// Where a reply of up to its size is to be written: a part of a buffer of this engine's, or of
  /// memory registered with it. Its bytes are undefined, and the server may write to it, until
  /// done() runs. On the embedded device it may write beyond that if its process was stopped in the
  /// midst of a write, and the connection given up (the call ends with cancelled, timed_out,
  /// flushed or peer_lost): it finishes the write when it goes on. The library holds a reference
  /// meanwhile, so that no pool hands the memory out again; drop such a buffer rather than use it
  /// again. Memory of a buffer is opened by a memory window (memory.windows); registered memory,
  /// and buffers when no window is free, cost a registration each call.
  BufferSlice reply_into{};
};

/// A client's handle of a session, as Connection is one of a connection; see spinwire.h for what
/// holds for all handles. All of it can be called from callbacks.
class SPINWIRE_API Session {
 public:
  Session() noexcept = default;
  [[nodiscard]] SessionState state() const noexcept;
  [[nodiscard]] bool ready() const noexcept { return state() == SessionState::ready; }
  /// Longest request and reply that take one datagram, bytes, and as much over a connection; 0
  /// unless ready.
  [[nodiscard]] std::size_t max_inline_call() const noexcept;
  /// Longest request of all, bytes: connections.max_message_bytes here and, as soon as there is a
  /// connection for long calls, at the server; 0 unless ready.
  [[nodiscard]] std::size_t max_call() const noexcept;

  /// Calls a method: done() runs exactly once, in a poll(), if this answers ok. The request is held
  /// by reference until then and must not be changed. As many calls as the window are under way at
  /// once, and as many long ones; further ones wait here. Errors: would_block (rpc.backlog calls of
  /// either sort wait already), message_too_long (than max_call()), not_connected (not ready),
  /// invalid_argument (a timeout below 0; no callback; the request or `reply_into` is memory of
  /// another engine, or `reply_into` is empty), unsupported (`reply_into`, but queue_pair.access
  /// does not let peers write, or leases.maximum, whose records are used for it, is 0), no_buffer
  /// (a call has to wait, and the send pool has no room for that), no_memory (a session's first
  /// long call), wrong_thread, forked_child. Hot.
  Status call(Method method, const BufferSlice& request, const ReplyCallback& done,
              const CallOptions& options) noexcept;
  /// The same for up to kShortCall bytes, which are copied; message_too_long for more. Hot.
  Status call(Method method, std::span<const std::byte> request, const ReplyCallback& done,
              const CallOptions& options) noexcept;
  /// The two with the options as they are by themselves, which need not be looked at. Hot.
  Status call(Method method, const BufferSlice& request, const ReplyCallback& done) noexcept;
  Status call(Method method, std::span<const std::byte> request,
              const ReplyCallback& done) noexcept;
  /// The first two, which tell the call's id unless `id` is null, if they answer ok. Hot.
  Status call(Method method, const BufferSlice& request, const ReplyCallback& done,
              const CallOptions& options, CallId* id) noexcept {
    return identify(call(method, request, done, options), id);
  }
  Status call(Method method, std::span<const std::byte> request, const ReplyCallback& done,
              const CallOptions& options, CallId* id) noexcept {
    return identify(call(method, request, done, options), id);
  }
  /// The call that was accepted last.
  [[nodiscard]] CallId last_call() const noexcept;
  /// Asks for the session's records, which with thousands of sessions are in no cache, so that a
  /// call that follows some hundred nanoseconds later does not wait for them. Of any session, also
  /// one that is over. Hot.
  void prefetch() const noexcept;
  /// Ends a call with `cancelled`, at once: done() runs inside. A reply that comes later is
  /// dropped. A long call whose memory the server may be using is another matter: done() runs when
  /// the server has let go of it; without an answer within connections.close_timeout the connection
  /// for long calls is given up, and its other calls end with peer_lost. Passed deadlines end calls
  /// in the same way. Errors: invalid_argument (it is over), wrong_thread, forked_child.
  Status cancel(CallId id) noexcept;
  /// Ends all calls with `flushed` (long ones as soon as nobody uses their memory), tells the
  /// server, and is closed when it has heard, or when connections.close_timeout is over. Errors:
  /// not_connected, wrong_thread, forked_child.
  Status close() noexcept;

  friend bool operator==(const Session&, const Session&) noexcept = default;

 private:
  friend struct detail::Internals;

  Session(detail::EngineSlot* slot, std::uint64_t id) noexcept : slot_(slot), id_(id) {}
  Status identify(Status accepted, CallId* id) const noexcept {
    if (id != nullptr && accepted == Status::ok) *id = last_call();
    return accepted;
  }

  detail::EngineSlot* slot_ = nullptr;
  std::uint64_t id_ = 0;
};

struct SessionOptions {
  Callback<void(Session)> on_ready;
  /// The last thing that is heard of it: ok after close(), else why it could not be opened or was
  /// lost. Its calls have ended by then.
  Callback<void(Session, const Error&)> on_closed;
  std::uint32_t window = 0;  ///< calls under way at once, a power of two up to 64; 0: rpc.window
  Nanoseconds timeout{0};    ///< until it is ready; 0: connections.connect_timeout
};

/// Counted since the engine was opened, unless marked "now".
struct RpcStats {
  std::uint64_t calls = 0;          ///< of clients here: accepted
  std::uint64_t replies = 0;        ///< of those: ended by a reply, refusals included
  std::uint64_t retransmits = 0;    ///< requests sent again, as datagrams
  std::uint64_t served = 0;         ///< handlers run here
  std::uint64_t resent = 0;         ///< replies sent again, as the request came again
  std::uint64_t duplicates = 0;     ///< requests dropped: a handler has them, or they are over
  std::uint64_t late = 0;           ///< replies dropped: nobody waits for them any more
  std::uint64_t bad_datagrams = 0;  ///< dropped: malformed, or of nobody that we know
  std::uint64_t slowed = 0;         ///< times that a session's calls were cut for congestion
  std::uint64_t unsent = 0;         ///< datagrams that the send queue had no room for
  std::uint64_t bulk_calls = 0;     ///< of `calls`: over connections
  /// What no peer of this protocol says on such connections, each of which it ended; and
  /// connections that were refused since they fit no session.
  std::uint64_t bad_bulk = 0;
  std::uint32_t sessions = 0;         ///< opened by us, now
  std::uint32_t served_sessions = 0;  ///< opened by peers, now
};

}  // namespace spinwire
