// The engine: one device context, its memory and its connections, driven by the caller's loop.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "spinwire/buffer.h"
#include "spinwire/callback.h"
#include "spinwire/clock.h"
#include "spinwire/config.h"
#include "spinwire/connection.h"
#include "spinwire/connection_settings.h"
#include "spinwire/device.h"
#include "spinwire/device_event.h"
#include "spinwire/endpoint.h"
#include "spinwire/export.h"
#include "spinwire/rpc.h"
#include "spinwire/status.h"

namespace spinwire {

namespace detail {
class EngineCore;
}

enum class Pool : std::uint8_t {
  send,
  lease,  ///< memory to be exposed to peers
  large,  ///< where messages above connections.eager_bytes arrive
};

struct EngineStats {
  std::uint64_t polls = 0;  ///< completed poll() calls
  std::uint64_t control_steps = 0;
  std::uint64_t completions = 0;        ///< drained; one may be of many direct datagrams
  std::uint64_t stale_completions = 0;  ///< completions of operations already ended
  std::uint64_t messages_sent = 0;
  std::uint64_t messages_received = 0;
  /// What no peer of this protocol says, in messages, in the count of credit or by offering memory
  /// that cannot be read; each ended its connection.
  std::uint64_t bad_messages = 0;
  std::uint64_t doorbells = 0;  ///< posts of send work requests
  std::uint64_t receives_posted = 0;
  std::uint64_t accepted = 0;            ///< inbound connections that became ready
  std::uint64_t connected = 0;           ///< outbound connections that became ready
  std::uint64_t handshakes_refused = 0;  ///< inbound handshakes ended by error, limit or deadline
  std::uint64_t peers_lost = 0;
  std::uint64_t closed = 0;
  std::uint32_t connections = 0;      ///< living ones, any state; those of sessions included
  std::uint32_t operations = 0;       ///< in flight: work requests, and long messages offered
  std::uint32_t receives = 0;         ///< posted now
  std::uint32_t credits_granted = 0;  ///< receives promised to peers now
  std::uint32_t windows_free = 0;     ///< memory windows in no use
  std::uint32_t own_domains = 0;      ///< protection domains beside the engine's, closing ones too
  /// Keys made for the application and for connections (one each), beside those of the pools;
  /// those being revoked count.
  std::uint32_t registrations = 0;
};

struct MemoryStats {
  std::uint64_t pool_bytes = 0;
  std::uint64_t free_bytes = 0;  ///< in chunks that serve no size class now
  std::uint64_t blocks_used = 0;
  std::uint64_t allocations = 0;
  std::uint64_t refusals = 0;  ///< answered no_buffer
};

/// Registered memory of the application's own. Slices of it go into operations. Unregister by
/// dropping it: what operations still hold is unregistered at the last completion.
class SPINWIRE_API MemoryRegion {
 public:
  MemoryRegion() noexcept = default;
  [[nodiscard]] BufferSlice slice() const noexcept { return whole_; }
  [[nodiscard]] BufferSlice slice(std::size_t offset, std::size_t length) const noexcept {
    return whole_.slice(offset, length);
  }
  /// What a peer needs to use it; empty if registered with Access::local.
  [[nodiscard]] RemoteRegion remote() const noexcept { return remote_; }
  explicit operator bool() const noexcept { return static_cast<bool>(whole_); }

 private:
  friend struct detail::Internals;

  MemoryRegion(BufferSlice whole, RemoteRegion remote) noexcept
      : whole_(std::move(whole)), remote_(remote) {}

  BufferSlice whole_;
  RemoteRegion remote_;
};

/// By what two ends find each other and shake hands.
enum class Via : std::uint8_t {
  tcp,      ///< the engine's own exchange over a TCP connection; any device
  rdma_cm,  ///< librdmacm; both ends alike, and not on an embedded device
};

struct ListenOptions {
  /// An inbound handshake is complete but for our answer: the application sets handlers here, with
  /// Connection::set_handlers, or gives them below. May call close() to refuse.
  Callback<void(Connection)> on_accept;
  ConnectionHandlers handlers;
  Via via = Via::tcp;
  ConnectionSettings settings{};  ///< of all that are accepted; see Connection::configure()
};

/// How a connection is made again when it could not be made, or was lost. Operations that were
/// outstanding have ended by then; what the peer keeps for the old connection is gone, regions
/// included. A peer that says goodbye, refuses for good or speaks another protocol ends it at once.
struct Reconnect {
  std::uint32_t attempts = 0;  ///< in a row without lasting success; 0: never made again
  /// Pause before the first; doubles with each further one up to `max_delay`, and is cut by a
  /// random part of up to a half. A success counts as lasting after `max_delay`. 1 us … 1 h each.
  Nanoseconds first_delay = std::chrono::milliseconds(10);
  Nanoseconds max_delay = std::chrono::seconds(5);
};

struct ConnectOptions {
  ConnectionHandlers handlers;
  Reconnect reconnect{};
  Via via = Via::tcp;
  ConnectionSettings settings{};
  /// Until the connection must be ready, each attempt of it, up to 1 h; 0:
  /// connections.connect_timeout.
  Nanoseconds timeout{0};
};

struct PrepareOptions {
  ConnectionHandlers handlers;
  /// Our end is there: bring it to the peer. May call join() and close().
  Callback<void(Connection, const Endpoint&)> on_endpoint;
  /// Until the connection must be ready, up to 1 h; 0: connections.connect_timeout.
  Nanoseconds timeout{0};
  ConnectionSettings settings{};
};

/// A listening address. Dropping it stops listening; connections made through it stay.
class SPINWIRE_API Listener {
 public:
  Listener() noexcept = default;
  Listener(Listener&& other) noexcept;
  Listener& operator=(Listener&& other) noexcept;
  ~Listener();
  /// The bound "address:port", the port resolved if 0 was asked.
  [[nodiscard]] std::string address() const;
  explicit operator bool() const noexcept { return slot_ != nullptr; }

 private:
  friend struct detail::Internals;

  Listener(detail::EngineSlot* slot, std::uint32_t index, std::uint32_t generation) noexcept
      : slot_(slot), index_(index), generation_(generation) {}

  detail::EngineSlot* slot_ = nullptr;
  std::uint32_t index_ = 0;
  std::uint32_t generation_ = 0;
};

/// Belongs to the thread that opened it; every call from another answers wrong_thread, in a forked
/// child forked_child. An engine that is empty, or was moved from, answers not_connected. Nothing
/// runs unless the caller polls.
class SPINWIRE_API Engine {
 public:
  /// Opens the device, takes and registers all memory, posts the receives. Set-up. Errors:
  /// bad_config, no_device, no_memory, limit, system.
  static Result<Engine> open(const Config& config, const Clock& clock = Clock::real());

  Engine() noexcept;
  Engine(Engine&&) noexcept;
  Engine& operator=(Engine&&) noexcept;
  /// Ends all connections at once (each outstanding operation completes as `flushed`, each
  /// on_closed runs), then releases everything; memory of buffers still held lives on until they
  /// are dropped. What the callbacks capture must still be there. Not from inside a callback.
  ~Engine();

  /// Drains completions, runs callbacks, reposts receives, rings doorbells and, every
  /// control_interval unless in manual mode, takes one control step. Never blocks. Answers the
  /// number of events handled, 0 when idle, or minus the Status: wrong_thread, reentrant,
  /// forked_child. Hot.
  int poll() noexcept;
  /// One control step: sockets, liveness, timers, at most one control verb. Answers as poll().
  int poll_control() noexcept;
  /// Posts everything deferred. Hot.
  Status flush() noexcept;

  /// Listens for connections on "a.b.c.d:port" or "[v6]:port"; port 0 takes a free one. Set-up.
  /// Errors: invalid_argument, in_use, limit, system; no_device for settings that name a place that
  /// is not there; through rdma_cm also unsupported.
  Result<Listener> listen(std::string_view address, const ListenOptions& options);
  /// Begins to connect; on_ready or on_closed tells. Set-up. Errors: invalid_argument, limit,
  /// system; no_device as for listen(); through rdma_cm also unsupported.
  Result<Connection> connect(std::string_view address, const ConnectOptions& options);

  /// Makes one end of a connection that the application brings up itself, without sockets of the
  /// engine's: on_endpoint tells our end, which the application brings to the peer; the peer's goes
  /// into Connection::join(). Set-up. Errors: invalid_argument, limit, no_device and system as for
  /// connect(), not_connected (the engine is being destroyed).
  Result<Connection> prepare(const PrepareOptions& options);

  // Remote calls, see rpc.h.
  /// Runs `handler` for every call of `method`, of sessions through any listener of this engine; an
  /// empty one stops that. Set-up. Errors: as open_session(), and reentrant (inside a callback).
  Result<void> serve(Method method, const MethodHandler& handler);
  /// Opens a session with the engine that listens there; on_ready or on_closed tells. The first one
  /// takes what remote calls need. Set-up. Errors: invalid_argument, limit (rpc.sessions are open,
  /// or connections.handshakes are under way; a pool or the completion queue has not enough room),
  /// no_memory, no_device, system, not_connected (the engine is being destroyed).
  Result<Session> open_session(std::string_view address, const SessionOptions& options);
  [[nodiscard]] RpcStats rpc_stats() const noexcept;

  /// A block with room for `size` bytes, which are not zeroed; empty when the pool is dry or the
  /// call is misused (status() tells). Never blocks, grows or registers. Hot.
  [[nodiscard]] Buffer allocate(std::size_t size, Pool pool = Pool::send) noexcept;
  /// Why the last allocate() answered an empty buffer: no_buffer, invalid_argument (0 or beyond
  /// the pool), wrong_thread, forked_child.
  [[nodiscard]] Status allocate_status() const noexcept;

  /// Registers `bytes` of the application's own, which must stay mapped until the region is
  /// dropped and its operations have completed. Set-up. Errors: as expose().
  Result<MemoryRegion> register_memory(std::span<std::byte> bytes, Access access);
  /// Opens exactly the bytes of `slice` to peers under a key of its own, until revoke(). Holds a
  /// reference to the block. Set-up (a registration). Errors: invalid_argument (also for rights
  /// that queue_pair.access leaves out), unsupported (remote_atomic, and the device has no
  /// atomics), no_memory, limit.
  Result<RemoteRegion> expose(const BufferSlice& slice, Access access);
  /// Closes the key of an exposure; call it, between polls, until it answers something other than
  /// would_block. Runs no callback. Set-up. Answers:
  ///   ok                no peer can reach the memory any more, and the reference to it is dropped;
  ///                     answered once for a key
  ///   would_block       the key is closing, and an access may be under way; call again
  ///   local_error       the device refused to deregister the memory, which stays held; call again
  ///   invalid_argument  no exposure of this engine, or revoked already
  Status revoke(const RemoteRegion& region);

  /// Who is told of what the device reports, from inside poll() or poll_control(); none if empty.
  /// What concerns a connection is told before the connection ends of it. Set-up. Errors:
  /// wrong_thread, forked_child.
  Status set_device_event_handler(const DeviceEventCallback& handler) noexcept;

  /// Checks the engine's books: that what each connection has accepted is completed or outstanding
  /// and all records of operations are accounted for, that credits lie within what is posted and
  /// each receive is posted, waiting or missing, that leases, memory windows and registrations
  /// agree with the memory they hold and each block of the pools is owned once. The error names the
  /// first thing that is wrong, which is a defect of the library or memory that something has
  /// overwritten. Set-up: allocates, and takes time in proportion to all that there is; for tests
  /// and for finding faults. Errors: system (what was found), reentrant (from inside a callback,
  /// while books are being kept), no_memory, wrong_thread, forked_child.
  [[nodiscard]] Result<void> audit() const;

  [[nodiscard]] const Config& config() const noexcept;
  [[nodiscard]] const Clock& clock() const noexcept;
  [[nodiscard]] EngineStats stats() const noexcept;
  [[nodiscard]] MemoryStats memory_stats(Pool pool) const noexcept;
  /// Opened device's name, e.g. "softverbs".
  [[nodiscard]] std::string_view device_name() const noexcept;
  /// The opened device, and why that one.
  [[nodiscard]] const DeviceInfo& device() const noexcept;
  explicit operator bool() const noexcept { return core_ != nullptr; }

 private:
  friend struct detail::Internals;

  explicit Engine(std::unique_ptr<detail::EngineCore> core) noexcept;

  detail::EngineSlot* slot_;  ///< that of no engine, if there is none
  std::unique_ptr<detail::EngineCore> core_;
};

}  // namespace spinwire
