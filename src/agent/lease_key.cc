// The keys of granted leases, and of memory exposed to one peer: a free window if one fits, else a
// registration, which a control step opens and closes.
#include <algorithm>
#include <cstring>
#include <utility>

#include "agent/agent.h"
#include "agent/lease_table.h"
#include "agent/submit.h"
#include "base/internals.h"
#include "memory/window_requests.h"

namespace spinwire::agent {
namespace {

using memory::KeyState;
using State = LeaseGranted::State;

/// Bytes zeroed from one control step to the next, which bounds the time of the polls between.
constexpr std::uint64_t kZeroedInStep = 256u << 10;

/// Zeroes the next part of a lease, up to `most` bytes. Returns whether all is zeroed.
bool zero(EngineContext& ctx, LeaseGranted& lease, std::uint64_t most) noexcept {
  if (std::exchange(ctx.zeroing_step, ctx.stats.control_steps) != ctx.stats.control_steps)
    ctx.zeroed_bytes = 0;
  const std::uint64_t part =
      std::min({lease.target.bytes - lease.zeroed, most, kZeroedInStep - ctx.zeroed_bytes});
  std::memset(lease.target.data + lease.zeroed, 0, part);
  lease.zeroed += part;
  ctx.zeroed_bytes += part;
  return lease.zeroed == lease.target.bytes;
}

/// Whether another binding has to end before the connection can have one.
bool lacks_binding(const Agent& a) noexcept {
  return a.stage != Stage::up || a.leases.bindings_outstanding >= kLeaseRequests;
}

/// A work request for the lease's window; null if none is available now.
Operation* begin_window_request(EngineContext& ctx, OperationKind kind,
                                const LeaseGranted& lease) noexcept {
  Agent& a = *lease.agent;
  Operation* const op = lacks_binding(a) ? nullptr : ctx.operations.acquire_for_agent();
  if (op == nullptr) return nullptr;
  begin_internal(a, *op, kind, lease.id);
  ++a.leases.bindings_outstanding;
  return op;
}

void post_window_request(EngineContext& ctx, Agent& a, Operation& op) noexcept {
  append(a, op);
  queue_flush(ctx, a);
}

/// Opens the lease's key, or answers `later` or `blocked`. Errors: those of memory::open_key().
Result<KeyStep> open(EngineContext& ctx, LeaseGranted& lease, bool verb_allowed) noexcept {
  Agent& a = *lease.agent;
  const memory::KeySource keys = ctx.keys();
  if (a.domain == nullptr && a.raw == nullptr && keys.can_bind(*lease.target.block) &&
      keys.windows.free() != 0) {
    Operation* const op = begin_window_request(ctx, OperationKind::lease_bind, lease);
    if (op == nullptr) return lacks_binding(a) ? KeyStep::blocked : KeyStep::later;
    memory::bind_window(keys, lease.target, lease.key, op->wr);
    post_window_request(ctx, a, *op);
    return KeyStep::done;
  }
  if (!verb_allowed) return KeyStep::later;
  return memory::open_key(keys, lease.target, registrations_of(a), lease.key).map([] {
    return KeyStep::used_verb;
  });
}

/// The exposure to the peer under this key, open or closing; null if there is none.
LeaseGranted* find_exposure(const Agent& a, std::uint32_t rkey) noexcept {
  for (LeaseGranted& lease : a.leases.granted) {
    if (lease.origin == LeaseGranted::Origin::exposed && lease.key.rkey == rkey) return &lease;
  }
  return nullptr;
}

auto& binding_waiters(EngineContext& ctx, const Agent& a) noexcept {
  return ctx.leases->bindings[a.index].waiters;
}

/// Returns whether the lease was in the queue.
template <typename Queue>
bool remove_from(Queue& queue, LeaseGranted& lease) noexcept {
  for (const LeaseGranted& each : queue) {
    if (&each != &lease) continue;
    queue.erase(lease);
    return true;
  }
  return false;
}

void queue_for_control_step(EngineContext& ctx, LeaseGranted& lease) noexcept {
  SourceAccount& s = *lease.agent->source;
  if (s.lease_work.empty()) ctx.sources.lease_turns.push_back(s);
  s.lease_work.push_back(lease);
}

LeaseGranted& pop_for_control_step(EngineContext& ctx) noexcept {
  SourceAccount& s = ctx.sources.lease_turns.pop_front();
  LeaseGranted& lease = s.lease_work.pop_front();
  if (!s.lease_work.empty()) ctx.sources.lease_turns.push_back(s);
  return lease;
}

/// Undoes list_lease().
void unlist(EngineContext& ctx, LeaseGranted& lease) noexcept {
  Agent& a = *lease.agent;
  SourceAccount& s = *a.source;
  if (remove_from(binding_waiters(ctx, a), lease) || !remove_from(s.lease_work, lease)) return;
  if (s.lease_work.empty()) ctx.sources.lease_turns.erase(s);
}

/// From its first call on, the time for a window's unbinding is limited, see on_granted_timer(): a
/// peer that blocks the send queue must not keep the memory.
void limit_unbinding(EngineContext& ctx, LeaseGranted& lease) noexcept {
  if (lease.timer.scheduled()) return;
  ctx.timers.reschedule(lease.timer,
                        ctx.clock.now() + ctx.clock.ticks(ctx.config.connections.close_timeout));
}

}  // namespace

LeaseGranted*& next_in_lease_work(LeaseGranted& lease) noexcept { return lease.next_work; }

void list_lease(EngineContext& ctx, LeaseGranted& lease, KeyStep step) noexcept {
  if (step == KeyStep::blocked) binding_waiters(ctx, *lease.agent).push_back(lease);
  if (step == KeyStep::later) queue_for_control_step(ctx, lease);
}

void list_recalled(EngineContext& ctx, LeaseGranted& lease) noexcept {
  if (remove_from(binding_waiters(ctx, *lease.agent), lease)) queue_for_control_step(ctx, lease);
}

KeyStep prepare_lease(EngineContext& ctx, LeaseGranted& lease, std::uint64_t most,
                      bool verb_allowed) noexcept {
  if (lease.origin == LeaseGranted::Origin::requested && !zero(ctx, lease, most))
    return KeyStep::later;
  const auto step = open(ctx, lease, verb_allowed);
  if (!step) {
    refuse_lease(ctx, lease);
    return KeyStep::failed;
  }
  if (*step == KeyStep::done || *step == KeyStep::used_verb) announce_lease(ctx, lease);
  return *step;
}

KeyStep close_lease_key(EngineContext& ctx, LeaseGranted& lease, bool verb_allowed) noexcept {
  if (lease.key.is_window()) {
    Operation* const op = begin_window_request(ctx, OperationKind::lease_unbind, lease);
    if (op == nullptr && !lacks_binding(*lease.agent)) return KeyStep::later;
    limit_unbinding(ctx, lease);
    if (op == nullptr) return KeyStep::blocked;
    memory::unbind_window(lease.key, op->wr);
    post_window_request(ctx, *lease.agent, *op);
    lease.state = State::unbinding;
    return KeyStep::done;
  }
  const bool was_open = lease.key.state == KeyState::open;
  if (was_open && !verb_allowed) return KeyStep::later;
  memory::close_key(ctx.keys(), lease.key, lease.target.block);
  if (lease.key.state == KeyState::closed) {
    finish_lease(ctx, lease);
  } else if (was_open) {
    queue_for_control_step(ctx, lease);
  } else {
    return KeyStep::later;
  }
  return was_open ? KeyStep::used_verb : KeyStep::done;
}

namespace {

/// Takes the next step of a lease that is not listed any more.
LeaseWork advance_lease(EngineContext& ctx, LeaseGranted& lease, bool verb_allowed) noexcept {
  if (lease.agent->stage != Stage::up) return LeaseWork::some;  // end_leases() ends it
  const bool waits = lease.state == State::waiting;
  if (waits && lease.recalled) {
    close_lease(ctx, lease, ReturnedBy::recall);
    return LeaseWork::some;
  }
  const std::uint64_t zeroed = lease.zeroed;
  const KeyStep step = waits ? prepare_lease(ctx, lease, kZeroedInStep, verb_allowed)
                             : close_lease_key(ctx, lease, verb_allowed);
  list_lease(ctx, lease, step);
  if (step != KeyStep::later) return step == KeyStep::used_verb ? LeaseWork::verb : LeaseWork::some;
  return waits && lease.zeroed != zeroed ? LeaseWork::some : LeaseWork::none;
}

}  // namespace

LeaseWork advance_leases(EngineContext& ctx, bool verb_allowed) noexcept {
  if (!has_lease_work(ctx)) return LeaseWork::none;
  return advance_lease(ctx, pop_for_control_step(ctx), verb_allowed);
}

bool has_lease_work(const EngineContext& ctx) noexcept { return !ctx.sources.lease_turns.empty(); }

bool end_lease_granted(EngineContext& ctx, Agent& a) noexcept {
  LeaseGranted* const lease = a.leases.granted.front();
  if (lease == nullptr) return true;
  unlist(ctx, *lease);
  if (lease->state != State::closing && lease->state != State::unbinding)
    lease->how = ReturnedBy::end;
  const bool uses_verb = lease->key.state == KeyState::open;
  if (lease->key.state != KeyState::none)
    memory::close_key(ctx.keys(), lease->key, lease->target.block);
  finish_lease(ctx, *lease);
  return !uses_verb;
}

void on_lease_bound(EngineContext& ctx, Agent& a) noexcept {
  --a.leases.bindings_outstanding;
  ctx.leases->bindings[a.index].last_ended = ctx.clock.now();
  auto& waiters = binding_waiters(ctx, a);
  while (!waiters.empty() && !lacks_binding(a))
    (void)advance_lease(ctx, waiters.pop_front(), false);
}

void on_lease_unbound(EngineContext& ctx, Agent& a, std::uint32_t id, Status status) noexcept {
  on_lease_bound(ctx, a);
  LeaseGranted* const lease = status == Status::ok ? find_lease_granted(ctx, a, id) : nullptr;
  if (lease == nullptr) return;  // the connection ends and takes its leases with it
  memory::on_window_unbound(ctx.keys(), lease->key);
  finish_lease(ctx, *lease);
}

Result<RemoteRegion> open_key(EngineContext& ctx, Agent& a, const BufferSlice& memory,
                              Access access) noexcept {
  const auto blocked = [] { return tl::unexpected(Error(Status::would_block, {}, {}, {})); };
  LeaseGranted* const lease =
      make_lease_granted(ctx, a, {detail::block_of(memory), memory.data(), memory.size(), access},
                         LeaseGranted::Origin::exposed);
  if (lease == nullptr) return blocked();
  auto step = open(ctx, *lease, true);
  if (!step || *step == KeyStep::later || *step == KeyStep::blocked) {
    drop_lease_granted(ctx, *lease);
    if (step) return blocked();
    return tl::unexpected(std::move(step.error()));
  }
  lease->state = State::open;
  return RemoteRegion{reinterpret_cast<std::uint64_t>(memory.data()), memory.size(),
                      lease->key.rkey, access};
}

std::uint32_t newest_lease_granted(const Agent& a) noexcept { return a.leases.granted.front()->id; }

std::uint32_t leases_granted(const Agent& a) noexcept { return a.leases.granted_count; }

Status close_key(EngineContext& ctx, Agent& a, std::uint32_t rkey) noexcept {
  LeaseGranted* const lease = find_exposure(a, rkey);
  if (lease == nullptr) return Status::invalid_argument;
  close_lease(ctx, *lease, ReturnedBy::recall);
  return Status::ok;
}

memory::RegistrationTable::Owner owner_of(const Agent& a) noexcept {
  return memory::RegistrationTable::Owner{a.generation} << 32 | a.index;
}

Status revoke_exposure(EngineContext& ctx, Agent& a, std::uint32_t rkey) noexcept {
  if (LeaseGranted* const lease = find_exposure(a, rkey); lease != nullptr) {
    lease->revoked = true;
    close_lease(ctx, *lease, ReturnedBy::recall);
    return Status::would_block;
  }
  // The key was closed here before, or is of the engine's or a connection's domain.
  const Status ended = ctx.registrations->revoke(rkey, owner_of(a));
  return ended != Status::invalid_argument ? ended : ctx.registrations->revoke(rkey);
}

bool is_window_key(const Agent& a, std::uint32_t rkey) noexcept {
  const LeaseGranted* const lease = find_exposure(a, rkey);
  return lease != nullptr && lease->state == State::open && lease->key.is_window();
}

bool is_exposed(const EngineContext& ctx, const Agent& a, const RemoteRegion& region) noexcept {
  const LeaseGranted* const lease = find_exposure(a, region.rkey);
  if (lease == nullptr) return ctx.registrations->opens(region, registrations_of(a));
  const memory::KeyTarget& target = lease->target;
  const std::uint64_t offset = region.address - reinterpret_cast<std::uint64_t>(target.data);
  return lease->state == State::open && allows(target.access, region.access) &&
         offset <= target.bytes && region.length <= target.bytes - offset;
}

}  // namespace spinwire::agent
