// Connection: a small copyable handle to one connection of an engine.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "spinwire/buffer.h"
#include "spinwire/callback.h"
#include "spinwire/clock.h"
#include "spinwire/connection_handlers.h"
#include "spinwire/connection_settings.h"
#include "spinwire/connection_state.h"
#include "spinwire/endpoint.h"
#include "spinwire/export.h"
#include "spinwire/goodbye.h"
#include "spinwire/identity.h"
#include "spinwire/message.h"
#include "spinwire/operation.h"
#include "spinwire/raw.h"
#include "spinwire/reconnect.h"
#include "spinwire/status.h"

namespace spinwire {

class MemoryRegion;
struct LeaseId;
struct LeaseOptions;

/// A region encoded as bytes that can be sent anywhere; see Connection::token().
inline constexpr std::size_t kRegionTokenBytes = 48;
/// A region as bytes that Connection::import_token() checks.
using RegionToken = std::array<std::byte, kRegionTokenBytes>;

namespace detail {
struct EngineSlot;
}

/// A connection: a small value that may be copied. spinwire.h has the rules for all handles.
///
/// The operations are send() to fetch_add(), post_receive() and send_raw(). They copy no payload,
/// except send_copy(). If the call answers ok, the operation is accepted: `done` runs exactly once,
/// inside Engine::poll(), poll_control(), arm() or wait() or while the engine is destroyed, and
/// never inside the call; and `id`, unless null, receives the operation's id for cancel(). Any
/// other answer means that nothing was taken. All functions may be called from callbacks. Hot
/// unless marked otherwise.
class SPINWIRE_API Connection {
 public:
  Connection() noexcept = default;

  /// Sends a message of up to max_message() bytes, which arrives whole, once and in order. `done`
  /// runs when the peer's device has the message. The peer's engine reads messages longer than
  /// connections.eager_bytes, except for direct messages (see Offer); `done` then runs after that
  /// read. `done` reports `refused` if the peer's application refused the message, and `no_buffer`
  /// if the peer's pool had no block in time. Errors:
  ///   would_block       no credit, or no room in the send queue, the operations or the windows;
  ///                     see ConnectionHandlers::on_writable
  ///   message_too_long  longer than max_message(), or than its lower limit for such memory
  ///   out_of_bounds     a slice without memory; a slice of 0 bytes sends a message without bytes
  ///   invalid_argument  memory of another engine, or that the connection's own domain cannot use
  ///   unsupported       a raw connection
  ///   not_connected     not ready
  ///   no_memory         the registration of a rendezvous message failed (see memory.windows)
  ///   system            the registration of a rendezvous message failed (see memory.windows)
  Status send(const BufferSlice& data, const CompletionCallback& done = {},
              Post post = Post::automatic, OperationId* id = nullptr) {
    return identify(submit_send(data, done, post, id != nullptr), id);
  }
  /// Sends the whole buffer; see the overload for slices.
  Status send(const Buffer& data, const CompletionCallback& done = {}, Post post = Post::automatic,
              OperationId* id = nullptr) {
    return identify(submit_send(data, done, post, id != nullptr), id);
  }
  /// Sends these parts of memory, in this order, as one message, like a message of one part. An
  /// empty list sends a message without bytes. The device gathers the parts, or they are copied: on
  /// softverbs as any short message; above connections.eager_bytes into a block of the send pool.
  /// The slices may be dropped at once; the operation holds references to the memory until it ends.
  /// Errors:
  ///   would_block       no credit, or no room in the send queue, the operations or the windows;
  ///                     see ConnectionHandlers::on_writable
  ///   limit             more parts than max_send_sge(); the first time, the log says how many
  ///   message_too_long  longer than max_message(), all parts together
  ///   out_of_bounds     a part without bytes
  ///   invalid_argument  a part is memory of another engine, or memory that the connection's own
  ///                     domain cannot use
  ///   no_buffer         the send pool has no block for a message above connections.eager_bytes
  ///   unsupported       a raw connection; see send_raw()
  ///   not_connected     not ready
  ///   no_memory         the registration of a rendezvous message failed (see memory.windows)
  ///   system            the registration of a rendezvous message failed (see memory.windows)
  Status send(std::span<const BufferSlice> parts, const CompletionCallback& done = {},
              Post post = Post::automatic, OperationId* id = nullptr) {
    return identify(submit_send(parts, done, post, id != nullptr), id);
  }
  /// Sends a message with a 32-bit immediate. Errors:
  ///   would_block       no credit, or no room in the send queue, the operations or the windows;
  ///                     see ConnectionHandlers::on_writable
  ///   message_too_long  longer than max_message(), or than its lower limit for such memory
  ///   out_of_bounds     a slice without memory; a slice of 0 bytes sends a message without bytes
  ///   invalid_argument  memory of another engine, or that the connection's own domain cannot use
  ///   unsupported       a raw connection
  ///   not_connected     not ready
  ///   no_memory         the registration of a rendezvous message failed (see memory.windows)
  ///   system            the registration of a rendezvous message failed (see memory.windows)
  Status send_with_imm(const BufferSlice& data, std::uint32_t immediate,
                       const CompletionCallback& done = {}, Post post = Post::automatic,
                       OperationId* id = nullptr) {
    return identify(submit_send_with_imm(data, immediate, done, post), id);
  }
  /// Copies `bytes`, which may be empty, into a block of the send pool and sends the block. Errors:
  ///   would_block       no credit, or no room in the send queue, the operations or the windows;
  ///                     see ConnectionHandlers::on_writable
  ///   message_too_long  longer than max_message()
  ///   no_buffer         the send pool has no block
  ///   unsupported       a raw connection
  ///   not_connected     not ready
  ///   no_memory         the registration of a rendezvous message failed (see memory.windows)
  ///   system            the registration of a rendezvous message failed (see memory.windows)
  Status send_copy(std::span<const std::byte> bytes, const CompletionCallback& done = {},
                   Post post = Post::automatic, OperationId* id = nullptr) {
    return identify(submit_send_copy(bytes, done, post, id != nullptr), id);
  }

  /// Writes `local` to the first bytes of `remote`, without the peer's processor. Errors:
  ///   would_block       no room in the send queue or the operations
  ///   out_of_bounds     no bytes, more than `remote` has, or more than
  ///                     DeviceInfo::max_operation_bytes
  ///   remote_access     `remote` does not allow writing
  ///   lease_expired     `remote` is part of a lease that is over, or its deadline has passed
  ///   invalid_argument  `local` is memory of another engine, or that the connection's own domain
  ///                     cannot use; or `remote` is part of another connection's lease
  ///   not_connected     not ready
  Status write(const BufferSlice& local, const RemoteRegion& remote,
               const CompletionCallback& done = {}, Post post = Post::automatic,
               OperationId* id = nullptr) {
    return identify(submit_write(local, remote, done, post), id);
  }
  /// Writes these parts of memory, in this order, to the first bytes of `remote`. The slices may be
  /// dropped at once; the operation holds references to the memory until it ends. Errors:
  ///   would_block       no room in the send queue or the operations
  ///   limit             more parts than max_send_sge(); the first time, the log says how many
  ///   out_of_bounds     no parts, a part without bytes, or all parts together more than `remote`
  ///                     has or more than DeviceInfo::max_operation_bytes
  ///   remote_access     `remote` does not allow writing
  ///   lease_expired     `remote` is part of a lease that is over, or its deadline has passed
  ///   invalid_argument  a part is memory of another engine, or memory that the connection's own
  ///                     domain cannot use; or `remote` is part of another connection's lease
  ///   not_connected     not ready
  Status write(std::span<const BufferSlice> parts, const RemoteRegion& remote,
               const CompletionCallback& done = {}, Post post = Post::automatic,
               OperationId* id = nullptr) {
    return identify(submit_write(parts, remote, done, post), id);
  }
  /// Writes these parts of memory to the first bytes of `remote`, and sends a message of the bytes
  /// `notice`, which are copied and may be none. Both are accepted, or neither. They are one
  /// operation, with one callback and one id; in stats(), it is a write and a message.
  ///
  /// The peer's on_message runs after all the data is visible in its memory, in order with other
  /// messages; other operations of this connection do not come between the two. If the write fails,
  /// the message does not arrive, and the connection ends. Completion::bytes counts both. A notice
  /// of four bytes can also go by write_with_imm(), which needs no second work request. Errors:
  ///   would_block       no credit, or no room for two work requests in the send queue or the
  ///                     operations; see ConnectionHandlers::on_writable
  ///   limit             more parts than max_send_sge(); the first time, the log says how many
  ///   out_of_bounds     no parts, a part without bytes, or all parts together more than `remote`
  ///                     has or more than DeviceInfo::max_operation_bytes
  ///   message_too_long  a notice above max_message() or connections.eager_bytes
  ///   remote_access     `remote` does not allow writing
  ///   lease_expired     `remote` is part of a lease that is over, or its deadline has passed
  ///   invalid_argument  a part is memory of another engine, or memory that the connection's own
  ///                     domain cannot use; or `remote` is part of another connection's lease
  ///   no_buffer         the send pool has no block for a notice of more than 56 bytes
  ///   unsupported       a raw connection
  ///   not_connected     not ready
  Status write_and_send(std::span<const BufferSlice> parts, const RemoteRegion& remote,
                        std::span<const std::byte> notice, const CompletionCallback& done = {},
                        Post post = Post::automatic, OperationId* id = nullptr) {
    return identify(submit_write_and_send(parts, remote, notice, done, post), id);
  }
  /// Writes one part, and tells the peer; see the overload for several parts.
  Status write_and_send(const BufferSlice& local, const RemoteRegion& remote,
                        std::span<const std::byte> notice, const CompletionCallback& done = {},
                        Post post = Post::automatic, OperationId* id = nullptr) {
    return write_and_send(std::span(&local, 1), remote, notice, done, post, id);
  }
  /// Writes, and reports the immediate and the length to the peer's on_message, in order with
  /// messages and after the data is visible in its memory. Uses a credit, as a message does.
  /// `local` may have no bytes. Errors:
  ///   would_block       no credit, or no room in the send queue or the operations
  ///   out_of_bounds     no slice, more bytes than `remote` has, or more than
  ///                     DeviceInfo::max_operation_bytes
  ///   remote_access     `remote` does not allow writing
  ///   lease_expired     `remote` is part of a lease that is over, or its deadline has passed
  ///   invalid_argument  `local` is memory of another engine, or that the connection's own domain
  ///                     cannot use; or `remote` is part of another connection's lease
  ///   not_connected     not ready
  Status write_with_imm(const BufferSlice& local, const RemoteRegion& remote,
                        std::uint32_t immediate, const CompletionCallback& done = {},
                        Post post = Post::automatic, OperationId* id = nullptr) {
    return identify(submit_write_with_imm(local, remote, immediate, done, post), id);
  }
  /// Reads the first bytes of `remote` into `local`, whose bytes are undefined until `done` runs.
  /// Errors:
  ///   would_block       no room in the send queue or the operations
  ///   out_of_bounds     no bytes, more than `remote` has, or more than
  ///                     DeviceInfo::max_operation_bytes
  ///   remote_access     `remote` does not allow reading
  ///   lease_expired     `remote` is part of a lease that is over, or its deadline has passed
  ///   invalid_argument  `local` is memory of another engine, or that the connection's own domain
  ///                     cannot use; or `remote` is part of another connection's lease
  ///   not_connected     not ready
  Status read(const BufferSlice& local, const RemoteRegion& remote,
              const CompletionCallback& done = {}, Post post = Post::automatic,
              OperationId* id = nullptr) {
    return identify(submit_read(local, remote, done, post), id);
  }

  /// Atomically compares the 8 bytes at `remote` with `expected` and, if they are equal, replaces
  /// them by `desired`. Completion::value is the value before. Numbers are in host order; the bytes
  /// hold a number in their owner's host order. The operation is atomic against other atomics
  /// through the same device (IBV_ATOMIC_HCA), but not against READs and WRITEs. It is atomic
  /// against the owner's processor only where the device says so (softverbs does, in pools).
  /// Our queue_pair.initiator_depth and the peer's responder_depth limit how many run at once; the
  /// device delays further ones.
  /// Errors:
  ///   would_block       no room in the send queue or the operations
  ///   unsupported       the device has no atomics
  ///   out_of_bounds     `remote` is not 8 bytes long
  ///   invalid_argument  the address is no multiple of 8, or `remote` is part of another
  ///                     connection's lease
  ///   remote_access     `remote` does not allow Access::remote_atomic
  ///   lease_expired     `remote` is part of a lease that is over, or its deadline has passed
  ///   not_connected     not ready
  Status compare_swap(const RemoteRegion& remote, std::uint64_t expected, std::uint64_t desired,
                      const CompletionCallback& done = {}, Post post = Post::automatic,
                      OperationId* id = nullptr) {
    return identify(submit_compare_swap(remote, expected, desired, done, post), id);
  }
  /// Atomically adds `add`, modulo 2^64, to the 8 bytes at `remote`, with the rules of
  /// compare_swap(). Errors:
  ///   would_block       no room in the send queue or the operations
  ///   unsupported       the device has no atomics
  ///   out_of_bounds     `remote` is not 8 bytes long
  ///   invalid_argument  the address is no multiple of 8, or `remote` is part of another
  ///                     connection's lease
  ///   remote_access     `remote` does not allow Access::remote_atomic
  ///   lease_expired     `remote` is part of a lease that is over, or its deadline has passed
  ///   not_connected     not ready
  Status fetch_add(const RemoteRegion& remote, std::uint64_t add,
                   const CompletionCallback& done = {}, Post post = Post::automatic,
                   OperationId* id = nullptr) {
    return identify(submit_fetch_add(remote, add, done, post), id);
  }

  // Raw connections only; see raw.h.

  /// Posts a receive into these parts of memory, in this order. An empty list receives a message
  /// without bytes or a write with immediate. May be called as soon as there is a handle. Deferred
  /// receives are posted together, before deferred operations. Errors:
  ///   would_block       RawSettings::receive_depth receives are outstanding
  ///   invalid_argument  more parts than RawSettings::max_recv_sge, memory of another engine, or
  ///                     memory that the connection's own domain cannot use
  ///   out_of_bounds     a part without bytes
  ///   message_too_long  more than DeviceInfo::max_operation_bytes
  ///   unsupported       the connection is not raw
  ///   not_connected     closing or closed
  Status post_receive(std::span<const BufferSlice> into, const RawReceiveCallback& on_received = {},
                      const RawPostedCallback& on_posted = {}, Post post = Post::automatic);
  /// Posts a receive of one part; see the overload for several parts.
  Status post_receive(const BufferSlice& into, const RawReceiveCallback& on_received = {},
                      const RawPostedCallback& on_posted = {}, Post post = Post::automatic) {
    return post_receive(std::span(&into, 1), on_received, on_posted, post);
  }
  /// Sends these parts of memory as one message, which uses one of the peer's receives. An empty
  /// list sends a message without bytes. Errors:
  ///   would_block       no room in the send queue or the operations
  ///   invalid_argument  more parts than RawSettings::max_send_sge, memory of another engine, or
  ///                     memory that the connection's own domain cannot use
  ///   out_of_bounds     a part without bytes
  ///   message_too_long  more than DeviceInfo::max_operation_bytes
  ///   unsupported       the connection is not raw
  ///   not_connected     not ready
  Status send_raw(std::span<const BufferSlice> data, const CompletionCallback& done = {},
                  Post post = Post::automatic, OperationId* id = nullptr) {
    return identify(submit_send_raw(data, done, post), id);
  }
  /// Sends one part; see the overload for several parts.
  Status send_raw(const BufferSlice& data, const CompletionCallback& done = {},
                  Post post = Post::automatic, OperationId* id = nullptr) {
    return send_raw(std::span(&data, 1), done, post, id);
  }
  /// Sends a raw message with a 32-bit immediate. Errors:
  ///   would_block       no room in the send queue or the operations
  ///   invalid_argument  more parts than RawSettings::max_send_sge, memory of another engine, or
  ///                     memory that the connection's own domain cannot use
  ///   out_of_bounds     a part without bytes
  ///   message_too_long  more than DeviceInfo::max_operation_bytes
  ///   unsupported       the connection is not raw
  ///   not_connected     not ready
  Status send_raw_with_imm(std::span<const BufferSlice> data, std::uint32_t immediate,
                           const CompletionCallback& done = {}, Post post = Post::automatic,
                           OperationId* id = nullptr) {
    return identify(submit_send_raw_with_imm(data, immediate, done, post), id);
  }
  /// Sends one part with an immediate; see the overload for several parts.
  Status send_raw_with_imm(const BufferSlice& data, std::uint32_t immediate,
                           const CompletionCallback& done = {}, Post post = Post::automatic,
                           OperationId* id = nullptr) {
    return send_raw_with_imm(std::span(&data, 1), immediate, done, post, id);
  }

  /// Posts the connection's deferred operations with one doorbell. An operation that the device
  /// refuses ends through its callback. Errors: those of every function.
  Status flush();

  /// Loads the connection's record into the cache. With thousands of connections, call it some
  /// hundred nanoseconds before you send. Does nothing without a connection or on another thread.
  /// Hot. Callable from a callback.
  void prefetch() const noexcept;

  /// The id of the newest accepted operation of this connection that has neither ended nor been
  /// cancelled. Empty if there is none.
  [[nodiscard]] OperationId last_operation() const noexcept;
  /// Cancels an operation: its callback runs with Status::cancelled in poll(), never inside this
  /// call, and before the callbacks of older operations. Takes time in proportion to the
  /// connection's outstanding operations.
  ///
  /// On a device with direct messages (connections.direct_messages), a short message without a
  /// callback and without `id` has ended when send() returns. With either of them it can be
  /// cancelled while it is deferred.
  ///
  /// A deferred operation is never posted, and its credit is free at once. The device finishes an
  /// operation that it already has. Until then, the operation holds its memory and its place in the
  /// send queue, counts in stats(), may change memory on both sides, and ends the connection if it
  /// fails. A rendezvous message that was offered may still arrive; it holds its memory until the
  /// peer has answered. Errors: invalid_argument (the operation is not this connection's, has ended
  /// or was cancelled already).
  Status cancel(OperationId operation);
  /// Ends an operation with Status::timed_out if it has not ended `timeout` from now, to within
  /// engine.control_interval. Everything else is as with cancel(). Replaces an earlier time-out of
  /// the operation. The time also passes while the operation is deferred. Takes constant time; the
  /// engine's first call allocates. Errors:
  ///   invalid_argument  the operation is not this connection's, has ended or was cancelled
  ///                     already; or `timeout` is negative
  ///   no_memory         the first call found no memory
  Status set_timeout(OperationId operation, Nanoseconds timeout) noexcept;

  /// Gives the peer's endpoint to a connection made by Engine::prepare(). The connection becomes
  /// ready as soon as our queue pair is, possibly before the peer has joined. The device repeats
  /// messages that are sent until then (queue_pair.ack_timeout and retry_count). Set-up. Errors:
  ///   invalid_argument  not prepared, or joined already
  ///   protocol          a value that no endpoint can have
  ///   unauthenticated   we have a key, and the endpoint is our own, was altered, or proves no key
  ///                     or another handshake's; see Config::Security
  ///   unsupported       the two endpoints do not fit together
  ///   not_connected     closing
  [[nodiscard]] Result<void> join(const Endpoint& peer);
  /// Our endpoint of a prepared connection. After join(), with a key, it answers the peer's: see
  /// PrepareOptions::peer_joins_first. An endpoint with a proof keeps the values that it had when
  /// it was proved, its credits too. Set-up. Errors: not_connected (before on_endpoint, or
  /// closing), no_memory.
  [[nodiscard]] Result<Endpoint> endpoint() const;

  /// Replaces the settings of a connection in on_accept, before its queue pair is made. On RoCE the
  /// peer's address must be in reach of the listener's port, too. Set-up. Errors:
  ///   invalid_argument  a setting out of range, too late, or the connection has receives already
  ///   limit             the device has less than a setting asks
  ///   no_device         a setting names a port or GID that does not exist
  ///   unsupported       a GID of another type than the peer's
  ///   system            the operating system refused
  ///   not_connected     closing
  [[nodiscard]] Result<void> configure(const ConnectionSettings& settings);

  /// Opens the bytes of `slice` to peers, as Engine::expose() does, but with no more rights than
  /// the connection's settings give its peer. All connections of the engine can use the key. If
  /// this connection has its own protection domain, only this connection can, until it ends.
  /// Set-up. Errors:
  ///   invalid_argument  no bytes or no remote rights; rights that the settings leave out; memory
  ///                     that cannot be registered, or of another engine; zero-based memory that
  ///                     does not begin at a page
  ///   unsupported       Access::remote_atomic, and the device has no atomics; or a flag that
  ///                     DeviceInfo::memory_flags lacks, except relaxed_ordering
  ///   limit             no more registrations
  ///   no_memory         the registration failed
  ///   system            the registration failed
  ///   not_connected     closing, or the connection's own domain does not exist yet
  [[nodiscard]] Result<RemoteRegion> expose(const BufferSlice& slice, Access access,
                                            MemoryFlags flags = MemoryFlags::none);
  /// With KeyScope::connection, makes a remote key for this connection's peer alone, if the device
  /// has memory windows. Needs no system call if `slice` is memory of the engine's pools. The peer
  /// can use the key in messages that we send from now on. The key ends with the connection, or by
  /// revoke() of this connection; no other handle closes it. Set-up. Errors:
  ///   invalid_argument  no bytes or no remote rights; rights that the settings leave out; memory
  ///                     that cannot be registered, or of another engine
  ///   unsupported       Access::remote_atomic, and the device has no atomics
  ///   would_block       leases.maximum is reached, or no work request is free
  ///                     (KeyScope::connection)
  ///   limit             no more registrations
  ///   no_memory         the registration failed
  ///   system            the registration failed
  ///   not_connected     not ready; for KeyScope::domain as for expose(slice, access)
  [[nodiscard]] Result<RemoteRegion> expose(const BufferSlice& slice, Access access,
                                            KeyScope scope);
  /// Closes a remote key that expose() made: of this connection, or of KeyScope::domain by any
  /// handle of this engine. Call it, between polls, until it answers something other than
  /// would_block. A key of KeyScope::connection always answers would_block first, and on_returned
  /// also reports its end. The peer gets no notice, and loses the connection if it uses the key
  /// again. Runs no callback. Set-up. Answers:
  ///   ok                no peer can reach the memory any more, and the reference to it is dropped;
  ///                     answered once for each key
  ///   would_block       the key is closing, and an access may be under way; call again
  ///   local_error       the device refused to deregister the memory, which stays held; call again
  ///   invalid_argument  no such key, one of KeyScope::connection of another connection, or one
  ///                     revoked already; nothing is closed
  Status revoke(const RemoteRegion& region);
  /// Encodes a region that is open here, or a part of it, as bytes, to be sent to the peer by any
  /// means. Errors:
  ///   invalid_argument  a region that is empty, revoked, the peer's, or part of a lease
  ///   not_connected     not ready
  [[nodiscard]] Result<RegionToken> token(const RemoteRegion& region) const;
  /// Encodes a region with a deadline, `valid_for` from now on, after which a correct peer starts
  /// no operation on it. The key stays open: revoke() it then, with Engine::after() for example. A
  /// lease() is for a peer that may be incorrect: there the device enforces the end. The deadline
  /// is a time of the system's clock, so the clocks of both hosts must agree, but for leases.guard
  /// of the importer; engines with a manual clock use that clock, at both ends. Releases that do
  /// not know deadlines refuse the token. Errors:
  ///   invalid_argument  as token(region); or a time below 1 ms or above 24 h
  ///   not_connected     not ready
  [[nodiscard]] Result<RegionToken> token(const RemoteRegion& region, Nanoseconds valid_for) const;
  /// Decodes the peer's token, for operations on this connection. If the token has a deadline,
  /// operations on the region answer lease_expired from leases.guard before it on; time_left() says
  /// how long that is. Set-up. Errors:
  ///   protocol          not a token, or damaged
  ///   invalid_argument  made by another engine, or for another connection
  ///   lease_expired     the deadline has passed, or is nearer than leases.guard
  ///   not_connected     not ready
  [[nodiscard]] Result<RemoteRegion> import_token(std::span<const std::byte> token) const;
  /// How long operations on the region may still be started: 0 if no longer, Nanoseconds::max()
  /// without a lease and without a deadline.
  [[nodiscard]] Nanoseconds time_left(const RemoteRegion& region) const noexcept;

  /// Asks the peer for `bytes` of zeroed memory for a limited time. `done` receives the memory, the
  /// peer's reason (LeaseRefusal; also a code and a text, if its application refuses), or `flushed`
  /// if the connection ends first. Errors:
  ///   invalid_argument  no bytes, no valid rights, or a duration not above leases.guard or above
  ///                     1 h
  ///   would_block       leases.maximum is reached, or too many control messages wait (see
  ///                     on_writable)
  ///   unsupported       a raw connection; or a tag, which the peer's release does not know
  ///   not_connected     not ready
  Status request_memory(std::size_t bytes, const LeaseOptions& options, const LeaseCallback& done);
  /// Leases our memory to the peer, whose on_lease receives it. `done` reports whether the peer
  /// took the memory. Holds a reference to the memory until on_returned runs. A control step
  /// registers the memory if the device has no windows or the memory is not of the engine's pools.
  /// `id`, unless null, receives the lease's id for recall(), which may be called before `done` has
  /// run. Errors:
  ///   out_of_bounds     no bytes
  ///   invalid_argument  no valid rights, rights that the settings leave out, atomics on a device
  ///                     without them, a duration not above leases.guard or above 1 h, or memory of
  ///                     another engine
  ///   would_block       leases.maximum is reached, or too many control messages wait (see
  ///                     on_writable)
  ///   unsupported       a raw connection; or a tag, which the peer's release does not know
  ///   not_connected     not ready
  Status lease(const BufferSlice& memory, const LeaseOptions& options,
               const LeaseCallback& done = {}, LeaseId* id = nullptr);
  /// Asks the peer to release memory that was leased to it. If the peer has not been offered the
  /// lease yet, a control step ends the lease, and its callback runs with lease_expired. If the
  /// peer does not release the memory, the lease ends at the latest when the last operation of a
  /// correct peer must have completed. on_returned reports the end; no callback runs inside the
  /// call. Errors:
  ///   invalid_argument  not a lease of this connection, over, or recalled already
  Status recall(LeaseId lease);

  /// Registers memory like Engine::register_memory(), in the connection's domain. When the
  /// connection ends, its domain's keys to the memory end; the owner can still use the bytes.
  /// Set-up. Errors:
  ///   invalid_argument  no bytes; rights that do not exist or that the settings leave out; memory
  ///                     that cannot be registered; MemoryFlags::zero_based
  ///   unsupported       Access::remote_atomic, and the device has no atomics; or a flag that
  ///                     DeviceInfo::memory_flags lacks, except relaxed_ordering
  ///   limit             no more registrations
  ///   no_memory         the registration failed
  ///   system            the registration failed
  ///   not_connected     closing, or the connection's own domain does not exist yet
  [[nodiscard]] Result<MemoryRegion> register_memory(std::span<std::byte> bytes, Access access,
                                                     MemoryFlags flags = MemoryFlags::none);

  /// Stops accepting operations, lets the outstanding ones end for up to connections.close_timeout,
  /// and sends goodbye to the peer. Messages of the peer that arrive from now on are dropped,
  /// although their sends end as `ok` there; close(Goodbye) can deliver them. on_closed runs in a
  /// later poll(); no callback runs inside the call. Of a connection that is closing or
  /// interrupted, ends the reconnecting. Set-up. Errors: not_connected (closing or closed already).
  Status close();
  /// Closes with a reason, which the peer gets as Error::goodbye. If the reason invites the peer
  /// back, no message is lost: first our operations end, then the peer's, for up to
  /// connections.peer_timeout each. Until then messages of the peer are delivered, and neither end
  /// accepts operations. Leases end with the connection. This end does not reconnect. A raw
  /// connection, or a peer of an older release, closes as by close(). Set-up. Errors:
  ///   invalid_argument  no such reason, or retry_after below 0, above kMaxRetryAfter, or with a
  ///                     reason that does not invite the peer back
  ///   not_connected     closing or closed already
  Status close(const Goodbye& goodbye);

  /// Replaces the handlers. A callback that is running keeps its captures until it returns. Set-up.
  /// Errors: those of every function.
  Status set_handlers(const ConnectionHandlers& handlers);

  /// The state; `closed` for an empty or stale handle.
  [[nodiscard]] ConnectionState state() const noexcept;
  /// Whether the state is `ready`, so that operations are accepted.
  [[nodiscard]] bool ready() const noexcept { return state() == ConnectionState::ready; }
  /// Longest message that send() (on a raw connection, send_raw()) accepts: the smaller of both
  /// ends' connections.max_message_bytes. Without remote_read in ConnectionSettings::access, the
  /// smaller of both ends' eager_bytes; with direct messages, that is the limit only for a message
  /// of one part in memory outside the engine's pools (several are copied). 0 unless ready.
  [[nodiscard]] std::size_t max_message() const noexcept;
  /// Most parts of a gathered send or write: ConnectionSettings::max_send_sge; on a raw connection,
  /// RawSettings::max_send_sge, up to 64. 0 unless ready. Hot.
  [[nodiscard]] std::size_t max_send_sge() const noexcept;
  /// Counts of operations and messages. Set-up.
  [[nodiscard]] ConnectionStats stats() const noexcept;
  /// Reports what blocks the connection and what is outstanding. Set-up.
  [[nodiscard]] ConnectionSnapshot snapshot() const noexcept;
  /// Asks the device for the state of the queue pair. Set-up (a control verb). Errors:
  /// not_connected (there is no queue pair), system.
  [[nodiscard]] Result<QueuePairState> query_state() const;
  /// The peer: "address:port" of its TCP end. Of a prepared connection, GID and queue pair after
  /// join(), and before it a text that says so. Empty also if memory has run out. Set-up.
  [[nodiscard]] std::string peer() const noexcept;
  /// The local path of the present attempt, and the one in use when the connection is ready; see
  /// ConnectOptions::local_paths. Through rdma_cm, the port alone. Port 0 once the connection is
  /// gone. Set-up.
  [[nodiscard]] LocalPath local_path() const noexcept;
  /// What the handshake has shown of the peer. Before on_accept, or on_ready of a connection that
  /// we make, the key and the private data may be empty. Valid until on_interrupted or on_closed
  /// runs. Hot.
  [[nodiscard]] PeerIdentity peer_identity() const noexcept;
  /// PeerIdentity::private_data of the peer.
  [[nodiscard]] std::span<const std::byte> peer_private_data() const noexcept {
    return peer_identity().private_data;
  }
  /// A number below connections.maximum, unique among the engine's living connections. Use it to
  /// index arrays of per-connection state.
  [[nodiscard]] std::uint32_t index() const noexcept { return index_; }

  friend bool operator==(const Connection&, const Connection&) noexcept = default;

 private:
  friend struct detail::Internals;

  Connection(detail::EngineSlot* slot, std::uint32_t index, std::uint32_t generation) noexcept
      : slot_(slot), index_(index), generation_(generation) {}

  // The submit functions do not fill in the id, so that operations without an id do not pay for it.
  /// `tracked`: the operation has an id until it ends.
  Status submit_send(const BufferSlice& data, const CompletionCallback& done, Post post,
                     bool tracked);
  Status submit_send(const Buffer& data, const CompletionCallback& done, Post post, bool tracked);
  Status submit_send(std::span<const BufferSlice> parts, const CompletionCallback& done, Post post,
                     bool tracked);
  Status submit_send_with_imm(const BufferSlice& data, std::uint32_t immediate,
                              const CompletionCallback& done, Post post);
  Status submit_send_copy(std::span<const std::byte> bytes, const CompletionCallback& done,
                          Post post, bool tracked);
  Status submit_write(const BufferSlice& local, const RemoteRegion& remote,
                      const CompletionCallback& done, Post post);
  Status submit_write(std::span<const BufferSlice> parts, const RemoteRegion& remote,
                      const CompletionCallback& done, Post post);
  Status submit_write_and_send(std::span<const BufferSlice> parts, const RemoteRegion& remote,
                               std::span<const std::byte> notice, const CompletionCallback& done,
                               Post post);
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
