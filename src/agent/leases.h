// Leases: memory of ours that a peer may use for a time (a loan), and the same the other way round
// (a holding). Each end counts time on its own clock, the holder from no later than the owner.
#pragma once

#include <cstdint>
#include <span>

#include "base/index_pool.h"
#include "base/timer_wheel.h"
#include "memory/windows.h"
#include "spinwire/buffer.h"
#include "spinwire/lease.h"
#include "wire/lease.h"

namespace spinwire::agent {

struct Agent;
struct EngineContext;

/// Bindings and unbindings of windows for leases that a connection has with the device at once.
inline constexpr std::uint32_t kLeaseRequests = 2;

/// Memory of ours that the peer may reach.
struct Loan {
  enum class State : std::uint8_t {
    waiting,   ///< in line to be zeroed and opened
    offered,   ///< pushed; until the peer has answered
    open,      ///< until the peer is done, or time is over
    closing,   ///< in line for its key to be ended
    unbinding  ///< the device is at it
  };
  detail::Block* block = nullptr;  ///< holds a reference
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t zeroed = 0;  ///< of those, of a requested one that waits
  Nanoseconds time{0};
  std::uint32_t rkey = 0;
  std::uint32_t window = memory::WindowPool::kNone;  ///< none: the key is a registration's
  std::uint32_t id = 0;                              ///< what the peer calls it
  std::uint32_t index = 0;
  std::uint32_t request = 0;  ///< the peer's number of its request
  State state = State::waiting;
  Access access = Access::local;
  ReturnedBy how = ReturnedBy::release;
  bool requested = false;  ///< by the peer
  bool manual = false;     ///< nobody but the application knows of it
  bool opened = false;     ///< it has a key
  bool ending = false;     ///< its key is dead, but a peer was in the midst of an access
  bool recalled = false;   ///< the peer was told to stop
  bool answering = false;  ///< giving it back is to be replied to
  std::uint32_t reply = 0;
  Agent* agent = nullptr;
  Loan* next = nullptr;  ///< of the agent's
  Loan* prev = nullptr;
  Loan* next_in_line = nullptr;
  base::Timer timer;  ///< until the peer answers; then until nothing can be under way any more
  LeaseCallback done;
};

/// Memory of the peer's that we may reach.
struct Holding {
  enum class State : std::uint8_t {
    asked,   ///< until it is granted
    held,    ///< until we give it up
    leaving  ///< until the peer has replied to that
  };
  RemoteRegion region;        ///< with the key
  std::uint64_t began = 0;    ///< tick from which we count
  std::uint64_t until = 0;    ///< tick: no operation is started from there on
  std::uint64_t renewed = 0;  ///< tick of the renewal that is under way
  std::uint64_t asked = 0;    ///< and `until` if it is granted
  std::uint32_t theirs = 0;   ///< the owner's number
  std::uint32_t id = 0;       ///< ours
  std::uint32_t index = 0;
  State state = State::asked;
  bool invalidate = false;  ///< whoever returns it invalidates the key
  bool calling = false;     ///< a call waits for its reply
  Agent* agent = nullptr;
  Holding* next = nullptr;  ///< of the agent's
  Holding* prev = nullptr;
  base::Timer timer;  ///< until the peer has to have answered
  LeaseCallback done;
};

/// One connection's part.
struct AgentLeases {
  Loan* loans = nullptr;
  Holding* holdings = nullptr;
  std::uint32_t lent = 0;
  std::uint32_t held = 0;
  std::uint64_t lent_bytes = 0;
  std::uint64_t requested_bytes = 0;  ///< of those, what the peer asked for
  std::uint64_t held_bytes = 0;
  std::uint32_t requests_out = 0;  ///< bindings and unbindings with the device
};

/// The engine's part.
struct Leases {
  /// May throw std::bad_alloc.
  explicit Leases(std::uint32_t most) : loans(most), holdings(most) {}
  base::IndexPool<Loan> loans;
  base::IndexPool<Holding> holdings;
  Loan* first = nullptr;  ///< of those with something to be done, by control steps
  Loan* last = nullptr;
};

/// What a record is called by the peer and by handles: never 0, and another with each use.
template <typename T>
std::uint32_t name_of(const base::IndexPool<T>& pool, std::uint32_t index) noexcept {
  return (index + 1) | pool.generation(index) << 16;
}
/// Null if that use of the record is over. Takes any number.
template <typename T>
T* find_named(base::IndexPool<T>& pool, std::uint32_t name) noexcept {
  const std::uint32_t index = (name & 0xffff) - 1;
  return pool.in_use(index) && name_of(pool, index) == name ? &pool.at(index) : nullptr;
}

/// Timers of records here, told apart from agents' by Timer::kind.
inline constexpr std::uint16_t kLoanTimer = 4;
inline constexpr std::uint16_t kHoldingTimer = 5;

/// A message about leases has come; `invalidated` is the key that its arrival has ended, or 0.
void take_lease_message(EngineContext& ctx, Agent& a, wire::MessageKind kind,
                        std::span<const std::byte> body, std::uint32_t invalidated) noexcept;
void on_lease_timer(EngineContext& ctx, const base::Timer& timer) noexcept;
/// Ends one of the agent's leases, of either kind; its queue pair takes no work requests any more,
/// and is about to be destroyed. Answers false while control verbs are left to be done.
bool end_leases(EngineContext& ctx, Agent& a) noexcept;

enum class LeaseWork : std::uint8_t {
  none,  ///< there is none that could be done now
  some,
  verb,  ///< and it took a control verb
};
/// Takes the next step of the first loan in line, with at most one control verb, and none unless
/// `verb_allowed`.
LeaseWork work_on_leases(EngineContext& ctx, bool verb_allowed) noexcept;

// The owner.

/// Leases memory to the peer, or only opens it, when `manual`. Errors: those of
/// Connection::lease().
Status lend(EngineContext& ctx, Agent& a, const BufferSlice& memory, const LeaseOptions& options,
            const LeaseCallback& done) noexcept;
/// Opens memory to the peer alone, under a key that holds from the agent's next work request on.
/// Errors: would_block, and unsupported where that takes a registration.
Status open_by_hand(EngineContext& ctx, Agent& a, const BufferSlice& memory, Access access,
                    RemoteRegion& region) noexcept;
Status recall(EngineContext& ctx, Agent& a, LeaseId lease) noexcept;
Status close_by_hand(EngineContext& ctx, Agent& a, std::uint32_t rkey) noexcept;
/// Whether this is the key of a window of the agent's.
bool is_bound_here(const Agent& a, std::uint32_t rkey) noexcept;
/// The device has bound a window, or unbound it.
void on_lease_bound(EngineContext& ctx, Agent& a) noexcept;
void on_lease_unbound(EngineContext& ctx, Agent& a, std::uint32_t id, Status status) noexcept;
void take_lease_request(EngineContext& ctx, Agent& a, const wire::LeaseRequest& request) noexcept;
void take_lease_call(EngineContext& ctx, Agent& a, const wire::LeaseCall& call,
                     std::uint32_t invalidated) noexcept;
void on_loan_timer(EngineContext& ctx, Loan& loan) noexcept;
/// The loans' part of end_leases().
bool end_loans(EngineContext& ctx, Agent& a) noexcept;

// The holder.

Status request(EngineContext& ctx, Agent& a, std::size_t bytes, const LeaseOptions& options,
               const LeaseCallback& done) noexcept;
/// The holding of a handle or of a region; null if it is over.
Holding* find_holding(EngineContext& ctx, std::uint32_t id) noexcept;
/// Whether an operation may be started on the region, and with its key.
Status resolve(EngineContext& ctx, const Agent& a, const RemoteRegion& leased,
               RemoteRegion& real) noexcept;
Status renew(EngineContext& ctx, Holding& h, Nanoseconds time, const LeaseCallback& done) noexcept;
Status give_back(EngineContext& ctx, Holding& h, const LeaseCallback& done) noexcept;
void release_holding(EngineContext& ctx, Holding& h) noexcept;
/// Lets go of it without a word to the owner.
void forget_holding(EngineContext& ctx, Holding& h) noexcept;
/// Forgets all that the agent holds; calls end as flushed.
void end_holdings(EngineContext& ctx, Agent& a) noexcept;
void take_grant(EngineContext& ctx, Agent& a, const wire::LeaseGrant& grant) noexcept;
void take_push(EngineContext& ctx, Agent& a, const wire::LeaseGrant& grant) noexcept;
void take_recall(EngineContext& ctx, Agent& a, const wire::LeaseCall& call) noexcept;
void take_reply(EngineContext& ctx, Agent& a, const wire::LeaseReply& reply) noexcept;

// Both.

/// The peer said what no peer says.
void lease_protocol_error(EngineContext& ctx, Agent& a, const char* found) noexcept;
/// Whether a lease may be for that long.
bool is_lease_time(const EngineContext& ctx, Nanoseconds time) noexcept;
/// Whether the agent may tell the peer of one more thing that the application wants.
bool may_tell(const Agent& a) noexcept;
/// How long an operation that was started may still be under way, ticks.
std::uint64_t worst_retries(const EngineContext& ctx, const Agent& a) noexcept;
Status status_of(wire::LeaseVerdict verdict) noexcept;
constexpr LeaseRefusal refusal_of(wire::LeaseVerdict verdict) noexcept {
  return static_cast<LeaseRefusal>(verdict);
}

}  // namespace spinwire::agent
