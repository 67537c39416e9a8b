// The public face of a connection. Hot: the operations.
#include <algorithm>
#include <array>
#include <functional>
#include <initializer_list>

#include "agent/submit.h"
#include "base/error.h"
#include "base/internals.h"
#include "engine/api/operate.h"
#include "engine/engine_core.h"
#include "spinwire/connection.h"

namespace spinwire {

Result<agent::Agent*> detail::locate(const EngineSlot* slot, std::uint32_t index,
                                     std::uint32_t generation, const char* asked) {
  if (const Status why = engine::diagnose(slot); why != Status::not_connected)
    return engine::misused(why, asked);
  agent::Agent* const a = engine::locate(slot, index, generation).agent;
  if (a != nullptr && a->state != ConnectionState::draining) return a;
  return base::fail(Status::not_connected, asked, "the connection has ended", "make another one");
}

using agent::Agent;
using agent::OperationKind;
using detail::EngineCore;
using engine::diagnose;
using engine::locate;
using engine::with_agent;
using engine::with_operation;

std::string_view to_string(ConnectionState state) noexcept {
  constexpr std::array<std::string_view, 5> kNames = {"resolving", "exchanging", "ready",
                                                      "draining", "closed"};
  return engine::name_of(kNames, state);
}

std::string_view to_string(QueuePairState state) noexcept {
  constexpr std::array<std::string_view, 8> kNames = {"reset", "init", "rtr", "rts",
                                                      "sqd",   "sqe",  "err", "unknown"};
  return engine::name_of(kNames, state);
}

std::string_view to_string(Blocker blocker) noexcept {
  constexpr std::array<std::string_view, 6> kNames = {"nothing",    "not_ready", "send_queue",
                                                      "operations", "credit",    "windows"};
  return engine::name_of(kNames, blocker);
}

Status Connection::submit_send(const BufferSlice& data, const CompletionCallback& done, Post post) {
  return with_operation(
      slot_, index_, generation_, post, [&](EngineCore& core, Agent& a, bool defer) {
        return agent::submit_message<false>(core.context, a, detail::block_of(data), data.data(),
                                            data.size(), done, defer);
      });
}

Status Connection::submit_send(const Buffer& data, const CompletionCallback& done, Post post) {
  return with_operation(
      slot_, index_, generation_, post, [&](EngineCore& core, Agent& a, bool defer) {
        return agent::submit_message<true>(core.context, a, detail::block_of(data), data.data(),
                                           data.size(), done, defer);
      });
}

Status Connection::submit_send_with_imm(const BufferSlice& data, std::uint32_t immediate,
                                        const CompletionCallback& done, Post post) {
  return with_operation(
      slot_, index_, generation_, post, [&](EngineCore& core, Agent& a, bool defer) {
        return agent::submit_any<OperationKind::send_imm>(
            core.context, a,
            {detail::block_of(data), data.data(), data.size(), nullptr, immediate, done, defer});
      });
}

Status Connection::submit_send_copy(std::span<const std::byte> bytes,
                                    const CompletionCallback& done, Post post) {
  return with_operation(slot_, index_, generation_, post,
                        [&](EngineCore& core, Agent& a, bool defer) {
                          if (a.state != ConnectionState::ready) return Status::not_connected;
                          if (bytes.size() > a.max_message) return Status::message_too_long;
                          detail::Block* block = core.context.arena->allocate(
                              memory::PoolId::send, std::max<std::size_t>(bytes.size(), 1));
                          if (block == nullptr) return Status::no_buffer;
                          const Buffer copy = detail::make<Buffer>(block, bytes.size());
                          std::copy(bytes.begin(), bytes.end(), copy.data());
                          return agent::submit_message<true>(core.context, a, block, copy.data(),
                                                             bytes.size(), done, defer);
                        });
}

Status Connection::submit_write(const BufferSlice& local, const RemoteRegion& remote,
                                const CompletionCallback& done, Post post) {
  return with_operation(
      slot_, index_, generation_, post, [&](EngineCore& core, Agent& a, bool defer) {
        return agent::submit_any<OperationKind::write>(
            core.context, a,
            {detail::block_of(local), local.data(), local.size(), &remote, 0, done, defer});
      });
}

Status Connection::submit_write_with_imm(const BufferSlice& local, const RemoteRegion& remote,
                                         std::uint32_t immediate, const CompletionCallback& done,
                                         Post post) {
  return with_operation(
      slot_, index_, generation_, post, [&](EngineCore& core, Agent& a, bool defer) {
        return agent::submit_any<OperationKind::write_imm>(
            core.context, a,
            {detail::block_of(local), local.data(), local.size(), &remote, immediate, done, defer});
      });
}

Status Connection::submit_read(const BufferSlice& local, const RemoteRegion& remote,
                               const CompletionCallback& done, Post post) {
  return with_operation(
      slot_, index_, generation_, post, [&](EngineCore& core, Agent& a, bool defer) {
        return agent::submit_any<OperationKind::read>(
            core.context, a,
            {detail::block_of(local), local.data(), local.size(), &remote, 0, done, defer});
      });
}

Status Connection::submit_compare_swap(const RemoteRegion& remote, std::uint64_t expected,
                                       std::uint64_t desired, const CompletionCallback& done,
                                       Post post) {
  return with_operation(slot_, index_, generation_, post,
                        [&](EngineCore& core, Agent& a, bool defer) {
                          return agent::submit_atomic<OperationKind::compare_swap>(
                              core.context, a, {remote, expected, desired, done, defer});
                        });
}

Status Connection::submit_fetch_add(const RemoteRegion& remote, std::uint64_t add,
                                    const CompletionCallback& done, Post post) {
  return with_operation(slot_, index_, generation_, post,
                        [&](EngineCore& core, Agent& a, bool defer) {
                          return agent::submit_atomic<OperationKind::fetch_add>(
                              core.context, a, {remote, 0, add, done, defer});
                        });
}

Status Connection::flush() {
  return with_agent(slot_, index_, generation_, [&](EngineCore& core, Agent& a) {
    if (core.context.queued_agents != 0 && a.raw != nullptr) [[unlikely]]
      agent::post_raw_receives_now(core.context, a);
    return agent::flush(core.context, a);
  });
}

OperationId Connection::last_operation() const noexcept {
  const auto [core, a] = locate(slot_, index_, generation_);
  return a != nullptr ? agent::last_operation(core->context, *a) : OperationId{};
}

Status Connection::cancel(OperationId operation) {
  return with_agent(slot_, index_, generation_, [&](EngineCore& core, Agent& a) {
    return agent::cancel(core.context, a, operation.value) ? Status::ok : Status::invalid_argument;
  });
}

Status Connection::close() {
  return with_agent(slot_, index_, generation_, [&](EngineCore& core, Agent& a) {
    if (a.state == ConnectionState::draining) return Status::not_connected;
    agent::close(core.context, a);
    return Status::ok;
  });
}

Status Connection::set_handlers(const ConnectionHandlers& handlers) {
  return with_agent(slot_, index_, generation_, [&](EngineCore& core, Agent& a) {
    if (!core.guard.polling()) {
      a.handlers = handlers;
      a.detour &= static_cast<std::uint8_t>(~agent::kReplaced);
    } else {
      // A callback that runs now keeps its captures until it returns.
      a.next_handlers = handlers;
      a.detour |= agent::kReplaced;
    }
    return Status::ok;
  });
}

Result<void> Connection::join(const Endpoint& peer) {
  constexpr const char* kAsked = "join a peer's endpoint";
  const auto a = detail::locate(slot_, index_, generation_, kAsked);
  if (!a) return tl::unexpected(a.error());
  return base::no_throw(kAsked, [&] { return slot_->core->join(**a, peer); });
}

Result<Endpoint> Connection::endpoint() const {
  constexpr const char* kAsked = "get a connection's endpoint";
  const auto a = detail::locate(slot_, index_, generation_, kAsked);
  if (!a) return tl::unexpected(a.error());
  if ((*a)->setup.endpoint_delivered) return agent::endpoint(slot_->core->context, **a);
  return base::fail(Status::not_connected, kAsked, "its queue pair does not exist yet",
                    "wait for on_endpoint");
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

using Kinds = std::initializer_list<OperationKind>;
constexpr Kinds kMessages = {OperationKind::send, OperationKind::send_imm, OperationKind::raw_send,
                             OperationKind::raw_send_imm};
constexpr Kinds kWrites = {OperationKind::write, OperationKind::write_imm,
                           OperationKind::raw_write_imm};
constexpr Kinds kReads = {OperationKind::read};
constexpr Kinds kAtomics = {OperationKind::compare_swap, OperationKind::fetch_add};

/// Operations of the kinds from `first` to `last` that have not ended.
std::uint32_t outstanding(const Agent& a, OperationKind first, OperationKind last) noexcept {
  std::uint64_t sum = 0;
  for (auto i = static_cast<std::size_t>(first); i <= static_cast<std::size_t>(last); ++i)
    sum += agent::outstanding(a.traffic.tallies[i]);
  return static_cast<std::uint32_t>(sum);
}
template <typename Of>
std::uint64_t sum(const Agent& a, Kinds kinds, Of of) noexcept {
  std::uint64_t all = 0;
  for (const OperationKind kind : kinds) all += std::invoke(of, agent::tally(a, kind));
  return all;
}
std::uint32_t outstanding(const Agent& a, Kinds kinds) noexcept {
  return static_cast<std::uint32_t>(
      sum(a, kinds, [](const agent::Tally& t) { return agent::outstanding(t); }));
}

ConnectionStats stats_of(const Agent& a) noexcept {
  ConnectionStats stats;
  stats.messages_sent = agent::messages_sent(a);
  stats.bytes_sent = sum(a, kMessages, &agent::Tally::bytes);
  stats.messages_received = a.traffic.messages_received;
  stats.bytes_received = a.traffic.bytes_received;
  stats.writes = sum(a, kWrites, &agent::Tally::done);
  stats.bytes_written = sum(a, kWrites, &agent::Tally::bytes);
  stats.reads = sum(a, kReads, &agent::Tally::done);
  stats.bytes_read = sum(a, kReads, &agent::Tally::bytes);
  stats.atomics = sum(a, kAtomics, &agent::Tally::done);
  // A rendezvous message counts as a SEND; its parts are of other kinds.
  stats.outstanding = outstanding(a, OperationKind::send, OperationKind::raw_write_imm);
  stats.send_credits = agent::visible_credits(a);
  stats.granted_credits = agent::peer_credits(a);
  return stats;
}

/// Whether only rendezvous messages are refused.
bool lacks_window(const agent::EngineContext& ctx, const Agent& a) noexcept {
  if (a.raw != nullptr || a.max_message <= a.send_queue.max_eager) return false;
  const auto& sends = ctx.rendezvous->sends;
  const bool by_window = a.domain == nullptr && ctx.windows.size() != 0;
  return sends.size() == sends.capacity() || (by_window && ctx.windows.free() == 0);
}

Blocker blocker_of(const agent::EngineContext& ctx, const Agent& a) noexcept {
  if (a.state != ConnectionState::ready) return Blocker::not_ready;
  const std::uint32_t room = agent::send_limit_of(a);
  if (room == 0) return Blocker::credit;  // control messages wait for it, too
  if (a.send_queue.used >= room) return Blocker::send_queue;
  if (a.raw == nullptr && agent::visible_credits(a) == 0) return Blocker::credit;
  if (ctx.operations.empty()) return Blocker::operations;
  return lacks_window(ctx, a) ? Blocker::windows : Blocker::nothing;
}

}  // namespace

ConnectionStats Connection::stats() const noexcept {
  const Agent* const a = locate(slot_, index_, generation_).agent;
  return a != nullptr ? stats_of(*a) : ConnectionStats{};
}

ConnectionSnapshot Connection::snapshot() const noexcept {
  const auto [core, a] = locate(slot_, index_, generation_);
  if (a == nullptr) return {};
  const agent::EngineContext& ctx = core->context;
  ConnectionSnapshot now;
  now.state = a->state;
  now.blocked_by = blocker_of(ctx, *a);
  now.silence = ctx.clock.duration(ctx.now - std::min(a->liveness.last_heard, ctx.now));
  now.messages = outstanding(*a, kMessages);
  now.writes = outstanding(*a, kWrites);
  now.reads = outstanding(*a, kReads);
  now.atomics = outstanding(*a, kAtomics);
  now.control = outstanding(*a, {OperationKind::rendezvous_bind}) + a->control_queue.waiting +
                outstanding(*a, OperationKind::credit_return, OperationKind::lease_unbind);
  now.leased_out = a->leases.granted_count;
  now.leased_out_bytes = a->leases.granted_bytes;
  now.leases_held = a->leases.held_count;
  now.leases_held_bytes = a->leases.held_bytes;
  if (a->raw != nullptr) now.receives = a->raw->accepted - a->raw->completed;
  now.stats = stats_of(*a);
  return now;
}

std::string Connection::peer() const {
  const Agent* const a = locate(slot_, index_, generation_).agent;
  return a != nullptr ? std::string(a->peer.name.data()) : std::string();
}

}  // namespace spinwire
