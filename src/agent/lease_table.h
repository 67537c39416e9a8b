// Leases: memory that a peer may use for a limited time. The owner's record is a LeaseGranted, the
// holder's a LeaseHeld. Each side measures time with its own clock; the holder's time starts no
// later than the owner's.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <span>

#include "base/index_pool.h"
#include "base/intrusive_list.h"
#include "base/timer_wheel.h"
#include "memory/remote_key.h"
#include "spinwire/buffer.h"
#include "spinwire/lease.h"
#include "wire/lease_messages.h"

namespace spinwire::agent {

struct Agent;
struct EngineContext;

/// Window bindings and unbindings for leases that one connection has with the device at once.
inline constexpr std::uint32_t kLeaseRequests = 2;

/// Memory of this engine that the peer may use.
struct LeaseGranted {
  enum class State : std::uint8_t {
    waiting,   ///< in LeasePool::work_queue, to be zeroed and opened
    offered,   ///< pushed to the peer; until the peer answers
    open,      ///< until the peer returns it or it expires
    closing,   ///< in LeasePool::work_queue, for its key to be closed
    unbinding  ///< the device unbinds its window
  };
  enum class Origin : std::uint8_t {
    pushed,     ///< by the application; the peer may refuse it
    requested,  ///< by the peer; the memory is the engine's
    exposed,    ///< by open_key(); the protocol of leases does not know it
  };
  memory::KeyTarget target;  ///< holds a reference to its block
  memory::RemoteKey key;
  std::uint64_t zeroed = 0;  ///< bytes zeroed so far, of a requested lease that waits
  Nanoseconds time{0};
  std::uint32_t id = 0;  ///< its name in the protocol
  std::uint32_t index = 0;
  std::uint32_t request = 0;  ///< the peer's id of its request
  State state = State::waiting;
  Origin origin = Origin::pushed;
  ReturnedBy how = ReturnedBy::release;
  bool recalled = false;                  ///< the application wants it back
  bool revoked = false;                   ///< revoke_exposure() closes its key
  std::optional<std::uint32_t> reply_to;  ///< id of the peer's give_back, which waits for a reply
  Agent* agent = nullptr;
  base::IntrusiveLinks<LeaseGranted> links;  ///< in LeaseTable::granted
  LeaseGranted* next_work = nullptr;         ///< in LeasePool::work_queue
  base::Timer timer;  ///< until the peer answers; then until no access can be under way
  LeaseCallback done;
};

/// Memory of the peer that this engine may use.
struct LeaseHeld {
  enum class State : std::uint8_t {
    requested,  ///< until the peer grants it
    held,       ///< until we return it
    returning,  ///< until the peer replies to give_back
    released    ///< given up amid a renewal; until its timer runs the renewal's callback
  };
  RemoteRegion region;              ///< with the key
  std::uint64_t start = 0;          ///< tick at which its time starts
  std::uint64_t until = 0;          ///< tick from which no operation may start
  std::uint64_t renewal_start = 0;  ///< tick at which the pending renewal was sent
  std::uint64_t renewal_until = 0;  ///< `until` if the pending renewal is granted in full
  std::uint32_t peer_id = 0;        ///< the owner's id
  std::uint32_t id = 0;             ///< its name in the protocol
  std::uint32_t index = 0;
  State state = State::requested;
  bool invalidate = false;    ///< returning it invalidates the key
  bool call_pending = false;  ///< a request or call waits for its reply
  Agent* agent = nullptr;
  base::IntrusiveLinks<LeaseHeld> links;  ///< in LeaseTable::held
  base::Timer timer;                      ///< by when the peer must have replied; see `released`
  LeaseCallback done;
};

/// The leases of one connection.
struct LeaseTable {
  base::IntrusiveList<&LeaseGranted::links> granted;  ///< the newest first
  base::IntrusiveList<&LeaseHeld::links> held;        ///< the newest first
  std::uint32_t granted_count = 0;
  std::uint32_t held_count = 0;
  std::uint64_t granted_bytes = 0;
  std::uint64_t requested_bytes = 0;  ///< of granted_bytes, those that the peer requested
  std::uint64_t held_bytes = 0;
  std::uint32_t bindings_outstanding = 0;  ///< bindings and unbindings with the device
};

/// The records of all leases of an engine.
struct LeasePool {
  /// May throw std::bad_alloc.
  explicit LeasePool(std::uint32_t limit) : granted(limit), held(limit) {}
  base::IndexPool<LeaseGranted, base::Reuse::oldest> granted;
  base::IndexPool<LeaseHeld, base::Reuse::oldest> held;
  /// Leases that a control step has to zero, open or close.
  base::IntrusiveQueue<&LeaseGranted::next_work> work_queue;
};

/// The name of a record's present use, in the protocol and in handles; never 0. The index takes no
/// more bits than the pool needs and records are used in turn, so a name comes again after some
/// 2^32 leases.
template <typename T, base::Reuse reuse>
std::uint32_t name_of(const base::IndexPool<T, reuse>& pool, std::uint32_t index) noexcept {
  return (index + 1) | pool.generation(index) << std::bit_width(pool.capacity());
}
/// The record of a name; null if that use of the record has ended. Accepts any number.
template <typename T, base::Reuse reuse>
T* find_named(base::IndexPool<T, reuse>& pool, std::uint32_t name) noexcept {
  const std::uint32_t mask = (1u << std::bit_width(pool.capacity())) - 1;
  const std::uint32_t index = (name & mask) - 1;
  return pool.in_use(index) && name_of(pool, index) == name ? &pool.at(index) : nullptr;
}

/// Kinds of timers of leases; see Timer::kind.
inline constexpr std::uint16_t kLeaseGrantedTimer = 4;
inline constexpr std::uint16_t kLeaseHeldTimer = 5;

/// A message about leases has arrived. `invalidated` is the key that it invalidated, or 0.
void on_lease_message(EngineContext& ctx, Agent& a, wire::MessageKind kind,
                      std::span<const std::byte> body, std::uint32_t invalidated) noexcept;
/// Ends all leases of the agent. Its queue pair must be in ERR, and is destroyed next. Returns
/// false while control verbs are left to be done; each call does at most one.
bool end_leases(EngineContext& ctx, Agent& a) noexcept;
/// Ends the connection because the peer violates the protocol.
void fail_lease_protocol(EngineContext& ctx, Agent& a, const char* found) noexcept;
Status status_of(wire::LeaseVerdict verdict) noexcept;
constexpr LeaseRefusal refusal_of(wire::LeaseVerdict verdict) noexcept {
  return static_cast<LeaseRefusal>(verdict);
}
constexpr Nanoseconds duration_of(std::uint64_t ns) noexcept {
  return Nanoseconds(static_cast<std::int64_t>(ns));
}

// Time: lease_expiry.cc.

/// Whether `time` is longer than the guard and within what a message can carry.
bool is_lease_time(const EngineContext& ctx, Nanoseconds time) noexcept;
/// Expires a lease, or ends the connection when the peer does not answer in time.
void on_lease_timer(EngineContext& ctx, const base::Timer& timer) noexcept;
/// The tick at which a lease granted now expires: no operation that the peer started in its time
/// can be under way then.
std::uint64_t expiry_of(const EngineContext& ctx, const LeaseGranted& lease) noexcept;
/// Shortens the lease to the time that a recalled lease has.
void expire_recalled(EngineContext& ctx, LeaseGranted& lease) noexcept;
/// The tick from which the holder starts no operation on a lease of `time` that started at `start`.
std::uint64_t last_use_of(const EngineContext& ctx, std::uint64_t start, Nanoseconds time) noexcept;
/// Ends the connection unless the peer answers within connections.peer_timeout.
void await_lease_answer(EngineContext& ctx, base::Timer& timer) noexcept;

// The owner: lease_granted.cc.

/// Grants a lease that the peer has not asked for. Errors: those of Connection::lease().
Status grant_lease(EngineContext& ctx, Agent& a, const BufferSlice& memory,
                   const LeaseOptions& options, const LeaseCallback& done) noexcept;
/// Asks the peer to return a lease.
Status recall_lease(EngineContext& ctx, Agent& a, LeaseId lease) noexcept;
void on_lease_request(EngineContext& ctx, Agent& a, const wire::LeaseRequest& request) noexcept;
void on_lease_call(EngineContext& ctx, Agent& a, const wire::LeaseCall& call,
                   std::uint32_t invalidated) noexcept;
/// The agent's lease of this id; null if it has ended. Accepts any number.
LeaseGranted* find_lease_granted(EngineContext& ctx, const Agent& a, std::uint32_t id) noexcept;
/// A record, which takes a reference to the target's block; null if all are in use.
LeaseGranted* make_lease_granted(EngineContext& ctx, Agent& a, const memory::KeyTarget& target,
                                 LeaseGranted::Origin origin) noexcept;
/// Frees the record, and the reference to its block.
void drop_lease_granted(EngineContext& ctx, LeaseGranted& lease) noexcept;
/// The lease has its key: tells the peer.
void announce_lease(EngineContext& ctx, LeaseGranted& lease) noexcept;
/// No key can be had for the lease.
void refuse_lease(EngineContext& ctx, LeaseGranted& lease) noexcept;
/// The lease is over. `invalidated` is whether the peer has closed its key already.
void close_lease(EngineContext& ctx, LeaseGranted& lease, ReturnedBy how,
                 bool invalidated = false) noexcept;
/// The key is closed, or an access is under way and the key's source keeps the memory: tells the
/// application and frees the record.
void finish_lease(EngineContext& ctx, LeaseGranted& lease) noexcept;

// Their keys: lease_key.cc.

/// What became of a step towards a lease's key.
enum class KeyStep : std::uint8_t { done, later, used_verb, failed };
/// Zeroes up to `most` bytes of a requested lease; opens the key once all are zeroed.
KeyStep prepare_lease(EngineContext& ctx, LeaseGranted& lease, std::uint64_t most,
                      bool verb_allowed) noexcept;
KeyStep close_lease_key(EngineContext& ctx, LeaseGranted& lease, bool verb_allowed) noexcept;
enum class LeaseWork : std::uint8_t {
  none,  ///< nothing could be done now
  some,  ///< something was done
  verb,  ///< something was done with a control verb
};
/// Takes the next step of the first lease in the work queue: at most one control verb, and none
/// unless `verb_allowed`.
LeaseWork advance_leases(EngineContext& ctx, bool verb_allowed) noexcept;
/// Ends one granted lease. Returns false if that took a control verb.
bool end_lease_granted(EngineContext& ctx, Agent& a) noexcept;
/// The device has bound a window.
void on_lease_bound(EngineContext& ctx, Agent& a) noexcept;
/// The device has unbound a window.
void on_lease_unbound(EngineContext& ctx, Agent& a, std::uint32_t id, Status status) noexcept;
/// Opens memory to the peer alone. The key is valid from the agent's next work request on. Errors:
/// would_block, no_memory.
Status open_key(EngineContext& ctx, Agent& a, const BufferSlice& memory, Access access,
                RemoteRegion& region) noexcept;
/// Closes a key of open_key(); on_returned follows. Errors: invalid_argument.
Status close_key(EngineContext& ctx, Agent& a, std::uint32_t rkey) noexcept;
/// Connection::revoke(), which documents the answers.
Status revoke_exposure(EngineContext& ctx, Agent& a, std::uint32_t rkey) noexcept;
/// Whether open_key() has bound a window under this key for the agent, and it is open.
bool is_window_key(const Agent& a, std::uint32_t rkey) noexcept;

// The holder: lease_held.cc.

/// Errors: those of Connection::request_memory().
Status request_lease(EngineContext& ctx, Agent& a, std::size_t bytes, const LeaseOptions& options,
                     const LeaseCallback& done) noexcept;
/// The lease of a handle or of a region; null if it has ended.
LeaseHeld* find_lease_held(EngineContext& ctx, std::uint32_t id) noexcept;
/// Checks that an operation may start on a leased region, and fills in the region with its key.
Status resolve_leased(EngineContext& ctx, const Agent& a, const RemoteRegion& leased,
                      RemoteRegion& real) noexcept;
Status renew_lease(EngineContext& ctx, LeaseHeld& lease, Nanoseconds time,
                   const LeaseCallback& done) noexcept;
Status give_back_lease(EngineContext& ctx, LeaseHeld& lease, const LeaseCallback& done) noexcept;
/// Returns a lease without waiting for a reply.
void release_lease(EngineContext& ctx, LeaseHeld& lease) noexcept;
/// Drops the record and sends nothing to the owner.
void forget_lease_held(EngineContext& ctx, LeaseHeld& lease) noexcept;
/// Drops all leases that the agent holds; their calls end as flushed.
void end_leases_held(EngineContext& ctx, Agent& a) noexcept;
void on_lease_grant(EngineContext& ctx, Agent& a, const wire::LeaseGrant& grant) noexcept;
void on_lease_push(EngineContext& ctx, Agent& a, const wire::LeaseGrant& grant) noexcept;
void on_lease_recall(EngineContext& ctx, Agent& a, const wire::LeaseCall& call) noexcept;
void on_lease_reply(EngineContext& ctx, Agent& a, const wire::LeaseReply& reply) noexcept;

}  // namespace spinwire::agent
