// The engine: one device, its memory, connections and sessions, driven by the caller's loop.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "spinwire/buffer.h"
#include "spinwire/callback.h"
#include "spinwire/clock.h"
#include "spinwire/config.h"
#include "spinwire/connect_options.h"
#include "spinwire/connection.h"
#include "spinwire/connection_settings.h"
#include "spinwire/device.h"
#include "spinwire/device_event.h"
#include "spinwire/drain.h"
#include "spinwire/endpoint.h"
#include "spinwire/engine_stats.h"
#include "spinwire/export.h"
#include "spinwire/identity.h"
#include "spinwire/resolve.h"
#include "spinwire/rpc.h"
#include "spinwire/status.h"
#include "spinwire/timer.h"

namespace spinwire {

namespace detail {
class EngineCore;
}

/// How Engine::allocate() chooses and prepares memory.
struct AllocateOptions {
  Pool pool = Pool::send;      ///< any but `receive`
  std::size_t alignment = 64;  ///< of the first byte, in bytes; a power of two up to 2 MiB
  bool zeroed = false;         ///< all bytes are 0; takes time in proportion to their number
};

/// The application's own memory, registered for operations. Dropping the last reference to it, of
/// the region, a slice or an operation, deregisters the memory: a control verb. Hot otherwise.
class SPINWIRE_API MemoryRegion {
 public:
  MemoryRegion() noexcept = default;
  /// The whole region, or bytes [offset, offset + length) of it; empty (false) if out of bounds.
  [[nodiscard]] BufferSlice slice() const noexcept { return whole_; }
  /// The whole region, or bytes [offset, offset + length) of it; empty (false) if out of bounds.
  [[nodiscard]] BufferSlice slice(std::size_t offset, std::size_t length) const noexcept {
    return whole_.slice(offset, length);
  }
  /// The region that peers may use; empty if registered with Access::local.
  [[nodiscard]] RemoteRegion remote() const noexcept { return remote_; }
  explicit operator bool() const noexcept { return static_cast<bool>(whole_); }

 private:
  friend struct detail::Internals;

  MemoryRegion(BufferSlice whole, RemoteRegion remote) noexcept
      : whole_(std::move(whole)), remote_(remote) {}

  BufferSlice whole_;
  RemoteRegion remote_;
};

/// A listening address. Dropping it stops listening; accepted connections stay. Drop it on the
/// engine's thread: dropped elsewhere, the address stays in use until the engine ends. Set-up.
class SPINWIRE_API Listener {
 public:
  Listener() noexcept = default;
  Listener(Listener&& other) noexcept;
  Listener& operator=(Listener&& other) noexcept;
  ~Listener();
  /// The bound "address:port"; for port 0, with the port that the system chose. Empty also if
  /// memory has run out.
  [[nodiscard]] std::string address() const noexcept;
  /// True while it listens.
  explicit operator bool() const noexcept;
  /// The listening socket. The engine owns it: do not close it, but send a copy to a successor
  /// (SCM_RIGHTS), which then accepts peers beside this engine. The connection of a session's long
  /// calls may reach either engine; the wrong one ends the session, see release(). From now on
  /// clients notice the death of this engine later, see Engine::adopt_listener(). Errors:
  ///   unsupported    rdma_cm, or a simulated network: there is no such socket
  ///   not_connected  it does not listen
  [[nodiscard]] Result<int> fd() const;
  /// Stops accepting, without closing the socket: peers that connect wait in it for a successor
  /// (Engine::adopt_listener()). Peers that were accepted before are served on. The descriptor,
  /// which is close-on-exec, is the caller's from now on, and the Listener is empty. On a simulated
  /// network only an engine on the same host can adopt it.
  ///
  /// Sessions that are served here stay, but a connection that a client makes for long calls, or
  /// for all calls with RpcTransport::connection, reaches the successor. The successor refuses it,
  /// and the session ends at its client as after a goodbye: calls in progress have their replies,
  /// the others go to the successor if the session reconnects, and else end as not_connected. A
  /// session that is being opened over a connection is refused, and opened again if it reconnects.
  /// One with RpcTransport::connection that was ready ends as peer_lost once its connection is
  /// lost. While a successor listens, clients notice the death of this engine later: see
  /// Engine::adopt_listener(). Errors:
  ///   unsupported    rdma_cm: there is no socket
  ///   not_connected  it does not listen
  [[nodiscard]] Result<int> release();

 private:
  friend struct detail::Internals;

  Listener(detail::EngineSlot* slot, std::uint32_t index, std::uint32_t generation) noexcept
      : slot_(slot), index_(index), generation_(generation) {}

  detail::EngineSlot* slot_ = nullptr;
  std::uint32_t index_ = 0;
  std::uint32_t generation_ = 0;
};

/// An engine: one device, its memory, connections and sessions. Nothing happens unless its thread
/// calls poll(). spinwire.h has the rules for all functions.
class SPINWIRE_API Engine {
 public:
  /// Opens the device, registers all memory, and posts the receives. The engine belongs to the
  /// calling thread. Set-up. Errors:
  ///   bad_config  a setting is out of range, or does not fit the others; or the key file has no
  ///               key, a line that is none, or rights for others than its owner
  ///   no_device   no such device, port or GID
  ///   no_memory   not enough memory, hugepages or locked memory. What the machine, its cgroup or
  ///               the process's limits do not have is refused before any of it is touched
  ///   limit       the device or the system has less than the settings ask
  ///   system      the operating system refused a call
  [[nodiscard]] static Result<Engine> open(const Config& config,
                                           const Clock& clock = Clock::real());

  /// An empty engine, whose functions answer not_connected.
  Engine() noexcept;
  Engine(Engine&&) noexcept;
  Engine& operator=(Engine&&) noexcept;
  /// Ends all connections and sessions at once: each outstanding operation and call ends as
  /// `flushed`, and each on_closed runs. The captures of callbacks must still be valid. Memory that
  /// buffers still hold is freed when they are dropped. Waits briefly for peers amid an access, on
  /// softverbs for up to 5 s until no other thread of the process copies to or from this engine's
  /// memory, and on RoCE for up to 3 s if threads resolve peers' addresses. Set-up.
  ///
  /// An engine that one of its callbacks destroys or replaces ends when the poll(),
  /// poll_control(), arm(), wait() or visit_served_sessions() that runs the callback returns, or
  /// with the destruction that runs it. Until then its handles answer as before and its other
  /// callbacks run: their captures must be valid that long. A callback may move its engine.
  ///
  /// Another thread may destroy the engine, or assign to it, once the engine's thread was joined.
  /// The last callbacks then run on the destroying thread, where functions of the engine and of its
  /// handles answer wrong_thread. Nothing detects a destruction while the engine's thread runs.
  ~Engine();

  /// Drains completions, runs callbacks, reposts receives and rings doorbells. Takes a control step
  /// every engine.control_interval, unless engine.control is manual. Never blocks. Answers the
  /// number of events, 0 when idle, or minus a Status: not_connected (an empty engine),
  /// wrong_thread, reentrant (inside a callback), forked_child. Hot, except for control steps.
  int poll() noexcept;
  /// Takes one control step: sockets, liveness, timers, and at most one control verb. Answers like
  /// poll(). Set-up.
  int poll_control() noexcept;
  /// Posts all deferred operations and calls. One that the device refuses ends through its
  /// callback. Hot. Errors: those of every function.
  Status flush() noexcept;

  // Waiting. The functions make system calls; after the first call they allocate nothing. arm() and
  // wait() poll once and post deferred operations, as poll() and flush() do.
  /// Sleeps until the engine has work, or `timeout` has passed. Polls once before, so callbacks
  /// may run inside. While the engine sleeps, its timers, time-outs and keepalives go on: the
  /// function returns in time for them. Call poll() after each return, and poll_control() if
  /// engine.control is manual. include/waiting.md says what wakes an engine. With a manual clock it
  /// never sleeps. Answers:
  ///   ok         call poll(): there may be work. Also after a signal, after next_deadline(), and
  ///              if a callback has destroyed the engine
  ///   timed_out  `timeout` was shorter than next_deadline(), and nothing has happened
  ///   reentrant  inside a callback
  ///   limit      descriptors are used up
  ///   no_memory  there is no memory for a descriptor
  ///   system     the operating system refused
  Status wait(Nanoseconds timeout) noexcept;
  /// Wakes the engine: wait() returns, or, if the engine does not sleep, the next arm() or wait()
  /// does not let it sleep. Several calls before that count once. Any thread, and signal handlers;
  /// the Engine must neither be moved nor destroyed meanwhile. Does not poll. Errors:
  ///   not_connected  an empty engine, or one that has ended
  ///   forked_child   called in a forked child
  Status wake() const noexcept;
  /// Prepares to sleep on fd(), as wait() does. Polls once, so callbacks may run inside. True:
  /// nothing is pending, and whatever comes from now on makes fd() readable. Then sleep for
  /// next_deadline() at most, and call poll(). False: do not sleep, but poll; also if the call is
  /// not allowed here, descriptors are used up, or a callback has destroyed the engine. With a
  /// manual clock next_deadline() is no real time.
  [[nodiscard]] bool arm() noexcept;
  /// A descriptor for poll(2), epoll and the like, the same for the engine's life. It is readable
  /// if the engine has work, provided that arm() has answered true since the last poll(). The
  /// engine owns it: neither read from it nor close it. Errors:
  ///   limit   descriptors are used up
  ///   system  the operating system refused
  [[nodiscard]] Result<int> fd();
  /// A duration: how long the engine may sleep although nothing comes; 0: poll() is due. Never more
  /// than 250 ms. After arm(), the end of the sleep that it allows; what is started between arm()
  /// and the sleep may shorten it, so start operations and calls before arm(), or arm again. Hot.
  [[nodiscard]] Nanoseconds next_deadline() const noexcept;

  // Timers. A timer runs in the first control step after its time: at most engine.control_interval
  // late if the engine is polled. A step runs at most 64 timers, those of the library included; the
  // next poll() then takes another step. The engine's end cancels all timers.
  /// Runs `callback` once, `delay` from now. Allocates only when more timers exist than ever
  /// before; otherwise hot. Errors:
  ///   invalid_argument  a delay below 0, or an empty callback
  ///   limit             1,048,576 timers exist
  [[nodiscard]] Result<Timer> after(Nanoseconds delay, const TimerCallback& callback);
  /// Runs `callback` every `interval`, first after one interval. Times that an engine misses, since
  /// it was not polled, are left out. Allocates like after(). Errors:
  ///   invalid_argument  an interval of 0 or below, or an empty callback
  ///   limit             1,048,576 timers exist
  [[nodiscard]] Result<Timer> every(Nanoseconds interval, const TimerCallback& callback);

  /// Resolves "host:port" as spinwire::resolve() does, but without waiting: a thread of the library
  /// asks, and wakes the engine. `done` runs in a control step (see TimerCallback), unless the
  /// engine ends before. Set-up. Errors:
  ///   invalid_argument  an empty callback
  ///   not_connected     this engine drains, and makes nothing new any more
  ///   limit             16 names are being resolved, or descriptors or threads are used up
  ///   system            the operating system refused
  [[nodiscard]] Result<void> resolve(std::string_view name, const ResolveCallback& done);

  /// Listens for connections and sessions on "a.b.c.d:port" or "[v6]:port"; port 0 takes a free
  /// port. Set-up. Errors:
  ///   invalid_argument  the address, a setting out of range, or too much private data
  ///   not_connected     this engine drains, and makes nothing new any more
  ///   in_use            something else listens there
  ///   limit             files or epoll entries are used up, or the device has less than a setting
  ///                     asks
  ///   no_device         the device is gone, or a setting names a port or GID that does not exist
  ///   unauthenticated   other hosts reach the address, or any address through rdma_cm, and there
  ///                     is no key; see Config::Security
  ///   unsupported       rdma_cm on this device, this IP version on this host, or
  ///                     atomics
  ///   system            the operating system refused
  [[nodiscard]] Result<Listener> listen(std::string_view address, const ListenOptions& options);
  /// Listens on a socket that listens already: from another engine (Listener::release()), perhaps
  /// of another process, or from a service manager (file descriptor 3 and up of LISTEN_FDS). Peers
  /// that have connected to it meanwhile are accepted. Takes the descriptor over, and makes it
  /// non-blocking and close-on-exec; after an error the descriptor is still the caller's, and
  /// perhaps has these two flags. ListenOptions::via must be Via::tcp. Nobody can tell whether the
  /// former engine lives: its sessions end after connections.peer_timeout of silence, unless the
  /// client's device sees the death of its process, as softverbs does. Set-up. Errors:
  ///   invalid_argument  not a listening TCP socket, an IPv6 one that takes IPv4 connections, or a
  ///                     setting out of range; on a simulated network, not what
  ///                     Listener::release() answered on the same host
  ///   not_connected     this engine drains, and makes nothing new any more
  ///   limit             files or epoll entries are used up, or the device has less than a setting
  ///                     asks
  ///   no_device         the device is gone, or a setting names a port or GID that does not exist
  ///   unauthenticated   other hosts reach the address, and there is no key; see Config::Security
  ///   unsupported       rdma_cm, or atomics
  ///   system            the operating system refused
  [[nodiscard]] Result<Listener> adopt_listener(int fd, const ListenOptions& options);
  /// Begins to connect. on_ready or on_closed reports the result. Set-up. Errors:
  ///   invalid_argument  an address, a time or a setting out of range, too much private data, or
  ///                     local paths beside a port in the settings or with rdma_cm
  ///   not_connected     this engine drains, and makes nothing new any more
  ///   limit             connections.maximum, connections.handshakes, receives or files are used
  ///                     up, the device has less than a setting asks, or a local path has no such
  ///                     partition key
  ///   no_device         the device is gone, or a setting or local path names a port or GID that
  ///                     does not exist
  ///   unauthenticated   the address is of another host, or is for rdma_cm, and there is no key;
  ///                     see Config::Security
  ///   unsupported       rdma_cm on this device, this IP version on this host, or
  ///                     atomics
  ///   refused           the operating system knows at once that nothing listens there
  ///   timed_out         the operating system knows at once that the host does not answer
  ///   peer_lost         the operating system knows at once that the peer closed the connection
  ///   system            there is no route, the links of all local paths are down, or the operating
  ///                     system refused
  [[nodiscard]] Result<Connection> connect(std::string_view address, const ConnectOptions& options);

  /// Prepares a connection whose endpoints the application exchanges out-of-band. on_endpoint gives
  /// our endpoint; Connection::join() takes the peer's. With a key, both endpoints have a proof of
  /// it. Set-up. Errors:
  ///   invalid_argument  a time or a setting out of range, or too much private data
  ///   not_connected     this engine drains, and makes nothing new any more
  ///   limit             connections.maximum or receives are used up, or the device has less than a
  ///                     setting asks
  ///   no_device         the device is gone, or a setting names a port or GID that does not exist
  ///   unauthenticated   the device reaches other hosts, and there is no key; see Config::Security
  ///   unsupported       the settings give the peer atomics, and the device has none
  ///   system            the device refused
  [[nodiscard]] Result<Connection> prepare(const PrepareOptions& options);

  // Remote calls; see rpc.h.
  /// Runs `handler` for each call of `method`, in sessions through any listener with Via::tcp. A
  /// listener with Via::rdma_cm takes no sessions. An empty handler ends the method. The first
  /// serve() takes the memory that remote calls need. Set-up. Errors:
  ///   reentrant      inside a callback
  ///   not_connected  this engine drains
  ///   limit          the completion queue or a pool has not enough room
  ///   unsupported    rpc.transport is "datagram", and the device has no datagrams
  ///   no_device      the device is gone
  ///   system         the device refused
  [[nodiscard]] Result<void> serve(Method method, const MethodHandler& handler);
  /// Opens a session with the engine that listens at `address`. on_ready or on_closed reports the
  /// result. Set-up. Errors:
  ///   invalid_argument  the address, the time-out, the window, or too much private data
  ///   not_connected     this engine drains, and makes nothing new any more
  ///   limit             rpc.sessions are open; connections.handshakes or files are used up; the
  ///                     completion queue or a pool has not enough room; or a local path has no
  ///                     partition key queue_pair.pkey_index
  ///   unauthenticated   the address is of another host, and there is no key; see Config::Security
  ///   unsupported       rpc.transport is "datagram", and the device has no datagrams or a local
  ///                     path is not the engine's; or this IP version on this host
  ///   no_device         the device is gone, or a local path names a port or GID that does not
  ///                     exist
  ///   refused           the operating system knows at once that nothing listens there
  ///   timed_out         the operating system knows at once that the host does not answer
  ///   peer_lost         the operating system knows at once that the peer closed the connection
  ///   system            there is no route, the links of all local paths are down, or the device or
  ///                     the operating system refused
  [[nodiscard]] Result<Session> open_session(std::string_view address,
                                             const SessionOptions& options);
  /// Counts of remote calls. Hot.
  [[nodiscard]] RpcStats rpc_stats() const noexcept;
  /// Visits the sessions that peers have opened here: those among the `most` records from number
  /// `from` on. Returns the number to go on from; 0 at the end. So a loop from 0 to 0 visits all.
  /// For an empty engine or visitor, and on another thread, visits nothing and answers 0.
  /// The visitor runs inside this call, under the rules of callbacks; it may close sessions. An
  /// engine that it destroys ends when the visit does, which goes on until then. Operations and
  /// calls that it starts are posted at the end. Allocates nothing; takes time in proportion to
  /// `most` and the sessions' windows. Set-up.
  [[nodiscard]] std::uint32_t visit_served_sessions(std::uint32_t from, std::uint32_t most,
                                                    const ServedSessionVisitor& visitor) const;

  /// Ends all connections and sessions in order, for a restart. Does not block: the work is done by
  /// poll(). From now on the engine accepts and makes no connections and sessions: what would make
  /// one answers not_connected, and peers that ask are refused, with DrainOptions::retry_after in
  /// Error::goodbye. What exists ends in this order:
  ///   1. Sessions that peers have opened here, as by ServedSession::close(): calls in progress are
  ///      answered. Until then everything else works, for handlers that need it; connections and
  ///      sessions of this end also reconnect.
  ///   2. Sessions that are open here, when their calls have ended; further calls answer
  ///      not_connected. None reconnects any more.
  ///   3. Connections, as by Connection::close(Goodbye): the operations of both ends complete, and
  ///      messages under way are delivered. Leases end with them, in either direction; the
  ///      operations of a holder that are under way complete before. None reconnects any more.
  /// Out-of-band and raw connections close in step 3, too, raw ones without a goodbye. A connection
  /// that is being accepted is refused, or becomes ready and closes in step 3, if its peer may be
  /// ready already; a peer that falls silent meanwhile holds the drain for the handshake's
  /// time-out. What has not ended after `timeout` is closed at once: its calls and operations end
  /// as `flushed`, and the peer is told goodbye all the same.
  ///
  /// Then drained() is true, and DrainOptions::on_drained runs. Destroy the engine next. An engine
  /// that is destroyed earlier tells its peers the same goodbye, and on_drained does not run. A
  /// further drain(), also after the end, begins anew with its own time-out and options; what ends
  /// already goes on, and the earlier on_drained does not run. Runs no callback. Set-up. Errors:
  ///   invalid_argument  a time-out below 0 or above 24 h, or retry_after below 0 or above
  ///                     kMaxRetryAfter
  [[nodiscard]] Result<void> drain(Nanoseconds timeout, const DrainOptions& options = {});
  /// Whether a drain is under way. False once drained(): a loop that begins one asks both.
  [[nodiscard]] bool draining() const noexcept;
  /// Whether a drain is over. Its last connections may still be closing if the time was short.
  [[nodiscard]] bool drained() const noexcept;

  /// Reads security.key_file again, and takes its keys in place of the former ones, so that keys
  /// can be replaced without another engine: include/running.md has the steps. After an error the
  /// former keys stay in force. May be called in a callback. It waits for the file system, and runs
  /// no callback.
  ///
  /// Connections and sessions stay, and their PeerIdentity::key, too. New connections and sessions,
  /// reconnects, and the connection of a session's long calls use the new keys. A handshake whose
  /// client's proof has been made or checked goes on with its key; a client whose proof arrives
  /// later is checked by the new keys. An out-of-band endpoint that the application has got keeps
  /// its proof, and stays valid for its peer's answer. The secrets of the former keys are zeroed
  /// before the function returns. Set-up. Errors:
  ///   bad_config  the engine was opened without a key file; or, as in open(), the file cannot be
  ///               read, has no key, a line that is not a key, or rights for others than its owner
  ///   no_memory   memory has run out
  ///   system      the operating system gives no random numbers
  [[nodiscard]] Result<void> reload_keys();

  /// Takes a block with room for `size` bytes, which are not zeroed. Empty if that fails;
  /// allocate_status() says why. Hot.
  [[nodiscard]] Buffer allocate(std::size_t size, Pool pool = Pool::send) noexcept;
  /// Takes `size` bytes of a block, aligned and zeroed as the options say. An alignment above 64
  /// takes up to that many bytes more from the pool. A message that does not begin at the block's
  /// first byte goes to the device in two elements. Empty if that fails; allocate_status() says
  /// why. Hot.
  [[nodiscard]] BufferSlice allocate(std::size_t size, const AllocateOptions& options) noexcept;
  /// Why allocate() last failed: no_buffer, or invalid_argument (0 bytes, more than the pool has,
  /// Pool::receive, or an alignment that is no power of two or above 2 MiB). Hot.
  [[nodiscard]] Status allocate_status() const noexcept;

  /// Registers memory of the application. The memory must stay mapped until the region is dropped
  /// and its operations have ended. The destruction of the engine waits for up to 5 s until other
  /// threads of the process copy nothing from or to it; if the log then has an error, leave it
  /// mapped. On softverbs, engines in other processes reach memory of the pools. They do not reach
  /// this memory, because it could make their polls wait, unless SOFTVERBS_TRUST_PAGES=1 is in
  /// their environment: reads, writes, and sends from it above 1 KiB otherwise end the connection.
  /// Set-up. Errors:
  ///   invalid_argument  no bytes; rights that do not exist or that queue_pair.access leaves out;
  ///                     memory that cannot be registered; MemoryFlags::zero_based
  ///   unsupported       Access::remote_atomic, and the device has no atomics; or a flag that
  ///                     DeviceInfo::memory_flags lacks, except relaxed_ordering
  ///   limit             no more registrations
  ///   no_memory         the registration failed
  ///   system            the registration failed
  [[nodiscard]] Result<MemoryRegion> register_memory(std::span<std::byte> bytes, Access access,
                                                     MemoryFlags flags = MemoryFlags::none);
  /// Opens exactly the bytes of `slice` to peers, under a new remote key, until revoke(). Holds a
  /// reference to the memory. Set-up (a registration). Errors:
  ///   invalid_argument  no bytes; no remote rights, or some that queue_pair.access leaves out;
  ///                     memory that cannot be registered, or of another engine; zero-based memory
  ///                     that does not begin at a page
  ///   unsupported       Access::remote_atomic, and the device has no atomics; or a flag that
  ///                     DeviceInfo::memory_flags lacks, except relaxed_ordering
  ///   limit             no more registrations
  ///   no_memory         the registration failed
  ///   system            the registration failed
  [[nodiscard]] Result<RemoteRegion> expose(const BufferSlice& slice, Access access,
                                            MemoryFlags flags = MemoryFlags::none);
  /// Closes a remote key that expose() made: of this engine, or of one of its connections with
  /// KeyScope::domain. Connection::revoke() closes a key of KeyScope::connection. Call it, between
  /// polls, until it answers something other than would_block. Runs no callback. Set-up. Answers:
  ///   ok                no peer can reach the memory any more, and the reference to it is dropped;
  ///                     answered once for each key
  ///   would_block       the key is closing, and an access may be under way; call again
  ///   local_error       the device refused to deregister the memory, which stays held; call again
  ///   invalid_argument  no such key of this engine, or revoked already; nothing is closed
  Status revoke(const RemoteRegion& region);

  /// Sets the callback for events of the device; an empty callback drops events. An event of a
  /// connection is reported before the connection ends because of the event. Set-up.
  /// Errors: those of every function.
  Status set_device_event_handler(const DeviceEventCallback& handler) noexcept;

  /// Sets the callback for replies that found no memory; an empty callback ends the waiting. Set it
  /// before the first call comes: only answers that are refused while it is set count. An
  /// answer to a call (PendingCall::reply(), refuse()) was refused with no_buffer, or
  /// reserve_reply() was empty because the send pool had no block, and may succeed now. Runs once,
  /// in a poll(), for all such answers since the last time; answer until no_buffer comes again. A
  /// handler that finds no memory keeps the call by Request::defer(). The call may be over when the
  /// callback runs. While an engine waits for this, its sleeps are brief. Set-up.
  /// Errors: those of every function.
  Status set_reply_writable_handler(const ReplyWritableCallback& handler) noexcept;

  /// Checks that the engine's records are consistent: operations, credit, receives, leases,
  /// windows, registrations, calls, and the owner of each block. For tests and for finding faults.
  /// Takes time in proportion to all that exists. Set-up. Errors: system (the first inconsistency:
  /// a defect of the library, or overwritten memory), reentrant (inside a callback).
  [[nodiscard]] Result<void> audit() const;

  /// The settings in effect. Hot.
  [[nodiscard]] const Config& config() const noexcept;
  /// The clock in use: the one given to open(), or the real one. Hot.
  [[nodiscard]] const Clock& clock() const noexcept;
  /// Sums over all connections. Set-up.
  [[nodiscard]] EngineStats stats() const noexcept;
  /// All counters and levels of the engine, its pools and its calls. Takes constant time. Hot.
  [[nodiscard]] EngineSnapshot snapshot() const noexcept;
  /// A text for a debugger or a log: changed settings, names of security keys, counters, pools, a
  /// drain, and up to 64 lines each of listeners, timers, connections, leases and sessions, the
  /// blocked ones first. Takes time in proportion to all that exists. Empty if memory has run out.
  /// Set-up.
  [[nodiscard]] std::string describe() const noexcept;
  /// Size and counts of a pool. Hot.
  [[nodiscard]] MemoryStats memory_stats(Pool pool) const noexcept;
  /// The name of the opened device, such as "softverbs". Hot.
  [[nodiscard]] std::string_view device_name() const noexcept;
  /// The opened device, and why it was chosen. Hot.
  [[nodiscard]] const DeviceInfo& device() const noexcept;
  explicit operator bool() const noexcept { return core_ != nullptr; }

 private:
  friend struct detail::Internals;

  explicit Engine(std::unique_ptr<detail::EngineCore> core) noexcept;

  detail::EngineSlot* slot_;  ///< never null: without an engine, that of a closed one
  std::unique_ptr<detail::EngineCore> core_;
};

}  // namespace spinwire
