// The public face of a connection. Hot: the operations.
#include <algorithm>
#include <array>
#include <initializer_list>

#include "agent/submit.h"
#include "base/error.h"
#include "base/internals.h"
#include "engine/api/operate.h"
#include "engine/engine_core.h"
#include "spinwire/connection.h"

namespace spinwire {

using agent::Agent;
using agent::OperationKind;
using engine::deferred;
using engine::diagnose;
using engine::locate;

std::string_view to_string(ConnectionState state) noexcept {
  constexpr std::array<std::string_view, 5> kNames = {"resolving", "exchanging", "ready",
                                                      "draining", "closed"};
  const auto i = static_cast<std::size_t>(state);
  return i < kNames.size() ? kNames[i] : "unknown";
}

std::string_view to_string(QueuePairState state) noexcept {
  constexpr std::array<std::string_view, 8> kNames = {"reset", "init", "rtr", "rts",
                                                      "sqd",   "sqe",  "err", "unknown"};
  return kNames[std::min(static_cast<std::size_t>(state), kNames.size() - 1)];
}

std::string_view to_string(Blocker blocker) noexcept {
  constexpr std::array<std::string_view, 6> kNames = {"nothing",    "not_ready", "send_queue",
                                                      "operations", "credit",    "windows"};
  const auto i = static_cast<std::size_t>(blocker);
  return i < kNames.size() ? kNames[i] : "unknown";
}

Status Connection::submit_send(const BufferSlice& data, const CompletionCallback& done, Post post) {
  const auto [core, a] = locate(slot_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(slot_);
  return agent::submit_message(core->context, *a, detail::block_of(data), data.data(), data.size(),
                               done, deferred(*core, post));
}

Status Connection::submit_send(const Buffer& data, const CompletionCallback& done, Post post) {
  const auto [core, a] = locate(slot_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(slot_);
  return agent::submit_message(core->context, *a, detail::block_of(data), data.data(), data.size(),
                               done, deferred(*core, post));
}

Status Connection::submit_send_with_imm(const BufferSlice& data, std::uint32_t immediate,
                                        const CompletionCallback& done, Post post) {
  const auto [core, a] = locate(slot_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(slot_);
  return agent::submit_any<OperationKind::send_imm>(
      core->context, *a,
      {detail::block_of(data), data.data(), data.size(), nullptr, immediate, done,
       deferred(*core, post)});
}

Status Connection::submit_send_copy(std::span<const std::byte> bytes,
                                    const CompletionCallback& done, Post post) {
  const auto [core, a] = locate(slot_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(slot_);
  if (a->state != ConnectionState::ready) return Status::not_connected;
  if (bytes.size() > a->max_message) return Status::message_too_long;
  detail::Block* block =
      core->context.arena->allocate(memory::PoolId::send, std::max<std::size_t>(bytes.size(), 1));
  if (block == nullptr) return Status::no_buffer;
  const Buffer copy = detail::make<Buffer>(block, bytes.size());
  std::copy(bytes.begin(), bytes.end(), copy.data());
  return agent::submit_message(core->context, *a, block, copy.data(), bytes.size(), done,
                               deferred(*core, post));
}

Status Connection::submit_write(const BufferSlice& local, const RemoteRegion& remote,
                                const CompletionCallback& done, Post post) {
  const auto [core, a] = locate(slot_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(slot_);
  return agent::submit_any<OperationKind::write>(
      core->context, *a,
      {detail::block_of(local), local.data(), local.size(), &remote, 0, done,
       deferred(*core, post)});
}

Status Connection::submit_write_with_imm(const BufferSlice& local, const RemoteRegion& remote,
                                         std::uint32_t immediate, const CompletionCallback& done,
                                         Post post) {
  const auto [core, a] = locate(slot_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(slot_);
  return agent::submit_any<OperationKind::write_imm>(
      core->context, *a,
      {detail::block_of(local), local.data(), local.size(), &remote, immediate, done,
       deferred(*core, post)});
}

Status Connection::submit_read(const BufferSlice& local, const RemoteRegion& remote,
                               const CompletionCallback& done, Post post) {
  const auto [core, a] = locate(slot_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(slot_);
  return agent::submit_any<OperationKind::read>(
      core->context, *a,
      {detail::block_of(local), local.data(), local.size(), &remote, 0, done,
       deferred(*core, post)});
}

Status Connection::submit_compare_swap(const RemoteRegion& remote, std::uint64_t expected,
                                       std::uint64_t desired, const CompletionCallback& done,
                                       Post post) {
  const auto [core, a] = locate(slot_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(slot_);
  return agent::submit_atomic<OperationKind::compare_swap>(
      core->context, *a, {remote, expected, desired, done, deferred(*core, post)});
}

Status Connection::submit_fetch_add(const RemoteRegion& remote, std::uint64_t add,
                                    const CompletionCallback& done, Post post) {
  const auto [core, a] = locate(slot_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(slot_);
  return agent::submit_atomic<OperationKind::fetch_add>(
      core->context, *a, {remote, 0, add, done, deferred(*core, post)});
}

Status Connection::flush() {
  const auto [core, a] = locate(slot_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(slot_);
  if (core->context.queued_agents != 0 && a->raw != nullptr) [[unlikely]]
    agent::flush_raw(core->context, *a);
  return agent::flush(core->context, *a);
}

OperationId Connection::last_operation() const noexcept {
  const auto [core, a] = locate(slot_, index_, generation_);
  return a != nullptr ? agent::last_operation(core->context, *a) : OperationId{};
}

Status Connection::cancel(OperationId operation) {
  const auto [core, a] = locate(slot_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(slot_);
  return agent::cancel(core->context, *a, operation.value) ? Status::ok : Status::invalid_argument;
}

Status Connection::close() {
  const auto [core, a] = locate(slot_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(slot_);
  if (a->state == ConnectionState::draining) return Status::not_connected;
  agent::close(core->context, *a);
  return Status::ok;
}

Status Connection::set_handlers(const ConnectionHandlers& handlers) {
  const auto [core, a] = locate(slot_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(slot_);
  if (!core->guard.polling()) {
    a->handlers = handlers;
    a->detour &= static_cast<std::uint8_t>(~agent::kReplaced);
  } else {
    // The caller may be one of the old ones: it keeps its captures until it returns.
    a->next_handlers = handlers;
    a->detour |= agent::kReplaced;
  }
  return Status::ok;
}

ConnectionState Connection::state() const noexcept {
  const Agent* const a = locate(slot_, index_, generation_).agent;
  return a != nullptr ? a->state : ConnectionState::closed;
}

Result<QueuePairState> Connection::query_state() const {
  constexpr const char* kAsked = "query a connection's queue pair";
  const engine::Located at = locate(slot_, index_, generation_);
  const Agent* const a = at.agent;
  if (a == nullptr || a->qp == nullptr) {
    const Status why = a == nullptr ? diagnose(slot_) : Status::not_connected;
    return base::fail(why, kAsked, std::string("there is none to be asked: ") += to_string(why),
                      "ask between the connection's beginning and its end, in the engine's thread");
  }
  return base::no_throw(kAsked, [&] {
    return at.core->context.device->query_state(a->qp).map([](ibv_qp_state state) {
      const auto number = static_cast<unsigned>(state);
      const bool known = number <= static_cast<unsigned>(QueuePairState::err);
      return known ? static_cast<QueuePairState>(number) : QueuePairState::unknown;
    });
  });
}

std::size_t Connection::max_message() const noexcept {
  const Agent* const a = locate(slot_, index_, generation_).agent;
  return a != nullptr && a->state == ConnectionState::ready ? a->max_message : 0;
}

namespace {

/// Those of the kinds from one to another that have not ended.
std::uint32_t outstanding(const Agent& a, OperationKind first, OperationKind last) noexcept {
  std::uint64_t sum = 0;
  for (auto i = static_cast<std::size_t>(first); i <= static_cast<std::size_t>(last); ++i)
    sum += agent::outstanding(a.traffic.tallies[i]);
  return static_cast<std::uint32_t>(sum);
}

ConnectionStats stats_of(const Agent* a) noexcept {
  const auto count = [a](OperationKind kind) { return agent::tally(*a, kind).done; };
  const auto bytes = [a](OperationKind kind) { return agent::tally(*a, kind).bytes; };
  ConnectionStats stats;
  stats.messages_sent = agent::messages_sent(*a);
  stats.bytes_sent = bytes(OperationKind::send) + bytes(OperationKind::send_imm) +
                     bytes(OperationKind::raw_send) + bytes(OperationKind::raw_send_imm);
  stats.messages_received = a->traffic.messages_received;
  stats.bytes_received = a->traffic.bytes_received;
  stats.writes = count(OperationKind::write) + count(OperationKind::write_imm) +
                 count(OperationKind::raw_write_imm);
  stats.bytes_written = bytes(OperationKind::write) + bytes(OperationKind::write_imm) +
                        bytes(OperationKind::raw_write_imm);
  stats.reads = count(OperationKind::read);
  stats.bytes_read = bytes(OperationKind::read);
  stats.atomics = count(OperationKind::compare_swap) + count(OperationKind::fetch_add);
  // The parts of a long message are of other kinds; itself it is a SEND.
  stats.outstanding = outstanding(*a, OperationKind::send, OperationKind::raw_write_imm);
  stats.send_credits = agent::credits_in_sight(*a);
  stats.granted_credits = agent::peer_credits(*a);
  return stats;
}

/// Whether a long message would be refused that shorter ones are not.
bool lacks_window(const agent::EngineContext& s, const Agent& a) noexcept {
  if (a.raw != nullptr || a.max_message <= a.send_queue.max_eager) return false;
  const auto& sends = s.rendezvous->sends;
  const bool by_window = a.domain == nullptr && s.windows.size() != 0;
  return sends.size() == sends.capacity() || (by_window && s.windows.free() == 0);
}

Blocker blocker_of(const agent::EngineContext& s, const Agent& a) noexcept {
  if (a.state != ConnectionState::ready) return Blocker::not_ready;
  const std::uint32_t room = agent::room_in_force(a);
  if (room == 0) return Blocker::credit;  // which notes lack
  if (a.send_queue.used >= room) return Blocker::send_queue;
  if (a.raw == nullptr && agent::credits_in_sight(a) == 0) return Blocker::credit;
  if (s.operations.empty()) return Blocker::operations;
  return lacks_window(s, a) ? Blocker::windows : Blocker::nothing;
}

}  // namespace

ConnectionStats Connection::stats() const noexcept {
  const Agent* const a = locate(slot_, index_, generation_).agent;
  return a != nullptr ? stats_of(a) : ConnectionStats{};
}

ConnectionSnapshot Connection::snapshot() const noexcept {
  const auto found = locate(slot_, index_, generation_);
  const detail::EngineCore* const core = found.core;
  const agent::Agent* const a = found.agent;
  if (a == nullptr) return {};
  const agent::EngineContext& s = core->context;
  const auto count = [a](std::initializer_list<OperationKind> kinds) {
    std::uint32_t sum = 0;
    for (const OperationKind kind : kinds) sum += outstanding(*a, kind, kind);
    return sum;
  };
  ConnectionSnapshot now;
  now.state = a->state;
  now.blocked_by = blocker_of(s, *a);
  now.silence = s.clock.duration(s.now - std::min(a->liveness.last_heard, s.now));
  now.messages = count({OperationKind::send, OperationKind::send_imm, OperationKind::raw_send,
                        OperationKind::raw_send_imm});
  now.writes =
      count({OperationKind::write, OperationKind::write_imm, OperationKind::raw_write_imm});
  now.reads = count({OperationKind::read});
  now.atomics = count({OperationKind::compare_swap, OperationKind::fetch_add});
  now.control = count({OperationKind::rendezvous_bind}) + a->control_queue.waiting +
                outstanding(*a, OperationKind::credit_return, OperationKind::lease_unbind);
  now.leased_out = a->leases.granted_count;
  now.leased_out_bytes = a->leases.granted_bytes;
  now.leases_held = a->leases.held_count;
  now.leases_held_bytes = a->leases.held_bytes;
  if (a->raw != nullptr) now.receives = a->raw->accepted - a->raw->completed;
  now.stats = stats_of(a);
  return now;
}

std::string Connection::peer() const {
  const Agent* const a = locate(slot_, index_, generation_).agent;
  return a != nullptr ? std::string(a->peer.name.data()) : std::string();
}

}  // namespace spinwire
