// A connection: a small copyable handle to a pooled state machine inside its engine.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "spinwire/buffer.h"
#include "spinwire/callback.h"
#include "spinwire/clock.h"
#include "spinwire/connection_settings.h"
#include "spinwire/endpoint.h"
#include "spinwire/export.h"
#include "spinwire/message.h"
#include "spinwire/raw.h"
#include "spinwire/status.h"

namespace spinwire {

class Connection;
class MemoryRegion;
class RemoteMemory;
struct LeaseId;
struct LeaseOptions;
struct LeaseReply;
struct Returned;

enum class ConnectionState : std::uint8_t {
  resolving,   ///< the TCP connection is being made
  exchanging,  ///< handshake and set-up of the queue pair
  ready,       ///< operations are accepted, until close(), the peer's close, or an error
  draining,    ///< outstanding operations end, for up to connections.close_timeout
  closed,      ///< nothing is outstanding; the handle answers `not_connected`
};
SPINWIRE_API std::string_view to_string(ConnectionState state) noexcept;

/// The state of a queue pair (IBV_QPS_*).
enum class QueuePairState : std::uint8_t { reset, init, rtr, rts, sqd, sqe, err, unknown };
SPINWIRE_API std::string_view to_string(QueuePairState state) noexcept;

/// When an operation reaches the device.
enum class Post : std::uint8_t {
  automatic,  ///< `now` between polls, `defer` inside callbacks
  now,        ///< at once, behind the operations that the connection has deferred
  defer,      ///< with the next flush(), or at the end of the poll()
};

/// How an accepted operation ended.
struct Completion {
  Status status = Status::ok;
  std::size_t bytes = 0;    ///< payload bytes moved; 0 unless ok
  std::uint64_t value = 0;  ///< value that an atomic found, in host order; else 0
};
/// Runs inside poll(), exactly once for each accepted operation.
using CompletionCallback = Callback<void(const Completion&)>;

/// Reports how a request about a lease ended; see lease.h. Runs like a CompletionCallback.
using LeaseCallback = Callback<void(LeaseReply&)>;

/// Names an accepted operation until it has ended. Plain data. A value is used again after 2^32
/// operations at the earliest.
struct OperationId {
  std::uint64_t value = ~std::uint64_t{0};
  explicit operator bool() const noexcept { return value != ~std::uint64_t{0}; }
  friend bool operator==(const OperationId&, const OperationId&) noexcept = default;
};

/// Callbacks of a connection. Any may be empty. See spinwire.h for what callbacks may do.
struct ConnectionHandlers {
  /// The connection became ready.
  Callback<void(Connection)> on_ready;
  /// A message or a write with immediate arrived. Runs in the order in which the peer sent them.
  Callback<void(Connection, Message&)> on_message;
  /// The peer offers a message longer than connections.eager_bytes, possibly while earlier messages
  /// are still on the way. on_message runs when it has arrived, in order.
  Callback<void(Connection, Offer&)> on_offer;
  /// The peer leases memory to us. Move it out of the argument to keep it; otherwise the lease is
  /// refused. May overtake long messages.
  Callback<void(Connection, RemoteMemory&)> on_lease;
  /// Memory that the peer had from us has come back, and no peer can reach it any more.
  Callback<void(Connection, const Returned&)> on_returned;
  /// The connection is `closed`. Runs once, after the last completion. The error's status is `ok`
  /// after close() on either side; otherwise it is the first thing that went wrong, also if the
  /// connection was made again since.
  Callback<void(Connection, const Error&)> on_closed;
  /// The connection was lost and is being made again (see Reconnect): it is `resolving`, and
  /// everything that was outstanding has ended. on_ready or on_closed runs next.
  Callback<void(Connection, const Error&)> on_interrupted;
};

struct ConnectionStats {
  std::uint64_t messages_sent = 0;
  std::uint64_t messages_received = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t writes = 0;
  std::uint64_t reads = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t bytes_read = 0;
  std::uint64_t atomics = 0;
  /// Accepted operations that have not ended, including cancelled ones that the device still has.
  /// The connection's own requests are in ConnectionSnapshot::control.
  std::uint32_t outstanding = 0;
  std::uint32_t send_credits = 0;     ///< messages that we may send now
  std::uint32_t granted_credits = 0;  ///< messages that the peer may send now
};

/// What keeps the next send() from being accepted.
enum class Blocker : std::uint8_t {
  nothing,
  not_ready,   ///< the connection is in another state than `ready`
  send_queue,  ///< the send queue (queues.send_depth) is full; the peer or its device is slow
  operations,  ///< all operations of the engine (queues.operations) are under way
  credit,      ///< the peer grants no credit until its application polls
  /// Only messages longer than connections.eager_bytes are blocked: the engine can offer no more of
  /// them now, or no memory window is free (memory.windows).
  windows,
};
SPINWIRE_API std::string_view to_string(Blocker blocker) noexcept;

/// What a connection is doing.
struct ConnectionSnapshot {
  ConnectionState state = ConnectionState::closed;
  Blocker blocked_by = Blocker::not_ready;
  /// Time since the peer's process was heard, up to the last poll(): by a message, or by a sign
  /// that it polls, which each end gives every connections.keepalive_interval or more often. What
  /// its device completes is no such sign.
  Nanoseconds silence{0};
  // Outstanding operations by kind, including cancelled ones that the device still has.
  std::uint32_t messages = 0;
  std::uint32_t writes = 0;
  std::uint32_t reads = 0;
  std::uint32_t atomics = 0;
  /// The connection's own requests: credit and signs of life, goodbye, binding of memory windows,
  /// messages about long messages and leases, and READs of the peer's long messages.
  std::uint32_t control = 0;
  std::uint32_t receives = 0;  ///< posted receives of a raw connection
  // Leases that have not ended.
  std::uint32_t leased_out = 0;  ///< to the peer, including keys of KeyScope::connection
  std::uint64_t leased_out_bytes = 0;
  std::uint32_t leases_held = 0;  ///< of the peer's memory
  std::uint64_t leases_held_bytes = 0;
  ConnectionStats stats;
};

/// A region as bytes that can be sent anywhere; see Connection::token().
inline constexpr std::size_t kRegionTokenBytes = 48;
using RegionToken = std::array<std::byte, kRegionTokenBytes>;

namespace detail {
struct EngineSlot;
}

/// A connection: a small value that may be copied. spinwire.h has the rules for all handles.
///
/// Operations (send() to fetch_add(), post_receive() and send_raw()) copy no payload, except
/// send_copy(). If the call answers ok, the operation is accepted, and `done` runs exactly once, in
/// a later poll(). `id`, unless null, then receives the operation's id for cancel(). Any other
/// answer means that nothing was taken. All functions may be called from callbacks. Hot unless
/// marked otherwise.
class SPINWIRE_API Connection {
 public:
  Connection() noexcept = default;

  /// Sends a message of up to max_message() bytes, which arrives whole, once and in order. `done`
  /// runs when the peer's device has it. The peer's engine reads messages longer than
  /// connections.eager_bytes; `done` then runs when they were read, with `refused` if the peer's
  /// application refused the message, or `no_buffer` if its pool had no block in time. Errors:
  ///   would_block       no credit, or no room in the send queue, the operations or the windows
  ///   message_too_long  longer than max_message()
  ///   out_of_bounds     an empty slice
  ///   invalid_argument  memory of another engine, or that the connection's own domain cannot use
  ///   unsupported       a raw connection
  ///   not_connected     not ready
  ///   no_memory, system a long message needs a registration (see memory.windows), which failed
  Status send(const BufferSlice& data, const CompletionCallback& done = {},
              Post post = Post::automatic, OperationId* id = nullptr) {
    return identify(submit_send(data, done, post), id);
  }
  Status send(const Buffer& data, const CompletionCallback& done = {}, Post post = Post::automatic,
              OperationId* id = nullptr) {
    return identify(submit_send(data, done, post), id);
  }
  /// Sends a message with a 32-bit immediate. Errors: those of send().
  Status send_with_imm(const BufferSlice& data, std::uint32_t immediate,
                       const CompletionCallback& done = {}, Post post = Post::automatic,
                       OperationId* id = nullptr) {
    return identify(submit_send_with_imm(data, immediate, done, post), id);
  }
  Status send_with_imm(const Buffer& data, std::uint32_t immediate,
                       const CompletionCallback& done = {}, Post post = Post::automatic,
                       OperationId* id = nullptr) {
    return send_with_imm(data.slice(), immediate, done, post, id);
  }
  /// Copies `bytes`, which may be empty, into a block of the send pool and sends that. Errors:
  /// those of send(), and no_buffer (the send pool has no block).
  Status send_copy(std::span<const std::byte> bytes, const CompletionCallback& done = {},
                   Post post = Post::automatic, OperationId* id = nullptr) {
    return identify(submit_send_copy(bytes, done, post), id);
  }

  /// Writes `local` to the first bytes of `remote`, without the peer's processor. Errors:
  ///   would_block       no room in the send queue or the operations
  ///   out_of_bounds     no bytes, more than `remote` has, or more than 1 GiB
  ///   remote_access     `remote` does not allow writing
  ///   lease_expired     `remote` is part of a lease that is over
  ///   invalid_argument  `local` as for send(), or `remote` is part of another connection's lease
  ///   not_connected     not ready
  Status write(const BufferSlice& local, const RemoteRegion& remote,
               const CompletionCallback& done = {}, Post post = Post::automatic,
               OperationId* id = nullptr) {
    return identify(submit_write(local, remote, done, post), id);
  }
  Status write(const Buffer& local, const RemoteRegion& remote, const CompletionCallback& done = {},
               Post post = Post::automatic, OperationId* id = nullptr) {
    return write(local.slice(), remote, done, post, id);
  }
  /// Writes, and reports the immediate and the length to the peer's on_message, in order with
  /// messages. Costs a credit, as a message does. `local` may have no bytes. Errors: those of
  /// write(), and would_block also for credit.
  Status write_with_imm(const BufferSlice& local, const RemoteRegion& remote,
                        std::uint32_t immediate, const CompletionCallback& done = {},
                        Post post = Post::automatic, OperationId* id = nullptr) {
    return identify(submit_write_with_imm(local, remote, immediate, done, post), id);
  }
  Status write_with_imm(const Buffer& local, const RemoteRegion& remote, std::uint32_t immediate,
                        const CompletionCallback& done = {}, Post post = Post::automatic,
                        OperationId* id = nullptr) {
    return write_with_imm(local.slice(), remote, immediate, done, post, id);
  }
  /// Reads the first bytes of `remote` into `local`, whose bytes are undefined until `done` runs.
  /// Errors: those of write(); remote_access if `remote` does not allow reading.
  Status read(const BufferSlice& local, const RemoteRegion& remote,
              const CompletionCallback& done = {}, Post post = Post::automatic,
              OperationId* id = nullptr) {
    return identify(submit_read(local, remote, done, post), id);
  }
  Status read(const Buffer& local, const RemoteRegion& remote, const CompletionCallback& done = {},
              Post post = Post::automatic, OperationId* id = nullptr) {
    return read(local.slice(), remote, done, post, id);
  }

  /// Atomically compares the 8 bytes at `remote` with `expected` and, if they are equal, replaces
  /// them by `desired`. Completion::value is what they were before. Numbers are in host order, and
  /// the bytes are a number in their owner's host order. Atomic against other atomics through the
  /// same device (IBV_ATOMIC_HCA), not against READs and WRITEs; against the owner's processor only
  /// where the device says so (softverbs does, on slabs). queue_pair.rd_atomic of both ends limits
  /// how many run at once; the device delays the others. Errors:
  ///   would_block       no room in the send queue or the operations
  ///   unsupported       the device has no atomics
  ///   out_of_bounds     `remote` is empty or does not have 8 bytes
  ///   invalid_argument  its address is no multiple of 8, or it is part of another connection's
  ///   lease remote_access     it does not allow Access::remote_atomic lease_expired     it is part
  ///   of a lease that is over not_connected     not ready
  Status compare_swap(const RemoteRegion& remote, std::uint64_t expected, std::uint64_t desired,
                      const CompletionCallback& done = {}, Post post = Post::automatic,
                      OperationId* id = nullptr) {
    return identify(submit_compare_swap(remote, expected, desired, done, post), id);
  }
  /// Atomically adds `add`, modulo 2^64, to the 8 bytes at `remote`. Otherwise as compare_swap().
  Status fetch_add(const RemoteRegion& remote, std::uint64_t add,
                   const CompletionCallback& done = {}, Post post = Post::automatic,
                   OperationId* id = nullptr) {
    return identify(submit_fetch_add(remote, add, done, post), id);
  }

  // Raw connections only; see raw.h.

  /// Receives into these parts of memory, in this order. Without any, it takes a message without
  /// bytes or a write with immediate. May be called as soon as there is a handle. Deferred receives
  /// are posted together, before deferred operations. Errors:
  ///   would_block       RawSettings::receive_depth receives are outstanding
  ///   invalid_argument  more elements than RawSettings::max_recv_sge, or memory as for send()
  ///   out_of_bounds     an element without bytes
  ///   message_too_long  more than 1 GiB
  ///   unsupported       the connection is not raw
  ///   not_connected     closing or closed
  Status post_receive(std::span<const BufferSlice> into, const RawReceiveCallback& on_received = {},
                      const RawPostedCallback& on_posted = {}, Post post = Post::automatic);
  Status post_receive(const BufferSlice& into, const RawReceiveCallback& on_received = {},
                      const RawPostedCallback& on_posted = {}, Post post = Post::automatic) {
    return post_receive(std::span(&into, 1), on_received, on_posted, post);
  }
  /// Sends these parts of memory as one message, which uses one of the peer's receives. Without
  /// any, it is a message without bytes. Errors:
  ///   would_block       no room in the send queue or the operations
  ///   invalid_argument  more elements than RawSettings::max_send_sge, or memory as for send()
  ///   out_of_bounds     an element without bytes
  ///   message_too_long  more than 1 GiB
  ///   unsupported       the connection is not raw
  ///   not_connected     not ready
  Status send_raw(std::span<const BufferSlice> data, const CompletionCallback& done = {},
                  Post post = Post::automatic, OperationId* id = nullptr) {
    return identify(submit_send_raw(data, done, post), id);
  }
  Status send_raw(const BufferSlice& data, const CompletionCallback& done = {},
                  Post post = Post::automatic, OperationId* id = nullptr) {
    return send_raw(std::span(&data, 1), done, post, id);
  }
  /// Sends a message with a 32-bit immediate. Errors: those of send_raw().
  Status send_raw_with_imm(std::span<const BufferSlice> data, std::uint32_t immediate,
                           const CompletionCallback& done = {}, Post post = Post::automatic,
                           OperationId* id = nullptr) {
    return identify(submit_send_raw_with_imm(data, immediate, done, post), id);
  }
  Status send_raw_with_imm(const BufferSlice& data, std::uint32_t immediate,
                           const CompletionCallback& done = {}, Post post = Post::automatic,
                           OperationId* id = nullptr) {
    return send_raw_with_imm(std::span(&data, 1), immediate, done, post, id);
  }

  /// Posts the connection's deferred operations with one doorbell.
  Status flush();

  /// The operation that this connection accepted last, of those that have neither ended nor been
  /// cancelled. Empty if there is none.
  [[nodiscard]] OperationId last_operation() const noexcept;
  /// Cancels an operation: its callback runs with Status::cancelled in a later poll(), before those
  /// of older operations. Takes time in proportion to the connection's outstanding operations.
  ///
  /// A deferred operation is never posted, and its credit is free at once. The device finishes an
  /// operation that it already has: the operation may change memory on both sides, counts in
  /// stats(), ends the connection if it fails, and holds its memory and its place in the send queue
  /// until then. A long message that was offered may still arrive; it holds its memory until the
  /// peer has answered. Errors: invalid_argument (the operation is not this connection's, has ended
  /// or was cancelled already).
  Status cancel(OperationId operation);

  /// Gives the peer's endpoint to a connection made by Engine::prepare(). The connection becomes
  /// ready as soon as our queue pair is, possibly before the peer has joined; the device repeats
  /// what is sent until then (queue_pair.ack_timeout and retry_count). Set-up. Errors:
  /// invalid_argument (not prepared, or joined already), protocol (a value that no endpoint can
  /// have), unsupported (the endpoints do not fit together), not_connected (closing).
  [[nodiscard]] Result<void> join(const Endpoint& peer);
  /// Our endpoint of a prepared connection. Set-up. Errors: not_connected (on_endpoint has not run
  /// yet, or closing).
  [[nodiscard]] Result<Endpoint> endpoint() const;

  /// Replaces the settings of a connection that is not made yet, in on_accept. Set-up. Errors:
  /// invalid_argument (out of range; too late; it has receives already), limit and no_device (the
  /// device does not have it), unsupported (a GID of another type than the peer's), system,
  /// not_connected (closing).
  [[nodiscard]] Result<void> configure(const ConnectionSettings& settings);

  /// Opens the bytes of `slice` to peers, as Engine::expose() does, but with no more rights than
  /// the connection's settings give its peer. All connections of the engine can use the key; if
  /// this one has a protection domain of its own, only this one can, until it ends. Set-up. Errors:
  ///   invalid_argument  no bytes or no remote rights; rights that the settings leave out; memory
  ///                     that cannot be registered, or of another engine
  ///   unsupported       Access::remote_atomic, and the device has no atomics
  ///   limit             no more registrations
  ///   no_memory, system the registration failed
  ///   not_connected     closing, or the connection's own domain does not exist yet
  [[nodiscard]] Result<RemoteRegion> expose(const BufferSlice& slice, Access access);
  /// With KeyScope::connection, makes a key for this connection's peer alone, where the device has
  /// memory windows. It needs no system call if `slice` is memory of the engine's pools. The peer
  /// can use the key in messages that we send from now on. The key ends with the connection.
  /// Set-up. Errors: those above; would_block (keys, records or work requests are used up),
  /// not_connected (not ready).
  [[nodiscard]] Result<RemoteRegion> expose(const BufferSlice& slice, Access access,
                                            KeyScope scope);
  /// Closes a key that expose() made, with the answers of Engine::revoke(). A key of
  /// KeyScope::connection always answers would_block first, and on_returned also reports its end.
  /// The peer is not told, and loses the connection if it uses the key again. Runs no callback.
  /// Set-up.
  Status revoke(const RemoteRegion& region);
  /// Encodes a region that was exposed here as bytes, to be sent to the peer by any means. Errors:
  /// invalid_argument (empty, or part of a lease), not_connected (not ready).
  [[nodiscard]] Result<RegionToken> token(const RemoteRegion& region) const;
  /// Decodes a token of the peer's, for operations on this connection. Set-up. Errors: protocol
  /// (not a token, or damaged), invalid_argument (made by another engine, or for another
  /// connection), not_connected (not ready).
  [[nodiscard]] Result<RemoteRegion> import_token(std::span<const std::byte> token) const;

  /// Asks the peer for `bytes` of zeroed memory for a time. `done` receives the memory, or the
  /// peer's reason (LeaseRefusal), or `flushed` if the connection ends first. Errors:
  ///   invalid_argument  no bytes, no valid rights, or a time not above leases.guard
  ///   would_block       leases.maximum is reached, or too many control messages wait
  ///   unsupported       a raw connection
  ///   not_connected     not ready
  Status request_memory(std::size_t bytes, const LeaseOptions& options, const LeaseCallback& done);
  /// Leases our memory to the peer, whose on_lease receives it. `done` reports whether the peer
  /// took it. Holds a reference to the memory until on_returned runs. A control step registers the
  /// memory if the device has no windows or it is not of the engine's pools. Errors: those of
  /// request_memory(); invalid_argument also for rights that the settings leave out and for memory
  /// of another engine; out_of_bounds (no bytes).
  Status lease(const BufferSlice& memory, const LeaseOptions& options,
               const LeaseCallback& done = {});
  /// Asks the peer to release memory that was leased to it. If it does not, the lease ends by
  /// itself when operations of an obedient peer would have ended. on_returned reports the end; no
  /// callback runs inside the call. Errors: invalid_argument (no lease of this connection's, or
  /// over).
  Status recall(LeaseId lease);

  /// As Engine::register_memory(), in the connection's domain. When the connection ends, its
  /// domain's keys to the memory end, and the bytes stay usable by their owner. Set-up. Errors:
  /// those of expose().
  [[nodiscard]] Result<MemoryRegion> register_memory(std::span<std::byte> bytes, Access access);

  /// Stops accepting operations, lets the outstanding ones end for up to connections.close_timeout,
  /// and tells the peer. on_closed runs in a later poll(); no callback runs inside the call.
  /// Set-up. Errors: not_connected (closing or closed already).
  Status close();

  /// Replaces the handlers. A callback that runs now keeps its captures until it returns. Set-up.
  Status set_handlers(const ConnectionHandlers& handlers);

  /// `closed` for an empty or stale handle.
  [[nodiscard]] ConnectionState state() const noexcept;
  [[nodiscard]] bool ready() const noexcept { return state() == ConnectionState::ready; }
  /// Longest message that send() (on a raw connection, send_raw()) accepts: the smaller of both
  /// ends' connections.max_message_bytes, or of their eager_bytes if the peer may not read our
  /// memory (ConnectionSettings::access). 0 unless ready.
  [[nodiscard]] std::size_t max_message() const noexcept;
  /// Set-up.
  [[nodiscard]] ConnectionStats stats() const noexcept;
  /// What blocks the connection and what is outstanding.
  [[nodiscard]] ConnectionSnapshot snapshot() const noexcept;
  /// Asks the device for the state of the queue pair. Set-up (a control verb). Errors:
  /// not_connected (there is no queue pair yet, or no more), system.
  [[nodiscard]] Result<QueuePairState> query_state() const;
  /// The peer: "address:port" of its TCP end, or GID and queue pair if joined. Set-up.
  [[nodiscard]] std::string peer() const;
  /// A number below connections.maximum, unique among the engine's living connections: for arrays
  /// of per-connection state.
  [[nodiscard]] std::uint32_t index() const noexcept { return index_; }

  friend bool operator==(const Connection&, const Connection&) noexcept = default;

 private:
  friend struct detail::Internals;

  Connection(detail::EngineSlot* slot, std::uint32_t index, std::uint32_t generation) noexcept
      : slot_(slot), index_(index), generation_(generation) {}

  // Separate from the id, so that operations without one do not pay for it.
  Status submit_send(const BufferSlice& data, const CompletionCallback& done, Post post);
  Status submit_send(const Buffer& data, const CompletionCallback& done, Post post);
  Status submit_send_with_imm(const BufferSlice& data, std::uint32_t immediate,
                              const CompletionCallback& done, Post post);
  Status submit_send_copy(std::span<const std::byte> bytes, const CompletionCallback& done,
                          Post post);
  Status submit_write(const BufferSlice& local, const RemoteRegion& remote,
                      const CompletionCallback& done, Post post);
  Status submit_write_with_imm(const BufferSlice& local, const RemoteRegion& remote,
                               std::uint32_t immediate, const CompletionCallback& done, Post post);
  Status submit_read(const BufferSlice& local, const RemoteRegion& remote,
                     const CompletionCallback& done, Post post);
  Status submit_compare_swap(const RemoteRegion& remote, std::uint64_t expected,
                             std::uint64_t desired, const CompletionCallback& done, Post post);
  Status submit_fetch_add(const RemoteRegion& remote, std::uint64_t add,
                          const CompletionCallback& done, Post post);
  Status submit_send_raw(std::span<const BufferSlice> data, const CompletionCallback& done,
                         Post post);
  Status submit_send_raw_with_imm(std::span<const BufferSlice> data, std::uint32_t immediate,
                                  const CompletionCallback& done, Post post);

  Status identify(Status accepted, OperationId* id) const noexcept {
    if (id != nullptr && accepted == Status::ok) *id = last_operation();
    return accepted;
  }

  detail::EngineSlot* slot_ = nullptr;
  std::uint32_t index_ = 0;
  std::uint32_t generation_ = 0;
};

}  // namespace spinwire
