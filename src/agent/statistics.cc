// Counters and snapshots of a connection and of an engine, for the application. Cold.
#include <algorithm>
#include <functional>
#include <initializer_list>

#include "agent/agent.h"
#include "base/error.h"

namespace spinwire::agent {
namespace {

using Kinds = std::initializer_list<OperationKind>;
constexpr Kinds kMessages = {OperationKind::send, OperationKind::send_imm, OperationKind::raw_send,
                             OperationKind::raw_send_imm};
constexpr Kinds kWrites = {OperationKind::write, OperationKind::write_imm,
                           OperationKind::raw_write_imm};
constexpr Kinds kReads = {OperationKind::read};
constexpr Kinds kAtomics = {OperationKind::compare_swap, OperationKind::fetch_add};

/// Operations that have not ended, of the kinds for which `counts` answers true.
std::uint32_t outstanding(const Agent& a, bool (*counts)(OperationKind)) noexcept {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < kOperationKinds; ++i) {
    if (counts(static_cast<OperationKind>(i))) sum += outstanding(a.tallies[i]);
  }
  return static_cast<std::uint32_t>(sum);
}
template <typename Of>
std::uint64_t sum(const Agent& a, Kinds kinds, Of of) noexcept {
  std::uint64_t all = 0;
  for (const OperationKind kind : kinds) all += std::invoke(of, tally(a, kind));
  return all;
}
std::uint32_t outstanding(const Agent& a, Kinds kinds) noexcept {
  return static_cast<std::uint32_t>(sum(a, kinds, [](const Tally& t) { return outstanding(t); }));
}

}  // namespace

ConnectionStats stats(const Agent& a) noexcept {
  ConnectionStats stats;
  stats.messages_sent = messages_sent(a);
  stats.bytes_sent = a.activity.direct_bytes + sum(a, kMessages, &Tally::bytes);
  stats.messages_received = a.activity.messages_received;
  stats.bytes_received = a.activity.bytes_received;
  stats.writes = sum(a, kWrites, &Tally::done);
  stats.bytes_written = sum(a, kWrites, &Tally::bytes);
  stats.reads = sum(a, kReads, &Tally::done);
  stats.bytes_read = sum(a, kReads, &Tally::bytes);
  stats.atomics = sum(a, kAtomics, &Tally::done);
  // A rendezvous message counts as a SEND; its parts have other kinds.
  stats.outstanding = outstanding(a, is_users);
  stats.send_credits = visible_credits(a);
  stats.granted_credits = peer_credits(a);
  return stats;
}

bool lacks_window(const EngineContext& ctx, const Agent& a) noexcept {
  if (a.raw != nullptr || a.max_message <= a.send_queue.max_eager) return false;
  const auto& sends = ctx.rendezvous->sends;
  std::uint32_t free = sends.capacity() - sends.size();
  const bool takes_window =
      a.domain == nullptr && !offers_locally(ctx, a) && ctx.windows.size() != 0;
  if (takes_window) free = std::min(free, ctx.windows.free());
  return !has_share(a.source->offers, free);
}

namespace {

Blocker blocker_of(const EngineContext& ctx, const Agent& a) noexcept {
  if (a.state != ConnectionState::ready) return Blocker::not_ready;
  const std::uint32_t room = send_limit_of(a);
  if (room == 0) return Blocker::credit;  // control messages also wait for credit
  if (a.send_queue.used >= room) return Blocker::send_queue;
  if (a.raw == nullptr && visible_credits(a) == 0) return Blocker::credit;
  if (ctx.operations.empty()) return Blocker::operations;
  return lacks_window(ctx, a) ? Blocker::windows : Blocker::nothing;
}

}  // namespace

ConnectionSnapshot snapshot(const EngineContext& ctx, const Agent& a) noexcept {
  ConnectionSnapshot now;
  now.state = a.state;
  now.blocked_by = blocker_of(ctx, a);
  now.since_last_heard = ctx.clock.duration(ctx.now - std::min(a.activity.last_heard, ctx.now));
  now.messages = outstanding(a, kMessages);
  now.writes = outstanding(a, kWrites);
  now.reads = outstanding(a, kReads);
  now.atomics = outstanding(a, kAtomics);
  now.control = outstanding(a, {OperationKind::rendezvous_bind}) + a.control_counts.waiting +
                outstanding(a, is_agents_own);
  now.leased_out = a.leases.granted_count;
  now.leased_out_bytes = a.leases.granted_bytes;
  now.leases_held = a.leases.held_count;
  now.leases_held_bytes = a.leases.held_bytes;
  if (a.raw != nullptr) now.receives = a.raw->accepted - a.raw->completed;
  now.stats = stats(a);
  return now;
}

EngineStats stats(const EngineContext& ctx) noexcept {
  EngineStats all = stats_without_agents(ctx);
  for (const Agent& a : ctx.agents) {  // ended connections are counted already
    all.operations += outstanding(a);
    all.messages_sent += messages_sent(a);
    all.messages_received += messages_received(a);
  }
  return all;
}

EngineStats stats_without_agents(const EngineContext& ctx) noexcept {
  EngineStats all = ctx.stats;
  all.connections = ctx.agents.size();
  all.own_domains = static_cast<std::uint32_t>(ctx.device->domains());
  all.registrations = ctx.registrations->size();
  all.receives = ctx.posted_receives;
  all.windows_free = ctx.windows.free();
  all.reserved_receives =
      ctx.reserved_receives + (ctx.own_queues != nullptr ? ctx.own_queues->reserved_receives : 0);
  return all;
}

Result<QueuePairState> query_state(const EngineContext& ctx, const Agent& a) {
  return ctx.device->query_state(a.qp).map([](ibv_qp_state state) {
    const auto number = static_cast<unsigned>(state);
    const bool known = number <= static_cast<unsigned>(QueuePairState::err);
    return known ? static_cast<QueuePairState>(number) : QueuePairState::unknown;
  });
}

}  // namespace spinwire::agent
