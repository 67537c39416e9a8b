// A connection: a small copyable handle to a pooled state machine inside its engine.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "spinwire/buffer.h"
#include "spinwire/callback.h"
#include "spinwire/clock.h"
#include "spinwire/connection_settings.h"
#include "spinwire/endpoint.h"
#include "spinwire/export.h"
#include "spinwire/raw.h"
#include "spinwire/status.h"

namespace spinwire {

class Connection;
class MemoryRegion;
class Message;
class Offer;
class RemoteMemory;
struct LeaseId;
struct LeaseOptions;
struct LeaseReply;
struct Returned;

enum class ConnectionState : std::uint8_t {
  resolving,   ///< TCP connection being made; leaves by connect or deadline
  exchanging,  ///< handshake and queue-pair set-up; leaves when both ends are ready, or by deadline
  ready,       ///< operations are accepted; leaves by close(), the peer's close, or an error
  draining,    ///< outstanding operations complete; leaves when none is left, or by deadline
  closed,      ///< nothing is outstanding; the handle answers `not_connected` from here on
};
SPINWIRE_API std::string_view to_string(ConnectionState state) noexcept;

/// The state of a queue pair, as the verbs have them.
enum class QueuePairState : std::uint8_t { reset, init, rtr, rts, sqd, sqe, err, unknown };
SPINWIRE_API std::string_view to_string(QueuePairState state) noexcept;

/// When an operation reaches the device.
enum class Post : std::uint8_t {
  automatic,  ///< `now` outside poll(), `defer` inside callbacks
  now,        ///< one doorbell at once, after what the connection had deferred
  defer,      ///< with the next flush(), or at the end of the poll()
};

/// How an accepted operation ended.
struct Completion {
  Status status = Status::ok;
  std::size_t bytes = 0;    ///< payload bytes moved; 0 unless ok
  std::uint64_t value = 0;  ///< what an atomic found, in host order; 0 for others, and unless ok
};
/// Runs inside poll(), exactly once per accepted operation; it may start further operations.
using CompletionCallback = Callback<void(const Completion&)>;

/// Tells how a call about a lease ended; see lease.h. Runs like a CompletionCallback.
using LeaseCallback = Callback<void(LeaseReply&)>;

/// Names an accepted operation until it has ended; plain data. No name comes again within 2^32
/// operations.
struct OperationId {
  std::uint64_t value = ~std::uint64_t{0};
  explicit operator bool() const noexcept { return value != ~std::uint64_t{0}; }
  friend bool operator==(const OperationId&, const OperationId&) noexcept = default;
};

/// An inbound message, valid during its callback.
class Message {
 public:
  /// None of a write, which has put them elsewhere.
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept {
    return {data_, data_ != nullptr ? size_ : 0};
  }
  [[nodiscard]] const std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  /// The sender's 32-bit immediate, in host order.
  [[nodiscard]] std::optional<std::uint32_t> immediate() const noexcept {
    return has_immediate_ ? std::optional<std::uint32_t>(immediate_) : std::nullopt;
  }
  /// True: no message, but the notice of a peer's write_with_imm; size() is the bytes written and
  /// data() is null (the peer chose where they went).
  [[nodiscard]] bool is_write() const noexcept { return is_write_; }
  /// Keeps the received bytes beyond the callback: the buffer leaves the receive ring, which is
  /// refilled from the receive pool while that lasts. Empty for is_write(), for what came where
  /// Offer::place() said, and when taken twice.
  [[nodiscard]] Buffer take() noexcept {
    Buffer taken(block_, block_ != nullptr ? size_ : 0);
    block_ = nullptr;
    return taken;
  }

 private:
  friend struct detail::Internals;

  Message(detail::Block* block, const std::byte* data, std::size_t size, std::uint32_t immediate,
          bool has_immediate, bool is_write) noexcept
      : block_(block),
        data_(data),
        size_(size),
        immediate_(immediate),
        has_immediate_(has_immediate),
        is_write_(is_write) {}

  detail::Block* block_;
  const std::byte* data_;
  std::size_t size_;
  std::uint32_t immediate_;
  bool has_immediate_;
  bool is_write_;
};

/// A message longer than connections.eager_bytes, about to be pulled from its sender. Valid during
/// its callback.
class Offer {
 public:
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  /// The sender's 32-bit immediate, in host order.
  [[nodiscard]] std::optional<std::uint32_t> immediate() const noexcept { return immediate_; }
  /// Names where the message shall arrive: the first size() bytes of `to`, a part of a buffer or of
  /// registered memory, which are undefined until on_message tells of it. False, and no change, if
  /// `to` is shorter or empty. Else it arrives in a block of the pool memory.rendezvous_bytes.
  bool place(const BufferSlice& to) noexcept {
    if (!to || to.size() < size_) return false;
    to_ = to;
    return true;
  }
  /// Does not want it: the sender's operation ends as `refused`, on_message tells nothing.
  void refuse() noexcept { refused_ = true; }

 private:
  friend struct detail::Internals;

  Offer(std::size_t size, std::optional<std::uint32_t> immediate) noexcept
      : size_(size), immediate_(immediate) {}

  std::size_t size_;
  std::optional<std::uint32_t> immediate_;
  BufferSlice to_;
  bool refused_ = false;
};

/// What a connection tells its application. Any may be empty. All run inside poll() or
/// poll_control(), and may start operations, close connections and open new ones.
struct ConnectionHandlers {
  /// The connection became ready.
  Callback<void(Connection)> on_ready;
  /// A message, or the notice of a write with immediate, arrived; in the order of posting.
  Callback<void(Connection, Message&)> on_message;
  /// A message longer than connections.eager_bytes was announced, maybe while earlier ones are
  /// still on the way: on_message tells when it is there and its turn has come.
  Callback<void(Connection, Offer&)> on_offer;
  /// The peer leases memory of its own to us: move it away to have it, else it is refused. May
  /// overtake long messages.
  Callback<void(Connection, RemoteMemory&)> on_lease;
  /// Memory that the peer had of us is back, and no peer can reach it any more; see Returned.
  Callback<void(Connection, const Returned&)> on_returned;
  /// The connection reached `closed`, from any state: once, after its last completion. The error's
  /// status is `ok` after close() here or at the peer; else it is what first went wrong, however
  /// often the connection was tried again since.
  Callback<void(Connection, const Error&)> on_closed;
  /// The connection was lost and is about to be made again: it is `resolving`, everything that was
  /// outstanding has completed, on_ready or on_closed comes next. See Reconnect.
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
  /// Accepted operations that have not ended, each once, long messages too; cancelled ones included
  /// while the device has them. None of the connection's own, see ConnectionSnapshot::control.
  std::uint32_t outstanding = 0;
  std::uint32_t send_credits = 0;     ///< messages that the peer takes now
  std::uint32_t granted_credits = 0;  ///< messages that the peer may send now
};

/// What keeps the next send() from being accepted. Room in the completion queue is none of it: the
/// engine opens only with enough for everything.
enum class Blocker : std::uint8_t {
  nothing,
  not_ready,   ///< the connection is in another state than `ready`
  send_queue,  ///< full: queues.send_depth; the peer or its device is slow
  operations,  ///< all of the engine's are under way: queues.operations
  /// The peer takes no more messages until its application polls, or not even the connection's own,
  /// for which everything else waits then.
  credit,
  /// Long messages alone: all that the engine can have offered are, or no memory window is free;
  /// see memory.windows. What is no longer than connections.eager_bytes is accepted. Leases do not
  /// wait for windows: registrations, made in control steps, take their place.
  windows,
};
SPINWIRE_API std::string_view to_string(Blocker blocker) noexcept;

/// How a connection stands.
struct ConnectionSnapshot {
  ConnectionState state = ConnectionState::closed;
  Blocker blocked_by = Blocker::not_ready;
  /// Since the peer's last sign of life that a poll() saw, to the last poll(). Long, with
  /// operations outstanding or credit used up: the peer is what they wait for.
  Nanoseconds silence{0};
  // Outstanding, by kind; cancelled ones included while the device has them.
  std::uint32_t messages = 0;
  std::uint32_t writes = 0;
  std::uint32_t reads = 0;
  std::uint32_t atomics = 0;
  /// The connection's own: credit, keepalives, goodbye; the binding and unbinding of windows; what
  /// is to be told about long messages and leases, while it waits for credit too; READs of the
  /// peer's long messages.
  std::uint32_t control = 0;
  std::uint32_t receives = 0;  ///< of a raw connection
  // Leases that are not over.
  std::uint32_t leased_out = 0;  ///< to the peer, keys of KeyScope::connection included
  std::uint64_t leased_out_bytes = 0;
  std::uint32_t leases_held = 0;  ///< of the peer's memory
  std::uint64_t leases_held_bytes = 0;
  ConnectionStats stats;
};

/// A region as bytes that can be passed on; see Connection::token().
inline constexpr std::size_t kRegionTokenBytes = 48;
using RegionToken = std::array<std::byte, kRegionTokenBytes>;

namespace detail {
struct EngineSlot;
}

/// A connection, as a small value that may be copied; see spinwire.h for what holds for all
/// handles. Operations answer `ok` when accepted, and then end in exactly one callback; any other
/// status means that nothing was taken. All operations can be called from callbacks. Hot unless
/// marked set-up.
class SPINWIRE_API Connection {
 public:
  Connection() noexcept = default;

  /// Sends a message of up to max_message() bytes, which arrives whole, once, in order. Copies
  /// nothing; `done` runs when the peer's device has taken it. Above connections.eager_bytes the
  /// peer's engine pulls it: `done` runs when it has, with `refused` if the peer's application did
  /// not want it, with `no_buffer` if no block became free there in time. Errors: would_block
  /// (credit, send queue, operations or windows used up), message_too_long, out_of_bounds (an empty
  /// slice), invalid_argument (memory of another engine, or that this connection's own domain does
  /// not know), unsupported (a raw connection), not_connected (not ready), wrong_thread,
  /// forked_child; where a long message needs a registration (see memory.windows)
  /// also those of Engine::expose().
  Status send(const BufferSlice& data, const CompletionCallback& done = {},
              Post post = Post::automatic);
  Status send(const Buffer& data, const CompletionCallback& done = {}, Post post = Post::automatic);
  /// Here and below: `id`, unless null, is given the operation's id if the call answers ok. Costs
  /// the calls without it nothing.
  Status send(const BufferSlice& data, const CompletionCallback& done, Post post, OperationId* id) {
    return identify(send(data, done, post), id);
  }
  Status send(const Buffer& data, const CompletionCallback& done, Post post, OperationId* id) {
    return identify(send(data, done, post), id);
  }
  /// The same, with a 32-bit immediate beside the bytes.
  Status send_with_imm(const BufferSlice& data, std::uint32_t immediate,
                       const CompletionCallback& done = {}, Post post = Post::automatic);
  Status send_with_imm(const BufferSlice& data, std::uint32_t immediate,
                       const CompletionCallback& done, Post post, OperationId* id) {
    return identify(send_with_imm(data, immediate, done, post), id);
  }
  Status send_with_imm(const Buffer& data, std::uint32_t immediate,
                       const CompletionCallback& done = {}, Post post = Post::automatic,
                       OperationId* id = nullptr) {
    return identify(send_with_imm(data.slice(), immediate, done, post), id);
  }
  /// Copies `bytes` into a block of the send pool first; also answers no_buffer.
  Status send_copy(std::span<const std::byte> bytes, const CompletionCallback& done = {},
                   Post post = Post::automatic);
  Status send_copy(std::span<const std::byte> bytes, const CompletionCallback& done, Post post,
                   OperationId* id) {
    return identify(send_copy(bytes, done, post), id);
  }

  /// Writes `local` to the first bytes of `remote`. The peer's CPU takes no part. Errors besides
  /// those of send(): out_of_bounds (longer than `remote`, or no bytes), remote_access (`remote`
  /// does not allow it), lease_expired and invalid_argument (`remote` is part of a lease that is
  /// over, or of another connection's).
  Status write(const BufferSlice& local, const RemoteRegion& remote,
               const CompletionCallback& done = {}, Post post = Post::automatic);
  Status write(const BufferSlice& local, const RemoteRegion& remote, const CompletionCallback& done,
               Post post, OperationId* id) {
    return identify(write(local, remote, done, post), id);
  }
  Status write(const Buffer& local, const RemoteRegion& remote, const CompletionCallback& done = {},
               Post post = Post::automatic, OperationId* id = nullptr) {
    return identify(write(local.slice(), remote, done, post), id);
  }
  /// The same, and the peer's on_message is told the immediate and the length, in order with
  /// messages; costs a credit like one. May have no bytes: a notice alone.
  Status write_with_imm(const BufferSlice& local, const RemoteRegion& remote,
                        std::uint32_t immediate, const CompletionCallback& done = {},
                        Post post = Post::automatic);
  Status write_with_imm(const BufferSlice& local, const RemoteRegion& remote,
                        std::uint32_t immediate, const CompletionCallback& done, Post post,
                        OperationId* id) {
    return identify(write_with_imm(local, remote, immediate, done, post), id);
  }
  Status write_with_imm(const Buffer& local, const RemoteRegion& remote, std::uint32_t immediate,
                        const CompletionCallback& done = {}, Post post = Post::automatic,
                        OperationId* id = nullptr) {
    return identify(write_with_imm(local.slice(), remote, immediate, done, post), id);
  }
  /// Reads the first bytes of `remote` into `local`, whose bytes are undefined until `done`.
  Status read(const BufferSlice& local, const RemoteRegion& remote,
              const CompletionCallback& done = {}, Post post = Post::automatic);
  Status read(const BufferSlice& local, const RemoteRegion& remote, const CompletionCallback& done,
              Post post, OperationId* id) {
    return identify(read(local, remote, done, post), id);
  }
  Status read(const Buffer& local, const RemoteRegion& remote, const CompletionCallback& done = {},
              Post post = Post::automatic, OperationId* id = nullptr) {
    return identify(read(local.slice(), remote, done, post), id);
  }

  /// Compares the 8 bytes at `remote` with `expected` and, if they are equal, puts `desired` in
  /// their place, as one step. Completion::value tells what was there before: `expected` if and
  /// only if they were replaced. All numbers are in host order, and the bytes are a number in the
  /// host order of their owner. Atomic against other atomics of the device that the memory is
  /// reached through, as the verbs have it (IBV_ATOMIC_HCA): not against READs and WRITEs, and
  /// against the owner's processor only where the device says so (softverbs does, on slabs). Errors
  /// besides those of write(): unsupported (our device has no atomics), out_of_bounds also for a
  /// region of more than 8 bytes, invalid_argument (its address is no multiple of 8), remote_access
  /// (`remote` does not allow Access::remote_atomic). As many run at once as queue_pair.rd_atomic
  /// allows at both ends; the device lets others wait.
  Status compare_swap(const RemoteRegion& remote, std::uint64_t expected, std::uint64_t desired,
                      const CompletionCallback& done = {}, Post post = Post::automatic);
  Status compare_swap(const RemoteRegion& remote, std::uint64_t expected, std::uint64_t desired,
                      const CompletionCallback& done, Post post, OperationId* id) {
    return identify(compare_swap(remote, expected, desired, done, post), id);
  }
  /// Adds `add` to the 8 bytes at `remote`, modulo 2^64, as one step; all else as compare_swap().
  Status fetch_add(const RemoteRegion& remote, std::uint64_t add,
                   const CompletionCallback& done = {}, Post post = Post::automatic);
  Status fetch_add(const RemoteRegion& remote, std::uint64_t add, const CompletionCallback& done,
                   Post post, OperationId* id) {
    return identify(fetch_add(remote, add, done, post), id);
  }

  // Of raw connections; see raw.h. Others answer `unsupported`.
  /// Receives into these parts of memory, in their order; none at all take a message without bytes,
  /// or the notice of a write. May be called while the connection is being made. Those that were
  /// deferred are posted together, before operations that were. Errors: would_block
  /// (RawSettings::receive_depth are outstanding), invalid_argument (more elements than
  /// RawSettings::max_recv_sge), out_of_bounds (an element without bytes), message_too_long (more
  /// than 1 GiB), not_connected, wrong_thread, forked_child.
  Status post_receive(std::span<const BufferSlice> into, const RawReceiveCallback& on_received = {},
                      const RawPostedCallback& on_posted = {}, Post post = Post::automatic);
  Status post_receive(const BufferSlice& into, const RawReceiveCallback& on_received = {},
                      const RawPostedCallback& on_posted = {}, Post post = Post::automatic) {
    return post_receive(std::span(&into, 1), on_received, on_posted, post);
  }
  /// Sends these parts of memory as one message, which takes one receive of the peer's; none at all
  /// are a message without bytes. Errors: those of post_receive(), for RawSettings::max_send_sge,
  /// and would_block (send queue or operations used up).
  Status send_raw(std::span<const BufferSlice> data, const CompletionCallback& done = {},
                  Post post = Post::automatic);
  Status send_raw(std::span<const BufferSlice> data, const CompletionCallback& done, Post post,
                  OperationId* id) {
    return identify(send_raw(data, done, post), id);
  }
  Status send_raw(const BufferSlice& data, const CompletionCallback& done = {},
                  Post post = Post::automatic) {
    return send_raw(std::span(&data, 1), done, post);
  }
  /// The same, with a 32-bit immediate beside the bytes.
  Status send_raw_with_imm(std::span<const BufferSlice> data, std::uint32_t immediate,
                           const CompletionCallback& done = {}, Post post = Post::automatic);
  Status send_raw_with_imm(std::span<const BufferSlice> data, std::uint32_t immediate,
                           const CompletionCallback& done, Post post, OperationId* id) {
    return identify(send_raw_with_imm(data, immediate, done, post), id);
  }
  Status send_raw_with_imm(const BufferSlice& data, std::uint32_t immediate,
                           const CompletionCallback& done = {}, Post post = Post::automatic) {
    return send_raw_with_imm(std::span(&data, 1), immediate, done, post);
  }

  /// Posts what was deferred on this connection with one doorbell.
  Status flush();

  /// The operation that this connection accepted last, of those that have neither ended nor been
  /// cancelled: right after a call that answered ok, that one. Empty if there is none, and for a
  /// stale handle or another thread. Costs the operations themselves nothing. Hot.
  [[nodiscard]] OperationId last_operation() const noexcept;
  /// Gives an operation up. Its callback runs with Status::cancelled in the next poll(), or in the
  /// present one if a callback calls this, never inside this call, and does not wait for those of
  /// older operations. One that was
  /// deferred is never posted: a message's credit is there again at once, its room in the send
  /// queue and its memory with the callback. One that the device has cannot be taken back: it runs
  /// all the same, may change memory here and at the peer, counts in stats() and, if it fails, ends
  /// the connection; it keeps its room and the reference to its memory until the device is done
  /// with it, so that nobody else gets that memory before. A long message (see send()) that was
  /// deferred is never offered; one that the peer was offered may arrive all the same, and keeps
  /// its memory until the peer has answered. Takes time in proportion to the connection's
  /// outstanding operations. Errors: invalid_argument (none of this connection's, or ended, or
  /// cancelled already), not_connected, wrong_thread, forked_child.
  Status cancel(OperationId operation);

  /// Of a connection made by Engine::prepare(): the peer's end has come. The connection is ready
  /// as soon as our queue pair is, which may be before the peer has joined; what is sent until then
  /// is repeated as queue_pair.retry_count and ack_timeout say. Set-up; usable in on_endpoint.
  /// Errors, with nothing changed: invalid_argument (not prepared, or joined already), protocol,
  /// unsupported (what the endpoint says), not_connected, wrong_thread, forked_child.
  Result<void> join(const Endpoint& peer);
  /// Our end of such a connection; not_connected until on_endpoint has run. Set-up.
  [[nodiscard]] Result<Endpoint> endpoint() const;

  /// Gives a connection that is not made yet other settings than its engine's, in the place of
  /// those of its listener. Set-up; for on_accept. Errors, with nothing changed: invalid_argument
  /// (also: it is too late), limit, no_device, unsupported, not_connected, wrong_thread,
  /// forked_child.
  Result<void> configure(const ConnectionSettings& settings);
  /// As Engine::expose(), with no more rights than the connection's settings give its peer. Any
  /// connection of the engine can use the key, unless this one has a protection domain of its own:
  /// then this one alone can, until it ends. Set-up. Errors: those, not_connected (also: its domain
  /// is not there yet).
  Result<RemoteRegion> expose(const BufferSlice& slice, Access access);
  /// The same with a key for this connection's peer alone, if `scope` says so, where the device has
  /// memory windows (else with one of the engine's domain). No system call if `slice` is memory of
  /// the engine's pools and the device has windows: the key is valid for whatever reaches the peer
  /// after messages sent from now on. Ends with the connection, or by Connection::revoke(). Errors:
  /// those, and would_block.
  Result<RemoteRegion> expose(const BufferSlice& slice, Access access, KeyScope scope);
  /// Closes a key that expose() made, with the answers of Engine::revoke(). A key of
  /// KeyScope::connection always answers would_block first, and on_returned also reports its end.
  /// The peer is not told, and loses the connection if it uses the key again. Runs no callback.
  /// Set-up.
  Status revoke(const RemoteRegion& region);
  /// A region of our memory that was exposed, as bytes to be passed on by any means: for
  /// import_token() at a peer. Errors: invalid_argument (empty, or of a lease), not_connected.
  [[nodiscard]] Result<RegionToken> token(const RemoteRegion& region) const;
  /// The region of a token that a peer made, for operations on this connection. Set-up. Errors:
  /// protocol (it is none, or was damaged), invalid_argument (its key cannot be used on this
  /// connection: it is of another engine, or of another connection), not_connected, wrong_thread,
  /// forked_child.
  [[nodiscard]] Result<RemoteRegion> import_token(std::span<const std::byte> token) const;

  /// Asks the peer for `bytes` of memory, zeroed, for a time. done() has it, or says why not: the
  /// peer's limits, see LeaseRefusal, or flushed if the connection ends first. Errors:
  /// invalid_argument (no bytes, rights that are none, a time not above leases.guard), would_block
  /// (leases.maximum is reached, or too much waits to be told to the peer), unsupported (a raw
  /// connection), not_connected, wrong_thread, forked_child.
  Status request_memory(std::size_t bytes, const LeaseOptions& options, const LeaseCallback& done);
  /// Leases memory of ours to the peer, whose on_lease has it; done() tells whether it was taken.
  /// Holds a reference to the memory until on_returned, which tells how it came back. No system
  /// call here; a registration follows in the control step where the device has no windows, or the
  /// memory is not of the engine's pools. Errors: as request_memory(); invalid_argument also for
  /// rights that the connection's settings leave out, out_of_bounds (no bytes).
  Status lease(const BufferSlice& memory, const LeaseOptions& options,
               const LeaseCallback& done = {});
  /// Wants memory back that was leased to the peer: the peer stops using it and releases it, else
  /// it is taken when a peer that stops in time would have. Errors: invalid_argument (no lease of
  /// this connection's, or over), not_connected, wrong_thread, forked_child.
  Status recall(LeaseId lease);

  /// As Engine::register_memory(), in the same way. Set-up. What a domain of its own has of it ends
  /// with the connection, the region's bytes stay usable by their owner.
  Result<MemoryRegion> register_memory(std::span<std::byte> bytes, Access access);

  /// Stops accepting operations, lets the outstanding ones complete up to the configured close
  /// time-out, tells the peer, and ends in on_closed. Further calls answer not_connected. Set-up.
  Status close();

  /// Replaces the handlers. Set-up; usable in on_accept.
  Status set_handlers(const ConnectionHandlers& handlers);

  /// closed for an empty or stale handle.
  [[nodiscard]] ConnectionState state() const noexcept;
  [[nodiscard]] bool ready() const noexcept { return state() == ConnectionState::ready; }
  /// Longest message that send(), or on a raw connection send_raw(), accepts: the smaller of both
  /// ends' connections.max_message_bytes, or of their eager_bytes if the peer may not read here
  /// (see ConnectionSettings::access). 0 unless ready.
  [[nodiscard]] std::size_t max_message() const noexcept;
  /// Zeroes for a stale handle. Set-up.
  [[nodiscard]] ConnectionStats stats() const noexcept;
  /// What blocks the connection now and what is outstanding, in constant time; `closed` for a stale
  /// handle and for another thread. Hot.
  [[nodiscard]] ConnectionSnapshot snapshot() const noexcept;
  /// Asks the device for the state of the queue pair; state() is what we know without. Set-up (a
  /// control verb). Errors: not_connected (there is none yet, or no more), wrong_thread,
  /// forked_child, system.
  [[nodiscard]] Result<QueuePairState> query_state() const;
  /// "address:port" of the peer's TCP end; GID and queue pair if brought up by hand. Set-up.
  [[nodiscard]] std::string peer() const;

  friend bool operator==(const Connection&, const Connection&) noexcept = default;

  /// A number unique among the engine's living connections, below Config::connections.maximum: for
  /// arrays of per-connection state.
  [[nodiscard]] std::uint32_t index() const noexcept { return index_; }

 private:
  friend struct detail::Internals;

  Connection(detail::EngineSlot* slot, std::uint32_t index, std::uint32_t generation) noexcept
      : slot_(slot), index_(index), generation_(generation) {}
  Status identify(Status accepted, OperationId* id) const noexcept {
    if (id != nullptr && accepted == Status::ok) *id = last_operation();
    return accepted;
  }

  detail::EngineSlot* slot_ = nullptr;
  std::uint32_t index_ = 0;
  std::uint32_t generation_ = 0;
};

}  // namespace spinwire
