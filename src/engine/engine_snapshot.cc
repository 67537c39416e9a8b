#include "engine/engine_snapshot.h"

#include <fmt/core.h>

#include <array>
#include <string>

#include "agent/agent.h"
#include "agent/connecting.h"
#include "engine/engine_core.h"
#include "rpc/client_session.h"
#include "rpc/session_goodbye.h"
#include "rpc/session_snapshot.h"
#include "spinwire/version.h"

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

namespace {

double seconds(Nanoseconds time) noexcept { return std::chrono::duration<double>(time).count(); }

void describe_engine(const EngineCore& core, std::string& text) {
  const EngineSnapshot now = snapshot(core);
  const EngineStats stats = agent::stats(core.context);
  text += fmt::format("spinwire {} engine on {}: {} polls, {} control steps{}\n", version(),
                      core.context.device->info().name, stats.polls, stats.control_steps,
                      now.draining ? ", draining" : "");
  text +=
      fmt::format("connections {}, operations {}, messages sent {} received {}, peers lost {}\n",
                  stats.connections, stats.operations, stats.messages_sent, stats.messages_received,
                  stats.peers_lost);
  text += fmt::format("sessions {}, served {}, calls {}, replies {}, served calls {}\n",
                      now.calls.sessions, now.calls.served_sessions, now.calls.calls,
                      now.calls.replies, now.calls.served);
  for (std::size_t i = 0; i < now.pools.size(); ++i) {
    const MemoryStats& pool = now.pools[i];
    text += fmt::format("pool {}: {} bytes, {} free, {} blocks used, {} refusals\n",
                        name_of(static_cast<Pool>(i)), pool.pool_bytes, pool.free_bytes,
                        pool.blocks_used, pool.refusals);
  }
}

void describe_connections(const EngineCore& core, std::string& text) {
  for (const agent::Agent& a : core.context.agents) {
    const ConnectionSnapshot now = agent::snapshot(core.context, a);
    const agent::AgentId id = agent::id_of(a);
    text += fmt::format(
        "connection {}-{} to '{}': {}, blocked by {}, heard {:.3f} s ago, outstanding "
        "{}, credit {}, peer's credit {}, sent {}, received {}\n",
        id.index, id.generation, agent::peer_name(a), to_string(now.state),
        to_string(now.blocked_by), seconds(now.since_last_heard), now.stats.outstanding,
        now.stats.send_credits, now.stats.granted_credits, now.stats.messages_sent,
        now.stats.messages_received);
  }
}

void describe_sessions(const rpc::Rpc& r, std::string& text) {
  for (std::uint32_t i = 0; i < r.clients.capacity(); ++i) {
    if (!r.clients.in_use(i)) continue;
    const rpc::ClientSession& c = r.clients.at(i);
    const SessionSnapshot now = rpc::snapshot(r, c);
    text += fmt::format(
        "session {}-{} to '{}': {}, blocked by {}, heard {:.3f} s ago, in flight {} of "
        "{}, long {}, backlog {}, calls {}, sent again {}, srtt {:.6f} s\n",
        i, c.generation, c.address, to_string(now.state), to_string(now.blocked_by),
        seconds(now.since_last_heard), now.in_flight, now.window, now.long_calls, now.backlog,
        now.calls, now.retransmissions, seconds(now.srtt));
  }
  for (std::uint32_t i = 0; i < r.servers.capacity(); ++i) {
    if (!r.servers.in_use(i)) continue;
    const rpc::ServerSession& s = r.servers.at(i);
    text += fmt::format("served session {}-{} of '{}': {} calls in progress, window {}{}\n", i,
                        r.servers.generation(i), rpc::identity_of(s.peer).address,
                        rpc::calls_in_progress(s), s.window, rpc::is_leaving(s) ? ", leaving" : "");
  }
}

}  // namespace

std::string describe(const EngineCore& core) {
  std::string text;
  describe_engine(core, text);
  describe_connections(core, text);
  if (core.calls != nullptr) describe_sessions(*core.calls, text);
  return text;
}

}  // namespace spinwire::engine
