// Public API of leases, and of keys passed on as bytes.
#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "agent/control_messages.h"
#include "agent/lease_table.h"
#include "agent/room_waiters.h"
#include "base/error.h"
#include "base/internals.h"
#include "engine/api/operate.h"
#include "spinwire/lease.h"
#include "wire/region_token.h"

namespace spinwire {

using agent::Agent;
using agent::LeaseHeld;
using detail::EngineCore;
using engine::with_agent;

namespace {

LeaseHeld* find(const detail::EngineSlot* slot, std::uint32_t lease) noexcept {
  EngineCore* const core = engine::checked_core_of(slot);
  return core != nullptr ? agent::find_lease_held(core->context, lease) : nullptr;
}

/// Posts the control messages of an accepted call outside of poll() at once, like operations. A
/// call that found too many of them is told by on_writable. Answers `status`.
Status post_control(EngineCore& core, Agent& a, Status status = Status::ok) noexcept {
  const bool is_refused = status == Status::would_block;
  if (is_refused && !agent::can_queue_control(a))
    (void)agent::refuse_for_room(core.context, a, agent::Room::control);
  if ((status == Status::ok || is_refused) && !core.guard.polling())
    agent::flush_control_messages(core.context, a);
  return status;
}

}  // namespace

std::string_view to_string(LeaseRefusal refusal) noexcept {
  constexpr std::array<std::string_view, 11> kNames = {
      "none",     "too_long",     "misaligned", "too_many", "too_much", "no_room",
      "no_right", "bad_duration", "over",       "unwanted", "closing"};
  return engine::name_of(kNames, refusal);
}

std::string_view to_string(ReturnedBy how) noexcept {
  constexpr std::array<std::string_view, 6> kNames = {"give_back", "release", "expiry",
                                                      "recall",    "refusal", "end"};
  return engine::name_of(kNames, how);
}

RemoteRegion RemoteMemory::region() const noexcept {
  const LeaseHeld* const h = find(slot_, lease_);
  return h != nullptr ? agent::region_of(*h) : RemoteRegion{};
}

Nanoseconds RemoteMemory::time_left() const noexcept {
  const LeaseHeld* const h = find(slot_, lease_);
  return h != nullptr ? agent::time_left(detail::core_at(slot_)->context, *h) : Nanoseconds{};
}

Connection RemoteMemory::connection() const noexcept {
  const LeaseHeld* const h = find(slot_, lease_);
  return h != nullptr ? agent::handle(detail::core_at(slot_)->context, agent::holder_of(*h))
                      : Connection();
}

std::uint64_t RemoteMemory::tag() const noexcept {
  const LeaseHeld* const h = find(slot_, lease_);
  return h != nullptr ? agent::tag_of(*h) : 0;
}

Status RemoteMemory::renew(Nanoseconds duration, const LeaseCallback& done) {
  LeaseHeld* const h = find(slot_, lease_);
  if (h == nullptr) return engine::diagnose(slot_);
  EngineCore& core = *detail::core_at(slot_);
  return post_control(core, agent::holder_of(*h),
                      agent::renew_lease(core.context, *h, duration, done));
}

Status RemoteMemory::auto_renew(Nanoseconds duration, const LeaseCallback& on_end) {
  LeaseHeld* const h = find(slot_, lease_);
  if (h == nullptr) return engine::diagnose(slot_);
  return agent::auto_renew_lease(detail::core_at(slot_)->context, *h, duration, on_end);
}

void RemoteMemory::stop_auto_renew() noexcept {
  if (LeaseHeld* const h = find(slot_, lease_); h != nullptr)
    agent::stop_auto_renewal(detail::core_at(slot_)->context, *h);
}

Status RemoteMemory::give_back(const LeaseCallback& done) {
  LeaseHeld* const h = find(slot_, lease_);
  if (h == nullptr) return engine::diagnose(slot_);
  EngineCore& core = *detail::core_at(slot_);
  Agent& a = agent::holder_of(*h);
  const Status status = post_control(core, a, agent::give_back_lease(core.context, *h, done));
  if (status != Status::ok) return status;
  slot_ = nullptr;
  lease_ = 0;
  return status;
}

void RemoteMemory::release() noexcept {
  if (lease_ == 0) return;
  if (LeaseHeld* const h = find(slot_, lease_); h != nullptr) {
    EngineCore& core = *detail::core_at(slot_);
    Agent& a = agent::holder_of(*h);
    agent::release_lease(core.context, *h);
    (void)post_control(core, a);
  }
  slot_ = nullptr;
  lease_ = 0;
}

RemoteRegion RemoteMemory::detach() noexcept {
  LeaseHeld* const h = find(slot_, lease_);
  RemoteRegion region;
  if (h == nullptr || !agent::detach_lease(detail::core_at(slot_)->context, *h, region)) return {};
  slot_ = nullptr;
  lease_ = 0;
  return region;
}

Status Connection::request_memory(std::size_t bytes, const LeaseOptions& options,
                                  const LeaseCallback& done) {
  return with_agent(slot_, index_, generation_, [&](EngineCore& core, Agent& a) {
    return post_control(core, a, agent::request_lease(core.context, a, bytes, options, done));
  });
}

Status Connection::lease(const BufferSlice& memory, const LeaseOptions& options,
                         const LeaseCallback& done, LeaseId* id) {
  return with_agent(slot_, index_, generation_, [&](EngineCore& core, Agent& a) {
    if (memory && !core.context.owns(*detail::block_of(memory))) return Status::invalid_argument;
    return post_control(core, a, agent::grant_lease(core.context, a, memory, options, done, id));
  });
}

Status Connection::recall(LeaseId lease) {
  return with_agent(slot_, index_, generation_, [&](EngineCore& core, Agent& a) {
    return post_control(core, a, agent::recall_lease(core.context, a, lease));
  });
}

Status Connection::revoke(const RemoteRegion& region) {
  return with_agent(slot_, index_, generation_, [&](EngineCore& core, Agent& a) {
    return post_control(core, a, agent::revoke_exposure(core.context, a, region.rkey));
  });
}

namespace {

/// The ready connection of a handle, for a token.
Result<engine::Located> locate_ready(const detail::EngineSlot* slot, std::uint32_t index,
                                     std::uint32_t generation, const char* asked) {
  const engine::Located found = engine::locate(slot, index, generation);
  if (found.agent != nullptr && agent::is_ready(*found.agent)) return found;
  return base::fail(found.agent == nullptr ? engine::diagnose(slot) : Status::not_connected, asked,
                    "the connection is not ready", "wait for on_ready");
}

constexpr Nanoseconds kLongestToken = std::chrono::hours(24);
constexpr Nanoseconds kMillisecond = std::chrono::milliseconds(1);

/// The time in which tokens have their deadlines: of the system's clock, which hosts can have in
/// common, or of a manual clock.
Nanoseconds token_time(const Clock& clock) noexcept {
  if (clock.is_manual()) return clock.duration(clock.now());
  return std::chrono::system_clock::now().time_since_epoch();
}

/// Why no token can be made of the region; null if one can.
const char* refusal_of(const engine::Located& found, const RemoteRegion& region) noexcept {
  if (region.lease != 0) return "the region is part of a lease";
  if (region.timed_rkey != 0) return "the region is the peer's";
  if (region.rkey == 0 || region.length == 0) return "the region is empty";
  if (!agent::is_exposed(found.core->context, *found.agent, region))
    return "no key here opens the region: it is the peer's, or was revoked";
  return nullptr;
}

/// `valid_for` of 0: no deadline.
Result<RegionToken> make_token(const engine::Located& found, const RemoteRegion& region,
                               Nanoseconds valid_for, const char* asked) {
  if (const char* const why = refusal_of(found, region); why != nullptr) {
    return base::fail(Status::invalid_argument, asked, why,
                      "give what expose() or register_memory() answered");
  }
  wire::Token token;
  token.address = region.address;
  token.length = region.length;
  token.rkey = region.rkey;
  token.access = static_cast<std::uint8_t>(region.access);
  token.incarnation = found.core->context.incarnation;
  token.qp_num = agent::qp_bound_to(*found.agent, region.rkey);
  if (valid_for != Nanoseconds{0}) {
    const Nanoseconds until = token_time(found.core->context.clock) + valid_for;
    token.deadline = static_cast<std::uint64_t>(until / kMillisecond);
  }
  const RegionToken bytes = wire::encode(token);
  if (wire::Token same; wire::decode(bytes, same)) return bytes;
  return base::fail(Status::invalid_argument, asked, "the region has no valid rights or length",
                    "give what expose() or register_memory() answered");
}

/// How long operations may start on a region with this deadline; 0 if no longer. A peer may write
/// any deadline: no later one counts than a token can have.
Nanoseconds usable_until(const agent::EngineContext& ctx, std::uint64_t deadline) noexcept {
  const Nanoseconds now = token_time(ctx.clock);
  const Nanoseconds guard = ctx.config.leases.guard;
  const std::int64_t milliseconds = static_cast<std::int64_t>(deadline) - now / kMillisecond;
  if (milliseconds > (kLongestToken + guard) / kMillisecond) return kLongestToken;
  const Nanoseconds left = milliseconds * kMillisecond - now % kMillisecond - guard;
  return std::clamp(left, Nanoseconds{0}, kLongestToken);
}

}  // namespace

Result<RegionToken> Connection::token(const RemoteRegion& region) const {
  constexpr const char* kAsked = "make a token of a region";
  const auto found = locate_ready(slot_, index_, generation_, kAsked);
  if (!found) return tl::unexpected(found.error());
  return make_token(*found, region, Nanoseconds{0}, kAsked);
}

Result<RegionToken> Connection::token(const RemoteRegion& region, Nanoseconds valid_for) const {
  constexpr const char* kAsked = "make a token with a deadline";
  if (valid_for < kMillisecond || valid_for > kLongestToken) {
    return base::fail(Status::invalid_argument, kAsked,
                      base::format("it is to be valid for {} ns", valid_for.count()),
                      "give from 1 ms to 24 h, or no time");
  }
  const auto found = locate_ready(slot_, index_, generation_, kAsked);
  if (!found) return tl::unexpected(found.error());
  return make_token(*found, region, valid_for, kAsked);
}

Nanoseconds Connection::time_left(const RemoteRegion& region) const noexcept {
  EngineCore* const core = engine::checked_core_of(slot_);
  if (core == nullptr || !region) return Nanoseconds{0};
  if (region.lease != 0) {
    const LeaseHeld* const h = find(slot_, region.lease);
    return h != nullptr ? agent::time_left(core->context, *h) : Nanoseconds{0};
  }
  if (region.timed_rkey == 0) return Nanoseconds::max();
  const std::uint64_t now = core->context.clock.now();
  return core->context.clock.duration(region.deadline - std::min(now, region.deadline));
}

Result<RemoteRegion> Connection::import_token(std::span<const std::byte> bytes) const {
  constexpr const char* kAsked = "import a token of a peer's memory";
  const auto found = locate_ready(slot_, index_, generation_, kAsked);
  if (!found) return tl::unexpected(found.error());
  const Agent& a = *found->agent;
  wire::Token token;
  if (!wire::decode(bytes, token)) {
    return base::fail(Status::protocol, kAsked, "its bytes are no token, or were damaged",
                      "pass it on whole, as Connection::token() made it");
  }
  if (token.incarnation != agent::peer_incarnation(a)) {
    return base::fail(Status::invalid_argument, kAsked,
                      "it is of another engine than this connection's peer",
                      "import it on a connection to the engine that made it");
  }
  if (token.qp_num != 0 && !agent::is_peers_qp(a, token.qp_num)) {
    return base::fail(Status::invalid_argument, kAsked,
                      "its key is bound to another connection of the peer",
                      "use it there, or expose the memory with KeyScope::domain");
  }
  RemoteRegion region{token.address, token.length, token.rkey, static_cast<Access>(token.access)};
  if (token.deadline == 0) return region;
  const agent::EngineContext& ctx = found->core->context;
  const Nanoseconds left = usable_until(ctx, token.deadline);
  if (left == Nanoseconds{0}) {
    return base::fail(Status::lease_expired, kAsked, "its deadline has passed, or is about to",
                      "ask the peer for another, and see whether the hosts' clocks agree");
  }
  region.timed_rkey = std::exchange(region.rkey, 0);
  region.deadline = ctx.clock.now() + ctx.clock.ticks(left);
  return region;
}

}  // namespace spinwire
