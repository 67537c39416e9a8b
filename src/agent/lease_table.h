// Leases: memory that a peer may use for a limited time. The owner's record is a LeaseGranted, the
// holder's a LeaseHeld. Each side measures time with its own clock. The holder's time starts no
// later than the owner's.
//
// The holder counts from its request and stops leases.guard early. The owner counts from its grant
// and adds the time for which a device may repeat an operation (lease_expiry.cc). After that no
// operation of the holder can be under way, and the key is closed.
//
// A key is a window where one fits and is free, bound right before the grant; else a registration,
// which control steps open and close (lease_key.cc). Requested memory comes from
// memory.lease_bytes and is zeroed, long leases in several control steps. The owner gets the memory
// back when the device reports that no access is possible.
//
// Control steps advance one lease each, and the sources of peers take turns. A lease that only
// lacks a work request is not among them: it waits with its connection until a binding has ended.
// So a peer that lets no binding end delays its own leases only.
//
// The holder returns a lease by a SEND that is fenced behind its READs and invalidates the window.
// If the lease may have expired by then, the SEND invalidates nothing, because invalidating a
// closed key would end the connection. The holder's engine releases a recalled lease in its next
// poll. If the peer lets no binding or unbinding end for connections.close_timeout while a window
// is to be unbound, the window ends with the connection.
//
// An automatic renewal is a call like any other. Between calls, the record's timer is that of the
// next one, which is due when half of the rest is over.
//
// RemoteMemory names a lease by index and generation. Only regions without a key are looked up as
// leases, so leases cost other operations nothing. open_key() uses the same records for memory that
// the application or rpc/ exposes to one peer.
#pragma once

#include <cstdint>
#include <functional>
#include <new>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/index_pool.h"
#include "base/intrusive_list.h"
#include "base/key_map.h"
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
    waiting,   ///< listed (see list_lease()) for zeroing and opening
    offered,   ///< pushed to the peer, which has not answered
    open,      ///< usable until the peer returns it or it expires
    closing,   ///< listed for closing its key
    unbinding  ///< the device unbinds its window
  };
  enum class Origin : std::uint8_t {
    pushed,     ///< by the application; the peer may refuse the lease
    requested,  ///< by the peer; the memory is the engine's
    exposed,    ///< by open_key(); the lease protocol does not know it
  };
  memory::KeyTarget target;  ///< holds a reference to its block
  memory::RemoteKey key;
  std::uint64_t zeroed = 0;  ///< bytes zeroed so far, of a requested lease that waits
  Nanoseconds time{0};
  std::uint64_t tag = 0;  ///< the application's, for the peer; 0: none
  std::uint32_t id = 0;   ///< the lease's name in the protocol
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
  LeaseGranted* next_work = nullptr;         ///< see list_lease()
  base::Timer timer;  ///< until the peer answers; then until no access can be under way
  LeaseCallback done;
};

/// Memory of the peer that this engine may use.
struct LeaseHeld {
  enum class State : std::uint8_t {
    requested,  ///< the peer has not granted it yet
    held,       ///< in use until we return it
    returning,  ///< the peer has not replied to give_back yet
    released    ///< ended during a renewal; its timer runs the renewal's callback
  };
  RemoteRegion region;              ///< with the key
  std::uint64_t start = 0;          ///< tick at which its time starts
  std::uint64_t until = 0;          ///< tick from which no operation may start
  std::uint64_t renewal_start = 0;  ///< tick when the pending renewal was sent
  std::uint64_t renewal_until = 0;  ///< `until` if the pending renewal is granted in full
  std::uint64_t tag = 0;            ///< the owner's application's; 0: none
  std::uint32_t peer_id = 0;        ///< the owner's id
  std::uint32_t id = 0;             ///< the lease's name in the protocol
  std::uint32_t index = 0;
  State state = State::requested;
  bool invalidate = false;    ///< returning it invalidates the key
  bool call_pending = false;  ///< a request or call waits for its reply
  bool auto_pending = false;  ///< the call is an automatic renewal
  Nanoseconds auto_time{0};   ///< what automatic renewal asks for; 0: there is none
  Agent* agent = nullptr;
  base::IntrusiveLinks<LeaseHeld> links;  ///< in LeaseTable::held
  /// Deadline of the peer's reply; without a call, when automatic renewal asks; see `released`.
  base::Timer timer;
  LeaseCallback done;
  LeaseCallback on_auto_end;
};

/// The leases of one connection.
struct LeaseTable {
  base::IntrusiveList<&LeaseGranted::links> granted;  ///< the newest first
  base::IntrusiveList<&LeaseHeld::links> held;        ///< the newest first
  std::uint32_t granted_count = 0;
  std::uint32_t held_count = 0;
  std::uint64_t granted_bytes = 0;
  std::uint64_t requested_bytes = 0;  ///< the part of granted_bytes that the peer requested
  std::uint64_t held_bytes = 0;
  std::uint32_t bindings_outstanding = 0;  ///< bindings and unbindings with the device
};

/// The records of leases, granted or held. Each use of a record has a name, which stands for it in
/// the protocol and in handles. Names are counted for all records together, so a name comes again
/// after some 2^32 leases, whichever records they use. One thread. O(1), no allocation.
template <typename Lease>
class LeaseRecords {
 public:
  static constexpr std::uint32_t kNone = base::IndexPool<Lease>::kNone;

  /// May throw std::bad_alloc. `first` is the first name.
  explicit LeaseRecords(std::uint32_t capacity, std::uint32_t first = 1)
      : records_(capacity), names_(capacity), next_name_(first) {}

  /// Takes a record under a new name; kNone when all are in use.
  [[nodiscard]] std::uint32_t acquire() noexcept {
    const std::uint32_t index = records_.acquire();
    if (index == kNone) return kNone;
    while (is_reserved(next_name_) || names_.find(next_name_) != kNone) ++next_name_;
    names_.insert(next_name_++, index);
    return index;
  }
  /// Makes a lease in a record that it takes; null when all are in use.
  [[nodiscard]] Lease* make() noexcept {
    const std::uint32_t index = acquire();
    if (index == kNone) return nullptr;
    Lease& lease = records_.at(index);
    lease.~Lease();
    new (&lease) Lease();
    lease.index = lease.timer.index = index;
    lease.id = name(index);
    return &lease;
  }
  /// Ends the record's use, and its name.
  void release(std::uint32_t index) noexcept {
    names_.erase(index);
    records_.release(index);
  }
  /// The name of a record in use.
  [[nodiscard]] std::uint32_t name(std::uint32_t index) const noexcept { return names_.key(index); }
  /// The record of a name; null if that use of the record has ended. Accepts any number.
  [[nodiscard]] Lease* find(std::uint32_t name) noexcept {
    const std::uint32_t index = names_.find(name);
    return index != kNone ? &records_.at(index) : nullptr;
  }

  [[nodiscard]] Lease& at(std::uint32_t index) noexcept { return records_.at(index); }
  [[nodiscard]] bool in_use(std::uint32_t index) const noexcept { return records_.in_use(index); }
  [[nodiscard]] std::uint32_t size() const noexcept { return records_.size(); }
  [[nodiscard]] std::uint32_t capacity() const noexcept { return records_.capacity(); }

 private:
  /// No lease, in RemoteRegion and in LeaseId.
  static constexpr bool is_reserved(std::uint32_t name) noexcept {
    return name == 0 || name == ~std::uint32_t{0};
  }
  base::IndexPool<Lease> records_;
  base::KeyMap names_;
  std::uint32_t next_name_;
};

/// The records of all leases of an engine.
struct LeasePool {
  /// May throw std::bad_alloc.
  LeasePool(std::uint32_t limit, std::uint32_t connections)
      : granted(limit), held(limit), bindings(connections) {}
  /// What leases on one connection wait for.
  struct Bindings {
    base::IntrusiveQueue<&LeaseGranted::next_work> waiters;  ///< blocked leases, the oldest first
    std::uint64_t last_ended = 0;  ///< tick at which a binding or unbinding ended
  };
  LeaseRecords<LeaseGranted> granted;
  LeaseRecords<LeaseHeld> held;
  std::vector<Bindings> bindings;  ///< by Agent::index
};

/// Kinds of timers of leases; see Timer::kind.
inline constexpr std::uint16_t kLeaseGrantedTimer = 4;
inline constexpr std::uint16_t kLeaseHeldTimer = 5;

/// Calls `visit(line)` with a text for each lease, granted or held; of those behind the first
/// `most`, the texts are empty. For people. May throw std::bad_alloc.
void visit_lease_lines(const EngineContext& ctx, std::size_t most,
                       const std::function<void(std::string_view)>& visit);
/// A message about leases has arrived. `invalidated` is the key that it invalidated, or 0.
void on_lease_message(EngineContext& ctx, Agent& a, wire::MessageKind kind,
                      std::span<const std::byte> body, std::uint32_t invalidated) noexcept;
/// Ends all leases of the agent. Its queue pair must be in ERR, and is destroyed next. Returns
/// false while control verbs remain; each call does at most one.
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

/// Whether `time` exceeds the guard and fits into a message.
bool is_lease_time(const EngineContext& ctx, Nanoseconds time) noexcept;
/// Expires a lease, or ends the connection when the peer does not answer in time.
void on_lease_timer(EngineContext& ctx, const base::Timer& timer) noexcept;
/// The tick at which a lease granted now expires. From then on, no operation that the peer started
/// in time can be under way.
std::uint64_t expiry_of(const EngineContext& ctx, const LeaseGranted& lease) noexcept;
/// Shortens the lease to the time that a recalled lease gets.
void expire_recalled(EngineContext& ctx, LeaseGranted& lease) noexcept;
/// The tick from which the holder starts no operation on a lease of `time` that started at `start`.
std::uint64_t last_use_of(const EngineContext& ctx, std::uint64_t start, Nanoseconds time) noexcept;
/// Ends the connection unless the peer answers within connections.peer_timeout.
void await_lease_answer(EngineContext& ctx, base::Timer& timer) noexcept;

// The owner: lease_granted.cc.

/// Grants a lease that the peer has not asked for. `id`, unless null, receives its id. Errors:
/// those of Connection::lease().
Status grant_lease(EngineContext& ctx, Agent& a, const BufferSlice& memory,
                   const LeaseOptions& options, const LeaseCallback& done, LeaseId* id) noexcept;
/// Asks the peer to return a lease.
Status recall_lease(EngineContext& ctx, Agent& a, LeaseId lease) noexcept;
void on_lease_request(EngineContext& ctx, Agent& a, const wire::LeaseRequest& request) noexcept;
void on_lease_call(EngineContext& ctx, Agent& a, const wire::LeaseCall& call,
                   std::uint32_t invalidated) noexcept;
/// The agent's lease of this id; null if it has ended. Safe for any number.
LeaseGranted* find_lease_granted(EngineContext& ctx, const Agent& a, std::uint32_t id) noexcept;
/// Takes a record and a reference to the target's block; null if all records are in use.
LeaseGranted* make_lease_granted(EngineContext& ctx, Agent& a, const memory::KeyTarget& target,
                                 LeaseGranted::Origin origin) noexcept;
/// Frees the record and its reference to the block.
void drop_lease_granted(EngineContext& ctx, LeaseGranted& lease) noexcept;
/// Sends the lease, whose key is open, to the peer.
void announce_lease(EngineContext& ctx, LeaseGranted& lease) noexcept;
/// Refuses the lease, because no key is available.
void refuse_lease(EngineContext& ctx, LeaseGranted& lease) noexcept;
/// Ends the lease. `invalidated`: the peer has closed the key already.
void close_lease(EngineContext& ctx, LeaseGranted& lease, ReturnedBy how,
                 bool invalidated = false) noexcept;
/// Reports the end to the application and frees the record. The key is closed, or its source keeps
/// the memory while an access is under way.
void finish_lease(EngineContext& ctx, LeaseGranted& lease) noexcept;

// Keys of granted leases: lease_key.cc.

/// The outcome of a step towards opening or closing a lease's key.
enum class KeyStep : std::uint8_t {
  done,
  later,    ///< a control step goes on
  blocked,  ///< on_lease_bound() goes on: all of the connection's kLeaseRequests are in use
  used_verb,
  failed
};
/// Zeroes up to `most` bytes of a requested lease; opens the key once all are zeroed.
KeyStep prepare_lease(EngineContext& ctx, LeaseGranted& lease, std::uint64_t most,
                      bool verb_allowed) noexcept;
KeyStep close_lease_key(EngineContext& ctx, LeaseGranted& lease, bool verb_allowed) noexcept;
/// Lists a lease that is not done: for a control step, where sources take turns, or with its
/// connection if it is blocked.
void list_lease(EngineContext& ctx, LeaseGranted& lease, KeyStep step) noexcept;
/// Lets a control step end a waiting lease that is recalled, whether it is blocked or not.
void list_recalled(EngineContext& ctx, LeaseGranted& lease) noexcept;
enum class LeaseWork : std::uint8_t {
  none,  ///< nothing could be done now
  some,  ///< something was done
  verb,  ///< something was done with a control verb
};
/// Takes the next step of a lease of the source whose turn it is: at most one control verb, and
/// none unless `verb_allowed`.
LeaseWork advance_leases(EngineContext& ctx, bool verb_allowed) noexcept;
/// Whether a lease waits for advance_leases().
bool has_lease_work(const EngineContext& ctx) noexcept;
/// Ends one granted lease. Returns false if that took a control verb.
bool end_lease_granted(EngineContext& ctx, Agent& a) noexcept;
/// The device has bound a window: the next lease that is blocked goes on.
void on_lease_bound(EngineContext& ctx, Agent& a) noexcept;
/// The device has unbound a window.
void on_lease_unbound(EngineContext& ctx, Agent& a, std::uint32_t id, Status status) noexcept;
/// Opens memory to the peer alone. The key is valid from the agent's next work request on. Errors:
/// would_block (without texts, so that it costs no allocation: records, windows or work requests
/// are used up), and those of memory::open_key().
Result<RemoteRegion> open_key(EngineContext& ctx, Agent& a, const BufferSlice& memory,
                              Access access) noexcept;
/// The id of the lease granted last; there is one.
std::uint32_t newest_lease_granted(const Agent& a) noexcept;
/// Leases granted that have not ended, keys of open_key() included.
std::uint32_t leases_granted(const Agent& a) noexcept;
/// Closes a key of open_key(); on_returned follows. Errors: invalid_argument.
Status close_key(EngineContext& ctx, Agent& a, std::uint32_t rkey) noexcept;
/// The owner in the registration table of keys that revoke_exposure() closes.
memory::RegistrationTable::Owner owner_of(const Agent& a) noexcept;
/// Connection::revoke(), which documents the answers.
Status revoke_exposure(EngineContext& ctx, Agent& a, std::uint32_t rkey) noexcept;
/// Whether open_key() has bound a window under this key for the agent, and the window is open.
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
/// The region of a lease in use, which operations accept; empty for another.
RemoteRegion region_of(const LeaseHeld& lease) noexcept;
/// The time for which operations may start; 0 unless the lease is in use.
Nanoseconds time_left(const EngineContext& ctx, const LeaseHeld& lease) noexcept;
inline std::uint64_t tag_of(const LeaseHeld& lease) noexcept { return lease.tag; }
/// The connection that holds the lease.
inline Agent& holder_of(const LeaseHeld& lease) noexcept { return *lease.agent; }
/// Drops the record of a lease in use without a pending call, and gives its region with the key.
bool detach_lease(EngineContext& ctx, LeaseHeld& lease, RemoteRegion& region) noexcept;
Status renew_lease(EngineContext& ctx, LeaseHeld& lease, Nanoseconds time,
                   const LeaseCallback& done) noexcept;
/// Errors: those of RemoteMemory::auto_renew().
Status auto_renew_lease(EngineContext& ctx, LeaseHeld& lease, Nanoseconds time,
                        const LeaseCallback& on_end) noexcept;
void stop_auto_renewal(EngineContext& ctx, LeaseHeld& lease) noexcept;
/// Automatic renewal is due.
void on_auto_renewal_due(EngineContext& ctx, LeaseHeld& lease) noexcept;
Status give_back_lease(EngineContext& ctx, LeaseHeld& lease, const LeaseCallback& done) noexcept;
/// Returns a lease without waiting for a reply.
void release_lease(EngineContext& ctx, LeaseHeld& lease) noexcept;
/// Drops the record and sends nothing to the owner.
void forget_lease_held(EngineContext& ctx, LeaseHeld& lease) noexcept;
/// Drops all leases that the agent holds; their calls end as flushed.
void end_leases_held(EngineContext& ctx, Agent& a) noexcept;
void on_lease_grant(EngineContext& ctx, Agent& a, const wire::LeaseGrant& grant) noexcept;
/// The owner's application refuses a request.
void on_lease_denial(EngineContext& ctx, Agent& a, const wire::LeaseDenial& denial) noexcept;
void on_lease_push(EngineContext& ctx, Agent& a, const wire::LeaseGrant& grant) noexcept;
void on_lease_recall(EngineContext& ctx, Agent& a, const wire::LeaseCall& call) noexcept;
void on_lease_reply(EngineContext& ctx, Agent& a, const wire::LeaseReply& reply) noexcept;

}  // namespace spinwire::agent
