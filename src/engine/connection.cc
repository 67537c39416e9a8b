// The public face of a connection. Hot: the operations.
#include "spinwire/connection.h"

#include <algorithm>
#include <array>
#include <initializer_list>

#include "agent/submit.h"
#include "base/error.h"
#include "engine/core.h"

namespace spinwire {

using agent::Agent;
using agent::OperationKind;

namespace {

/// The connection's agent, for a call of the engine's thread; else null.
inline Agent* locate(detail::EngineCore* core, std::uint32_t index,
                     std::uint32_t generation) noexcept {
  return core != nullptr && core->guard.owned() ? core->find(index, generation) : nullptr;
}
/// Why it is null.
[[gnu::cold, gnu::noinline]] Status diagnose(const detail::EngineCore* core) noexcept {
  return core != nullptr && !core->guard.owned() ? core->guard.diagnose() : Status::not_connected;
}

inline bool deferred(const detail::EngineCore& core, Post post) noexcept {
  return post == Post::defer || (post == Post::automatic && core.guard.polling());
}

}  // namespace

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
  constexpr std::array<std::string_view, 5> kNames = {"nothing", "not_ready", "send_queue",
                                                      "operations", "credit"};
  const auto i = static_cast<std::size_t>(blocker);
  return i < kNames.size() ? kNames[i] : "unknown";
}

Status Connection::send(const BufferSlice& data, const CompletionCallback& done, Post post) {
  Agent* const a = locate(core_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(core_);
  return agent::submit_message(core_->shared, *a, data.block(), data.data(), data.size(), done,
                               deferred(*core_, post));
}

Status Connection::send(const Buffer& data, const CompletionCallback& done, Post post) {
  Agent* const a = locate(core_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(core_);
  return agent::submit_message(core_->shared, *a, data.block(), data.data(), data.size(), done,
                               deferred(*core_, post));
}

Status Connection::send_with_imm(const BufferSlice& data, std::uint32_t immediate,
                                 const CompletionCallback& done, Post post) {
  Agent* const a = locate(core_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(core_);
  return agent::submit_any<OperationKind::send_imm>(
      core_->shared, *a,
      {data.block(), data.data(), data.size(), nullptr, immediate, done, deferred(*core_, post)});
}

Status Connection::send_copy(std::span<const std::byte> bytes, const CompletionCallback& done,
                             Post post) {
  Agent* const a = locate(core_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(core_);
  if (a->state != ConnectionState::ready) return Status::not_connected;
  if (bytes.size() > a->longest_message) return Status::message_too_long;
  detail::Block* block =
      core_->shared.arena->allocate(memory::PoolId::send, std::max<std::size_t>(bytes.size(), 1));
  if (block == nullptr) return Status::no_buffer;
  const Buffer copy(block, bytes.size());
  std::copy(bytes.begin(), bytes.end(), copy.data());
  return agent::submit_message(core_->shared, *a, block, copy.data(), bytes.size(), done,
                               deferred(*core_, post));
}

Status Connection::write(const BufferSlice& local, const RemoteRegion& remote,
                         const CompletionCallback& done, Post post) {
  Agent* const a = locate(core_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(core_);
  return agent::submit_any<OperationKind::write>(
      core_->shared, *a,
      {local.block(), local.data(), local.size(), &remote, 0, done, deferred(*core_, post)});
}

Status Connection::write_with_imm(const BufferSlice& local, const RemoteRegion& remote,
                                  std::uint32_t immediate, const CompletionCallback& done,
                                  Post post) {
  Agent* const a = locate(core_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(core_);
  return agent::submit_any<OperationKind::write_imm>(
      core_->shared, *a,
      {local.block(), local.data(), local.size(), &remote, immediate, done,
       deferred(*core_, post)});
}

Status Connection::read(const BufferSlice& local, const RemoteRegion& remote,
                        const CompletionCallback& done, Post post) {
  Agent* const a = locate(core_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(core_);
  return agent::submit_any<OperationKind::read>(
      core_->shared, *a,
      {local.block(), local.data(), local.size(), &remote, 0, done, deferred(*core_, post)});
}

Status Connection::compare_swap(const RemoteRegion& remote, std::uint64_t expected,
                                std::uint64_t desired, const CompletionCallback& done, Post post) {
  Agent* const a = locate(core_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(core_);
  return agent::submit_atomic<OperationKind::compare_swap>(
      core_->shared, *a, {remote, expected, desired, done, deferred(*core_, post)});
}

Status Connection::fetch_add(const RemoteRegion& remote, std::uint64_t add,
                             const CompletionCallback& done, Post post) {
  Agent* const a = locate(core_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(core_);
  return agent::submit_atomic<OperationKind::fetch_add>(
      core_->shared, *a, {remote, 0, add, done, deferred(*core_, post)});
}

Status Connection::flush() {
  Agent* const a = locate(core_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(core_);
  return agent::flush(core_->shared, *a);
}

OperationId Connection::last_operation() const noexcept {
  const Agent* const a = locate(core_, index_, generation_);
  const agent::Operation* const last = a != nullptr ? agent::last_operation(*a) : nullptr;
  return last != nullptr ? OperationId{last->wr.wr_id} : OperationId{};
}

Status Connection::cancel(OperationId operation) {
  Agent* const a = locate(core_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(core_);
  return agent::cancel(core_->shared, *a, operation.value) ? Status::ok : Status::invalid_argument;
}

Status Connection::close() {
  Agent* const a = locate(core_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(core_);
  if (a->state == ConnectionState::draining) return Status::not_connected;
  agent::close(core_->shared, *a);
  return Status::ok;
}

Status Connection::set_handlers(const ConnectionHandlers& handlers) {
  Agent* const a = locate(core_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(core_);
  if (!core_->guard.polling()) {
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
  if (core_ == nullptr) return ConnectionState::closed;
  const Agent* a = core_->find(index_, generation_);
  return a != nullptr ? a->state : ConnectionState::closed;
}

Result<QueuePairState> Connection::query_state() const {
  constexpr const char* kAsked = "query a connection's queue pair";
  const Agent* a = locate(core_, index_, generation_);
  if (a == nullptr || a->qp == nullptr) {
    const Status why = a == nullptr ? diagnose(core_) : Status::not_connected;
    return base::fail(why, kAsked, std::string("there is none to be asked: ") += to_string(why),
                      "ask between the connection's beginning and its end, in the engine's thread");
  }
  return base::no_throw(kAsked, [&] {
    return core_->shared.device->query_state(a->qp).map([](ibv_qp_state state) {
      const auto number = static_cast<unsigned>(state);
      const bool known = number <= static_cast<unsigned>(QueuePairState::err);
      return known ? static_cast<QueuePairState>(number) : QueuePairState::unknown;
    });
  });
}

std::size_t Connection::max_message() const noexcept {
  if (core_ == nullptr) return 0;
  const Agent* a = core_->find(index_, generation_);
  return a != nullptr && a->state == ConnectionState::ready ? a->longest_message : 0;
}

namespace {

ConnectionStats stats_of(const Agent* a) noexcept {
  const auto count = [a](OperationKind kind) { return agent::tally(*a, kind).done; };
  const auto bytes = [a](OperationKind kind) { return agent::tally(*a, kind).bytes; };
  ConnectionStats stats;
  stats.messages_sent = agent::messages_sent(*a);
  stats.bytes_sent = bytes(OperationKind::send) + bytes(OperationKind::send_imm);
  stats.messages_received = a->messages_received;
  stats.bytes_received = a->bytes_received;
  stats.writes = count(OperationKind::write) + count(OperationKind::write_imm);
  stats.bytes_written = bytes(OperationKind::write) + bytes(OperationKind::write_imm);
  stats.reads = count(OperationKind::read);
  stats.bytes_read = bytes(OperationKind::read);
  stats.atomics = count(OperationKind::compare_swap) + count(OperationKind::fetch_add);
  stats.outstanding = agent::outstanding(*a);
  stats.send_credits = agent::credits_in_sight(*a);
  stats.granted_credits = agent::peer_credits(*a);
  return stats;
}

Blocker blocker_of(const agent::Shared& s, const Agent& a) noexcept {
  if (a.state != ConnectionState::ready) return Blocker::not_ready;
  if (a.sq_used >= agent::room_in_force(a)) return Blocker::send_queue;
  if (agent::credits_in_sight(a) == 0) return Blocker::credit;
  return s.operations.empty() ? Blocker::operations : Blocker::nothing;
}

}  // namespace

ConnectionStats Connection::stats() const noexcept {
  if (core_ == nullptr) return {};
  const Agent* a = core_->find(index_, generation_);
  return a != nullptr ? stats_of(a) : ConnectionStats{};
}

ConnectionSnapshot Connection::snapshot() const noexcept {
  const Agent* const a = locate(core_, index_, generation_);
  if (a == nullptr) return {};
  const agent::Shared& s = core_->shared;
  const auto outstanding = [a](std::initializer_list<OperationKind> kinds) {
    std::uint64_t sum = 0;
    for (const OperationKind kind : kinds) sum += agent::outstanding(agent::tally(*a, kind));
    return static_cast<std::uint32_t>(sum);
  };
  ConnectionSnapshot now;
  now.state = a->state;
  now.blocked_by = blocker_of(s, *a);
  now.silence = s.clock.duration(s.now - std::min(a->last_heard, s.now));
  now.messages = outstanding({OperationKind::send, OperationKind::send_imm});
  now.writes = outstanding({OperationKind::write, OperationKind::write_imm});
  now.reads = outstanding({OperationKind::read});
  now.atomics = outstanding({OperationKind::compare_swap, OperationKind::fetch_add});
  now.control = outstanding({OperationKind::credit_return, OperationKind::goodbye,
                             OperationKind::credit_write, OperationKind::keepalive});
  now.leased_out = a->leases.lent;
  now.leased_out_bytes = a->leases.lent_bytes;
  now.leases_held = a->leases.held;
  now.leases_held_bytes = a->leases.held_bytes;
  now.stats = stats_of(a);
  return now;
}

std::string Connection::peer() const {
  if (core_ == nullptr) return {};
  const Agent* a = core_->find(index_, generation_);
  return a != nullptr ? std::string(a->peer.data()) : std::string();
}

}  // namespace spinwire
