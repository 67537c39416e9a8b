#include "engine/engine_snapshot.h"

#include <array>

#include "agent/agent.h"
#include "engine/engine_core.h"

namespace spinwire::engine {

using detail::EngineCore;

memory::PoolId pool_id(Pool pool) noexcept {
  return pool == Pool::send      ? memory::PoolId::send
         : pool == Pool::lease   ? memory::PoolId::lease
         : pool == Pool::receive ? memory::PoolId::receive
                                 : memory::PoolId::rendezvous;
}

std::string_view name_of(Pool pool) noexcept {
  constexpr std::array<std::string_view, 4> kNames = {"send", "lease", "rendezvous", "receive"};
  return kNames[static_cast<std::size_t>(pool)];
}

MemoryStats memory_stats(const EngineCore& core, Pool pool) noexcept {
  const memory::PoolStats p = core.context.arena->stats(pool_id(pool));
  return {p.chunks * memory::kChunkBytes, p.free_chunks * memory::kChunkBytes, p.blocks_used,
          p.allocations, p.refusals};
}

void add_control_counters(const control::ControlPort& control, EngineStats& stats) noexcept {
  stats.handshakes_refused = control.refusals();
  const auto& counts = control.authentication();
  const auto failures = [&](control::AuthenticationFailure why) {
    return counts.failures[static_cast<std::size_t>(why)];
  };
  using enum control::AuthenticationFailure;
  stats.authentication = {counts.authenticated,        failures(no_proof),
                          failures(unknown_key),       failures(wrong_proof),
                          failures(unconfirmed_proof), failures(unproven_server),
                          failures(altered_frame)};
}

EngineStats stats_at_a_glance(const EngineCore& core) noexcept {
  EngineStats stats = agent::stats_without_agents(core.context);
  core.sums.add_to(stats);
  add_control_counters(core.control, stats);
  return stats;
}

RpcStats call_stats(const EngineCore& core) noexcept {
  return core.calls != nullptr ? rpc::stats(*core.calls) : RpcStats{};
}

EngineSnapshot snapshot(const EngineCore& core) noexcept {
  EngineSnapshot now;
  now.stats = stats_at_a_glance(core);
  now.calls = call_stats(core);
  for (std::size_t i = 0; i < now.pools.size(); ++i)
    now.pools[i] = memory_stats(core, static_cast<Pool>(i));
  now.connections_by_blocker = core.sums.by_blocker();
  now.draining = core.drain.is_under_way();
  return now;
}

}  // namespace spinwire::engine
