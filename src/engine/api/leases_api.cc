// The public face of leases, and of keys that are passed on as bytes.
#include <algorithm>
#include <array>

#include "agent/lease_table.h"
#include "base/error.h"
#include "base/internals.h"
#include "engine/api/operate.h"
#include "spinwire/lease.h"
#include "wire/region_token.h"

namespace spinwire {

using agent::Agent;
using agent::LeaseHeld;

namespace {

LeaseHeld* find(const detail::EngineSlot* slot, std::uint32_t lease) noexcept {
  detail::EngineCore* const core = engine::core_of(slot);
  return core != nullptr ? agent::find_lease_held(core->context, lease) : nullptr;
}

/// What calls outside of poll() have said goes out at once, as operations do.
void send_notes(detail::EngineCore& core, Agent& a) noexcept {
  if (core.guard.polling()) return;
  agent::flush_control_messages(core.context, a);
}

}  // namespace

std::string_view to_string(LeaseRefusal refusal) noexcept {
  constexpr std::array<std::string_view, 11> kNames = {
      "none",     "too_long", "misaligned", "too_many", "too_much", "no_room",
      "no_right", "bad_time", "over",       "unwanted", "closing"};
  const auto i = static_cast<std::size_t>(refusal);
  return i < kNames.size() ? kNames[i] : "unknown";
}

std::string_view to_string(ReturnedBy how) noexcept {
  constexpr std::array<std::string_view, 6> kNames = {"give_back", "release", "expiry",
                                                      "recall",    "refusal", "end"};
  const auto i = static_cast<std::size_t>(how);
  return i < kNames.size() ? kNames[i] : "unknown";
}

RemoteRegion RemoteMemory::region() const noexcept {
  const LeaseHeld* const h = find(slot_, lease_);
  if (h == nullptr || h->state != LeaseHeld::State::held) return {};
  return {h->region.address, h->region.length, 0, h->region.access, h->id};
}

Nanoseconds RemoteMemory::time_left() const noexcept {
  const LeaseHeld* const h = find(slot_, lease_);
  if (h == nullptr || h->state != LeaseHeld::State::held) return Nanoseconds(0);
  const Clock& clock = slot_->core->context.clock;
  const std::uint64_t now = clock.now();
  return clock.duration(h->until - std::min(now, h->until));
}

Connection RemoteMemory::connection() const noexcept {
  const LeaseHeld* const h = find(slot_, lease_);
  return h != nullptr ? agent::handle(slot_->core->context, *h->agent) : Connection();
}

Status RemoteMemory::renew(Nanoseconds time, const LeaseCallback& done) {
  LeaseHeld* const h = find(slot_, lease_);
  if (h == nullptr) return engine::diagnose(slot_);
  detail::EngineCore& core = *slot_->core;
  const Status status = agent::renew_lease(core.context, *h, time, done);
  if (status == Status::ok) send_notes(core, *h->agent);
  return status;
}

Status RemoteMemory::give_back(const LeaseCallback& done) {
  LeaseHeld* const h = find(slot_, lease_);
  if (h == nullptr) return engine::diagnose(slot_);
  detail::EngineCore& core = *slot_->core;
  const Status status = agent::give_back_lease(core.context, *h, done);
  if (status != Status::ok) return status;
  send_notes(core, *h->agent);
  slot_ = nullptr;
  lease_ = 0;
  return status;
}

void RemoteMemory::release() noexcept {
  if (lease_ == 0) return;
  if (LeaseHeld* const h = find(slot_, lease_); h != nullptr) {
    detail::EngineCore& core = *slot_->core;
    Agent& a = *h->agent;
    agent::release_lease(core.context, *h);
    send_notes(core, a);
  }
  slot_ = nullptr;
  lease_ = 0;
}

RemoteRegion RemoteMemory::detach() noexcept {
  LeaseHeld* const h = find(slot_, lease_);
  if (h == nullptr || h->state != LeaseHeld::State::held || h->call_pending) return {};
  const RemoteRegion region = h->region;
  agent::forget_lease_held(slot_->core->context, *h);
  slot_ = nullptr;
  lease_ = 0;
  return region;
}

Status Connection::request_memory(std::size_t bytes, const LeaseOptions& options,
                                  const LeaseCallback& done) {
  const auto [core, a] = engine::locate(slot_, index_, generation_);
  if (a == nullptr) return engine::diagnose(slot_);
  const Status status = agent::request_lease(core->context, *a, bytes, options, done);
  if (status == Status::ok) send_notes(*core, *a);
  return status;
}

Status Connection::lease(const BufferSlice& memory, const LeaseOptions& options,
                         const LeaseCallback& done) {
  const auto [core, a] = engine::locate(slot_, index_, generation_);
  if (a == nullptr) return engine::diagnose(slot_);
  if (memory && !core->context.owns(*detail::block_of(memory))) return Status::invalid_argument;
  const Status status = agent::grant_lease(core->context, *a, memory, options, done);
  if (status == Status::ok) send_notes(*core, *a);
  return status;
}

Status Connection::recall(LeaseId lease) {
  const auto [core, a] = engine::locate(slot_, index_, generation_);
  if (a == nullptr) return engine::diagnose(slot_);
  const Status status = agent::recall_lease(core->context, *a, lease);
  if (status == Status::ok) send_notes(*core, *a);
  return status;
}

Status Connection::revoke(const RemoteRegion& region) {
  const auto [core, a] = engine::locate(slot_, index_, generation_);
  if (a == nullptr) return engine::diagnose(slot_);
  const Status status = agent::revoke_exposure(core->context, *a, region.rkey);
  if (status == Status::would_block) send_notes(*core, *a);
  return status;
}

Result<RegionToken> Connection::token(const RemoteRegion& region) const {
  constexpr const char* kAsked = "make a token of a region";
  const auto [core, a] = engine::locate(slot_, index_, generation_);
  if (a == nullptr || a->state != ConnectionState::ready) {
    return base::fail(a == nullptr ? engine::diagnose(slot_) : Status::not_connected, kAsked,
                      "the connection is not ready", "wait for on_ready");
  }
  wire::Token token;
  token.address = region.address;
  token.length = region.length;
  token.rkey = region.rkey;
  token.access = static_cast<std::uint8_t>(region.access);
  token.incarnation = core->context.incarnation;
  const bool bound = a->domain != nullptr || agent::is_window_key(*a, region.rkey);
  token.qp_num = bound ? a->qp->qp_num : 0;
  const RegionToken bytes = wire::encode(token);
  if (wire::Token same; region.lease == 0 && wire::decode(bytes, same)) return bytes;
  return base::fail(Status::invalid_argument, kAsked,
                    region.lease != 0 ? "it is part of a lease" : "it opens nothing",
                    "give what expose() or register_memory() answered");
}

Result<RemoteRegion> Connection::import_token(std::span<const std::byte> bytes) const {
  constexpr const char* kAsked = "use the token of a peer's memory";
  const auto [core, a] = engine::locate(slot_, index_, generation_);
  if (a == nullptr || a->state != ConnectionState::ready) {
    return base::fail(a == nullptr ? engine::diagnose(slot_) : Status::not_connected, kAsked,
                      "the connection is not ready", "wait for on_ready");
  }
  wire::Token token;
  if (!wire::decode(bytes, token)) {
    return base::fail(Status::protocol, kAsked, "its bytes are no token, or were damaged",
                      "pass it on whole, as Connection::token() made it");
  }
  if (token.incarnation != a->peer.incarnation) {
    return base::fail(Status::invalid_argument, kAsked,
                      "it is of another engine than this connection's peer",
                      "import it on a connection to the engine that made it");
  }
  if (token.qp_num != 0 && token.qp_num != a->peer.queue_pair.qp_num) {
    return base::fail(Status::invalid_argument, kAsked,
                      "its key is bound to another connection of the peer",
                      "use it there, or have it made with KeyScope::domain");
  }
  return RemoteRegion{token.address, token.length, token.rkey, static_cast<Access>(token.access)};
}

}  // namespace spinwire
